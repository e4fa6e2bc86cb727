"""A buffer's state out of it and back: copies in memory, and checkpoints on disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpwave.ops._backends import choose, present
from sharpwave.ops.sumtree import MAX_LEAF, check_settings, tree_rebuild
from sharpwave.replay.checks import check_declared_steps, check_kinds, declared, storage_place
from sharpwave.replay.state import NOTHING
from sharpwave.replay.storage import Field
from sharpwave.run import checkpoint
from sharpwave.run.errors import CheckpointError

if TYPE_CHECKING:
    from sharpwave.replay.core import Replay

_KIND = "sharpwave-replay"
_VERSION = 1
_KINDS = {
    "kind": str,
    "layout": Mapping,
    "spec": Mapping,
    "used": int,
    "alpha": (int, float),
    "tensors": Mapping,
    "fields": Mapping,
}
_SETTINGS = ("gamma", "eta", "stratified", "weight_norm", "eps", "p_max", "max_priority_over")
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def state_dict(buffer: "Replay") -> dict[str, Any]:
    """See `Replay.state_dict`. Of each ring only the part that was ever written is kept."""
    return _describe(buffer) | {
        "tensors": {k: t.clone() for k, t in buffer.state.tensors.items()},
        "fields": {k: t.clone() for k, t in _used(buffer).items()},
    }


def load_state_dict(buffer: "Replay", state: Mapping[str, Any]) -> None:
    """See `Replay.load_state_dict`."""
    if not isinstance(state, Mapping) or state.get("format") != _KIND:
        raise ValueError(f"state must be what a replay buffer's state_dict() returned; got {type(state).__name__}")
    if state.get("version") != _VERSION:
        raise ValueError(
            f"state has version {state.get('version')!r}, this sharpwave reads {_VERSION}: upgrade sharpwave"
        )
    mine = _describe(buffer)
    if missing := (mine.keys() | {"tensors", "fields"}) - state.keys() - {"settings"}:
        raise ValueError(f"state lacks {sorted(missing)}: it is damaged")
    check_kinds(state, _KINDS)
    if state["kind"] != mine["kind"]:
        raise ValueError(f"state is of kind {state['kind']}, this buffer of {mine['kind']}: load it with its own kind")
    _check_layout(buffer, state["layout"], mine["layout"])
    _check_same_settings(state.get("settings", {}), mine["settings"])
    check_settings(state["alpha"], buffer.eps, buffer.p_max)
    if not 0 <= state["used"] <= buffer.state.layout.ring:
        raise ValueError(
            f"state's 'used' must be in [0, {buffer.state.layout.ring}]; got {state['used']!r}: it is damaged"
        )
    if buffer.storage is not None and mine["spec"] != state["spec"]:
        raise ValueError(f"state holds the fields {state['spec']}, this buffer {mine['spec']}")
    own = buffer.state.tensors
    for key, tensor in own.items():
        given = state["tensors"].get(key)
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise ValueError(f"state's tensor {key!r} must be {tuple(tensor.shape)} {tensor.dtype}: it is damaged")
    _check_values(state["tensors"], buffer.state.layout.ring)
    spec = _fields(state["spec"], bool(buffer.state.layout.envs))
    lead = (max(buffer.state.layout.envs, 1), state["used"])
    for key, field in spec.items():
        given = state["fields"].get(key)
        if not isinstance(given, Tensor) or tuple(given.shape) != (*lead, *field.shape) or given.dtype != field.dtype:
            raise ValueError(f"state's field {key!r} must be {(*lead, *field.shape)} {field.dtype}: it is damaged")
    if buffer.storage is None and spec:
        buffer._make_storage(spec)
    for key, tensor in own.items():
        tensor.copy_(state["tensors"][key])
    for key, tensor in _used(buffer, state["used"]).items():
        tensor.copy_(state["fields"][key])
    tree_rebuild(buffer.state.tree)
    buffer._alpha = float(state["alpha"])


def save(buffer: "Replay", path: str | os.PathLike) -> None:
    """See `Replay.save`."""
    tensors = {f"state.{k}": t for k, t in buffer.state.tensors.items()}
    tensors |= {f"field.{k}": t for k, t in _used(buffer).items()}
    checkpoint.save(Path(path), tensors, _describe(buffer) | {"options": buffer._options, "device": buffer.device.type})


def load(cls: Any, path: Any, device: Any, storage: Any, backend: Any) -> "Replay":
    """See `Replay.load`."""
    tensors, meta = checkpoint.load(path)
    if meta.get("format") != _KIND:
        raise CheckpointError(f"{path} holds no replay buffer: give a directory that a buffer's save() wrote")
    try:
        check_kinds(meta, {"kind": str, "version": int, "options": Mapping, "device": str})
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if meta["kind"] != cls.kind:
        raise CheckpointError(f"{path} holds a {meta['kind']}: load it with {meta['kind']}.load")
    if meta["version"] != _VERSION:
        raise CheckpointError(
            f"{path} has version {meta['version']!r}, this sharpwave reads {_VERSION}: upgrade sharpwave"
        )
    device = present(meta["device"] if device is None else device)
    storage_place(storage, device)  # the caller's own mistakes are no damage
    choose("sumtree", device.type, backend)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["options"].items()}
    parts = {
        name: {k.split(".", 1)[1]: t for k, t in tensors.items() if k.startswith(name)} for name in ("state", "field")
    }
    try:
        buffer = cls(**options, device=device, storage=storage, backend=backend)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its 'options' make no {cls.kind} ({error}): it is damaged") from error
    try:
        load_state_dict(buffer, meta | {"tensors": parts["state"], "fields": parts["field"]})
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return buffer


def _fields(spec: Mapping[str, Any], steps: bool) -> dict[str, Field]:
    if not all(isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[1], str) for x in spec.values()):
        raise ValueError(f"state's 'spec' must hold each field's shape and dtype; got {spec!r:.80}: it is damaged")
    if unknown := {dtype for _, dtype in spec.values()} - _DTYPES.keys():
        raise ValueError(f"state holds fields of {sorted(unknown)}, which this PyTorch lacks: upgrade PyTorch")
    fields = declared({k: (shape, _DTYPES[dtype]) for k, (shape, dtype) in spec.items()}) if spec else {}
    if steps and fields:
        check_declared_steps(fields)
    return fields


def _check_same_settings(given: Any, mine: Mapping[str, Any]) -> None:
    """Raise where the buffers would draw, weigh or add differently. States of before settings were kept have none."""
    if not isinstance(given, Mapping):
        raise ValueError(f"state's 'settings' must be a mapping; got {given!r:.60}: it is damaged")
    differ = [f"{k}={given[k]!r}, not {mine[k]!r}" for k in mine.keys() & given.keys() if given[k] != mine[k]]
    if differ:
        raise ValueError(
            f"state is of a buffer with {', '.join(sorted(differ))}: make this one with the same arguments"
        )


def _check_layout(buffer: "Replay", given: Mapping[str, int], mine: Mapping[str, int]) -> None:
    if given == mine:
        return
    if given.keys() != mine.keys():
        raise ValueError(f"state's layout must hold {sorted(mine)}; got {sorted(given)}: it is damaged")

    def arguments(layout: Mapping[str, int]) -> dict[str, Any]:
        span = "n_step" if buffer.kind == "PrioritizedReplay" else "burn_in + length"
        return {
            "capacity": layout["ring"] * max(layout["envs"], 1),
            "num_envs": layout["envs"] or None,
            span: layout["span"],
            "pad": layout["short"],
            "period": layout["period"],
            "frame_stack": layout["frames"],
        }

    theirs, ours = arguments(given), arguments(mine)
    differ = " and ".join(f"{k} {theirs[k]}, not {ours[k]}" for k in ours if theirs[k] != ours[k])
    raise ValueError(f"state is of a buffer with {differ}: make this one with the same arguments")


def _check_values(t: Mapping[str, Tensor], ring: int) -> None:
    """Raise unless a buffer could have come to hold this: a kernel trusts it as indices, counts and mass."""
    beta = t["beta"]
    leaves, generation, (held, written, *_) = t["leaves"], t["generation"], t["counters"].tolist()
    within = {
        "leaves": ((leaves >= 0) & (leaves <= MAX_LEAF), f"in [0, {MAX_LEAF:.0f}]"),
        "generation": ((generation >= NOTHING) & (generation < written), "-1, or the number of an item added"),
        "step": (t["step"] >= 0, "at least 0"),
        "head": ((t["head"] >= 0) & (t["head"] < ring), f"in [0, {ring})"),
        "episode_step": (t["episode_step"] >= 0, "at least 0"),
        "counters": (t["counters"] >= 0, "at least 0"),
        "max_priority": ((t["max_priority"] >= 0) & (t["max_priority"] < torch.inf), "finite and at least 0"),
        "beta": ((beta >= 0) & torch.cat([beta[:2] < torch.inf, beta[2:] >= 0]), "as the constructor takes it"),
        "offset": ((t["offset"] >= 0) & (t["offset"] < 2**48), "in [0, 2^48)"),
        "status": (t["status"] >= 0, "at least 0"),
    }
    for key, (good, want) in within.items():
        if not good.all():
            raise ValueError(f"state's tensor {key!r} must be {want}; got {t[key][~good][0].item()}: it is damaged")
    drawable = leaves > 0
    if (drawable & (generation < 0)).any() or int(drawable.sum()) != held:
        raise ValueError("state's leaves, generations and counters contradict each other: it is damaged")


def _describe(buffer: "Replay") -> dict[str, Any]:
    """All but tensors. (alpha, beta and the seed change with what is loaded; other arguments must be the same.)"""
    layout = buffer.state.layout
    storage = buffer.storage
    spec = {} if storage is None else {k: [list(f.shape), str(f.dtype)] for k, f in storage.fields.items()}
    return {
        "format": _KIND,
        "version": _VERSION,
        "kind": buffer.kind,
        "layout": {k: getattr(layout, k) for k in ("ring", "envs", "span", "short", "period", "frames")},
        "spec": spec,
        "used": _extent(buffer),
        "alpha": buffer.alpha,
        "settings": {name: getattr(buffer, name) for name in _SETTINGS if hasattr(buffer, name)},
    }


def _extent(buffer: "Replay") -> int:
    """Positions of a ring that hold anything: up to the last item, the observation ahead of it, and what follows.

    Slots next to the write head hold no item but still frames that stacks across the ring's seam show: `frames` of them
    at most, and one that keeps an episode's final observation.
    """
    layout = buffer.state.layout
    written = (buffer.state.generation >= 0).view(-1, layout.ring).any(0).nonzero()
    return min(int(written[-1]) + layout.frames + 3, layout.ring) if len(written) else 0


def _used(buffer: "Replay", extent: int | None = None) -> dict[str, Tensor]:
    if buffer.storage is None:
        return {}
    layout = buffer.state.layout
    extent = _extent(buffer) if extent is None else extent
    rings = (max(layout.envs, 1), layout.ring)
    return {k: t.view(*rings, *t.shape[1:])[:, :extent] for k, t in buffer.storage.tensors.items()}
