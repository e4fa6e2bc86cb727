"""Checkpoints that a kill at any instant cannot break, and that run no code when they are read.

A checkpoint is a directory with two files:

    step-000000040960/
      tensors.safetensors   every tensor, by name
      meta.json             {"format": "sharpwave-checkpoint", "version": 1, "tensors": {"bytes", "blake2b"},
                             "meta_blake2b", "meta": {...}}

A run of several ranks keeps what each of the others has to itself beside it, each in a checkpoint of its own, all of
which come into their place together:

    step-000000040960/ranks/rank-1/...

It is written under a temporary name beside its place; both files, then the directory, are synced to the disk; then it
is renamed, and the directory around it is synced. So a directory under its final name is whole, and the newest one is
the one with the highest step: there is no pointer to it that could disagree.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharpwave.run import plain_json
from sharpwave.run.errors import CheckpointError

FORMAT = "sharpwave-checkpoint"
VERSION = 1
TENSORS, META, RANKS = "tensors.safetensors", "meta.json", "ranks"
_STEP = re.compile(r"step-(\d{12,})")


def save(path: Path | str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], ranks: Path | None = None) -> None:
    """Write the checkpoint directory `path`; when this returns it is on the disk.

    Args:
        path: does not exist yet; its parent is made if need be.
        tensors: any shape, dtype, stride and device; views and tensors that share memory are written one by one.
        meta: JSON values with string keys; integers of any size; floats finite (see `flatten` for anything else).
        ranks: a directory of other ranks' checkpoints on the same disk, which becomes a part of this one.

    Raises:
        CheckpointError: `path` exists, or the disk refuses. Nothing is left behind.
        TypeError, ValueError: `meta` is not JSON.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"checkpoint {path} exists: choose another path; nothing was overwritten")
    meta_text = _canonical(meta)
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(_separate(tensors), temporary / TENSORS)
        _sync(temporary / TENSORS)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "tensors": {"bytes": (temporary / TENSORS).stat().st_size, "blake2b": _digest(temporary / TENSORS)},
            "meta_blake2b": _digest_text(meta_text),
            "meta": json.loads(meta_text),
        }
        (temporary / META).write_text(json.dumps(header, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        shutil.copymode(temporary / META, temporary / TENSORS)  # safetensors makes its file for the owner alone
        _sync(temporary / META)
        if ranks is not None:
            os.rename(ranks, temporary / RANKS)
        _sync(temporary)
        os.rename(temporary, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {path}: {_reason(error)}; earlier ones are intact") from error


def load(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint directory: (tensors on the CPU, meta). Sizes and hashes are checked first.

    Raises:
        CheckpointError: missing, truncated, altered, foreign, or of a later version; the message says which.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: give a directory that holds {META} and {TENSORS}")
    header = _read_header(path)
    file, expected = path / TENSORS, header["tensors"]
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                damaged(path, f"{TENSORS} has {size} bytes, {expected['bytes']} were written"),
            )
        if _digest(file) != expected["blake2b"]:
            raise CheckpointError(damaged(path, f"{TENSORS} is not what was written (its hash differs)"))
        return load_file(file), header["meta"]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(damaged(path, f"{TENSORS} cannot be read: {_reason(error)}")) from error


def step_path(directory: Path | str, step: int) -> Path:
    """Where the checkpoint of `step` lies in a run's checkpoint directory."""
    return Path(directory) / f"step-{step:012d}"


def rank_path(ranks: Path, rank: int) -> Path:
    """Where a rank's own checkpoint lies among those of the `ranks`."""
    return ranks / f"rank-{rank}"


def list_steps(directory: Path | str) -> list[int]:
    """The steps of the checkpoints in `directory`, ascending; empty where there is no such directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(p.name) for p in directory.iterdir() if p.is_dir())
    return sorted(int(m[1]) for m in matches if m)


def latest(directory: Path | str) -> Path | None:
    """The newest checkpoint in `directory`, or None."""
    steps = list_steps(directory)
    return step_path(directory, steps[-1]) if steps else None


def prune(directory: Path | str, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed writers left. `keep` must be at least 1.

    A checkpoint is renamed before it is deleted: one under its own name is always whole.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1; got {keep}")
    directory = Path(directory)
    for step in list_steps(directory)[:-keep]:
        path = step_path(directory, step)
        os.rename(path, directory / f".{path.name}.old")
    for leftover in directory.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def flatten(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested state into tensors by name, and JSON that says where each belongs. `unflatten` undoes it exactly.

    A tensor is named by the keys on its way, joined by dots ("policy.encoder.weight"); where two names would be
    equal the second gets a "#2". What JSON lacks is an object with one key: {"$tensor": name},
    {"$array": name} (a NumPy array, stored as a tensor), {"$tuple": [...]}, {"$float": "nan"}, and
    {"$dict": [[key, value], ...]} for a dict whose keys are not all strings or that could be taken for one of these.

    Args:
        state: dicts, lists, tuples, tensors, NumPy arrays and scalars (scalars come back as Python's), int of any
            size, float, str, bool, None.

    Raises:
        TypeError: anything else, named by its place.
    """
    tensors: dict[str, Tensor] = {}

    def store(tensor: Tensor, place: tuple) -> str:
        name = base = ".".join(map(str, place)) or "value"
        count = 1
        while name in tensors:
            count += 1
            name = f"{base}#{count}"
        tensors[name] = tensor
        return name

    def encode(value: Any, place: tuple) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": store(value, place)}
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"$array": store(torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C")), place)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, list):
            return [encode(v, (*place, i)) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": [encode(v, (*place, i)) for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            plain = all(isinstance(k, str) for k in value) and not (len(value) == 1 and next(iter(value))[:1] == "$")
            if plain:
                return {k: encode(v, (*place, k)) for k, v in value.items()}
            return {"$dict": [[encode(k, place), encode(v, (*place, k))] for k, v in value.items()]}
        raise TypeError(
            f"state[{']['.join(map(repr, place))}] is a {type(value).__name__}: a checkpoint holds tensors, NumPy "
            "arrays, numbers, strings, None, and dicts, lists and tuples of them"
        )

    return tensors, encode(state, ())


def unflatten(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """The nested state that `flatten` took apart.

    Raises:
        CheckpointError: a tensor that `structure` names is missing.
    """

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}: its files are not of one checkpoint")
        return tensors[name]

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            tag, content = next(iter(value.items()))
            if tag == "$tensor":
                return tensor(content)
            if tag == "$array":
                return tensor(content).numpy()
            if tag == "$tuple":
                return tuple(decode(v) for v in content)
            if tag == "$float":
                return float(content)
            if tag == "$dict":
                return {decode(k): decode(v) for k, v in content}
        return {k: decode(v) for k, v in value.items()}

    return decode(structure)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, no two of which share memory, as safetensors wants them."""
    out, seen = {}, set()
    for name, tensor in tensors.items():
        t = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        pointer = t.untyped_storage().data_ptr()
        if pointer in seen or t.untyped_storage().nbytes() != t.numel() * t.element_size():
            t = t.clone()
            pointer = t.untyped_storage().data_ptr()
        seen.add(pointer)
        out[name] = t
    return out


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = plain_json.loads((path / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}: it holds no {META}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(damaged(path, f"{META} cannot be read: {_reason(error)}")) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path / META} is not of a sharpwave checkpoint: give a directory that sharpwave wrote")
    if not isinstance(header.get("version"), int) or header["version"] > VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {header.get('version')!r}, this sharpwave reads up to {VERSION}: "
            "upgrade sharpwave"
        )
    try:
        whole = _digest_text(_canonical(header["meta"])) == header["meta_blake2b"]
        whole = whole and {"bytes", "blake2b"} <= header["tensors"].keys()
    except (KeyError, AttributeError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(damaged(path, f"{META} is not what was written"))
    return header


def damaged(path: Path, what: str) -> str:
    """What to say of a checkpoint of which something is not as it was written, and what to do about it."""
    earlier = [s for s in list_steps(path.parent) if step_path(path.parent, s) < path]
    advice = (
        f"delete it to go on from {step_path(path.parent, earlier[-1]).name}" if earlier else "there is none before it"
    )
    return f"checkpoint {path} is damaged: {what}; {advice}"


def _canonical(meta: Any) -> str:
    return json.dumps(meta, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory, and its renames are journalled
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
