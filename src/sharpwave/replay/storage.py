"""Where transitions lie: one tensor a field, (slots, ...), on a device, in pinned memory, or in sparse files."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sharpwave.replay.nest import as_tensor, check_name

# Rewards enter arithmetic and ends enter logic, so these have one dtype whatever comes.
FIXED_DTYPES = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}
# NumPy's dtype for each, and whether it is the same: bfloat16, which NumPy lacks, is kept as its 16 bits.
NUMPY = {
    getattr(torch, name): (np.dtype(name), True)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {torch.bfloat16: (np.dtype(np.int16), False)}
# PyTorch's operators know these only to copy them: as numbers with a sign the same bits pass through all of them.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_LEADS = ("batch", "num_envs", "steps, num_envs")
_LAYOUT = "sharpwave-replay.json"


@dataclass(frozen=True)
class Field:
    """Shape and dtype of one item of a field."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class Storage:
    """`slots` items of each field; `fields` and `tensors` are by dotted path.

    Args:
        slots: number of items.
        fields: each field's item.
        where: a torch device; "pinned" (page-locked host memory, which a GPU copies from fastest); or the path of a
            directory that does not exist yet or is empty, for memory-mapped sparse files, one a field.
    """

    def __init__(self, slots: int, fields: Mapping[str, Field], where: torch.device | str | os.PathLike):
        for path, field in fields.items():
            check_name(path)
            for end in range(len(path)):
                if path[end] == "." and path[:end] in fields:
                    raise ValueError(f"field {path!r} lies within {path[:end]!r}, which is a field too: rename one")
            if field.dtype not in NUMPY:
                raise TypeError(
                    f"field {path!r}: dtype {field.dtype} cannot be stored; use one of {[*map(str, NUMPY)]}"
                )
        self.slots = slots
        self.fields = dict(fields)
        if isinstance(where, torch.device):
            self.device = where
            self.tensors = {k: _zeros(slots, f, where) for k, f in fields.items()}
        else:
            self.device = torch.device("cpu")
            self.tensors = _pinned(slots, fields) if where == "pinned" else _mapped(slots, fields, Path(where))
        on_cpu = self.device.type == "cpu"
        # Views made once: taking one costs as much as copying a hundred small items.
        self.arrays = {k: as_array(t) for k, t in self.tensors.items()} if on_cpu else {}
        self.row_bytes = {k: f.bytes for k, f in fields.items()}

    def check(
        self,
        flat: Mapping[str, object],
        lead: tuple[int, ...] | None = None,
        fields: Mapping[str, Field] | None = None,
    ) -> dict[str, Tensor]:
        """The fields (or these `fields`) of one `add` as tensors of their dtypes.

        Args:
            lead: what comes before an item's shape: (environments,) or (steps, environments). None: any one batch size.

        Raises:
            KeyError: a field missing or new.
            ValueError: a wrong shape, or numbers that the field cannot hold.
            TypeError: a wrong dtype, or no tensor.
        """
        of_steps = lead is not None
        fields = self.fields if fields is None else fields
        if flat.keys() != fields.keys():
            missing, new = fields.keys() - flat.keys(), flat.keys() - fields.keys()
            raise KeyError(
                f"add() must get the fields {sorted(fields)}: missing {sorted(missing)}, unknown {sorted(new)}"
            )
        tensors = {}
        for path, spec in fields.items():
            tensor = as_tensor(flat[path], path)
            found = tensor.shape[:1] if lead is None else lead
            if not found or tensor.shape != (*found, *spec.shape):
                raise _wrong_shape(path, tensor.shape, spec.shape, lead, of_steps)
            lead = found
            if tensor.dtype != spec.dtype:
                if path not in FIXED_DTYPES:
                    raise TypeError(f"field {path!r} must be {spec.dtype}; got {tensor.dtype}: convert it before add()")
                tensor = _fixed(tensor, spec.dtype, path)
            tensors[path] = tensor
        return tensors


def check_directory(directory: Path) -> None:
    """Raise unless new files can go into `directory` without touching any other."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"storage directory {directory} exists and is not empty: choose another; nothing was changed")


def _wrong_shape(
    path: str, given: tuple[int, ...], item: tuple[int, ...], lead: tuple[int, ...] | None, of_steps: bool
) -> ValueError:
    depth = len(lead) if lead else 1
    names = _LEADS[depth if of_steps else 0]
    if len(given) < depth or tuple(given[depth:]) != item:
        return ValueError(f"field {path!r} must be ({names}, *{item}); got {tuple(given)}")
    assert lead is not None
    want = {
        "batch": f"{lead[0]} items, as the others",
        "num_envs": f"num_envs = {lead[-1]} rows",
        "steps, num_envs": f"{lead[0]} steps of num_envs = {lead[-1]} rows",
    }[names]
    return ValueError(f"field {path!r} must hold {want}; got {tuple(given[:depth])}")


def _fixed(tensor: Tensor, dtype: torch.dtype, path: str) -> Tensor:
    """As the dtype that FIXED_DTYPES has for it; on a CPU, where looking is free, only if it can hold the numbers."""
    if dtype == torch.bool and tensor.is_cpu and not ((tensor == 0) | (tensor == 1)).all():
        raise ValueError(f"field {path!r} tells whether an episode ended: it must be bool, or hold 0 and 1")
    if tensor.is_complex():
        raise TypeError(f"field {path!r} is kept as {dtype}; got {tensor.dtype}: add its real part")
    converted = tensor.to(dtype)
    if tensor.dtype == torch.float64 and tensor.is_cpu and not math.isfinite(converted.sum()):
        lost = converted.isinf() & ~tensor.isinf()
        if lost.any():
            raise ValueError(f"field {path!r} is kept as {dtype}, which cannot hold {tensor[lost][0].item()}: scale it")
    return converted


def infer_fields(flat: Mapping[str, object], lead: tuple[int, ...] | None = None) -> dict[str, Field]:
    """Fields from the first batch: shape without its lead (see `Storage.check`), dtype as it comes (but see
    FIXED_DTYPES)."""
    depth, names = (1, _LEADS[0]) if lead is None else (len(lead), _LEADS[len(lead)])
    fields = {}
    for path, value in flat.items():
        check_name(path)
        tensor = as_tensor(value, path)
        if tensor.ndim == 0:
            raise ValueError(f"field {path!r} must be ({names}, ...); got a scalar: add a leading batch dimension")
        if tensor.ndim < depth or (path in FIXED_DTYPES and tensor.ndim != depth):
            want = f"({names}), one number an item" if path in FIXED_DTYPES else f"({names}, ...)"
            raise ValueError(f"field {path!r} must be {want}; got {tuple(tensor.shape)}")
        fields[path] = Field(tuple(tensor.shape[depth:]), FIXED_DTYPES.get(path, tensor.dtype))
    if not fields:
        raise ValueError("add() must get at least one field, such as obs=..., action=..., reward=...")
    return fields


def movable(tensor: Tensor) -> Tensor:
    """A view that every operator takes, for what only moves its items."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array, a view if it can be one (it is on a CPU); bfloat16, which NumPy lacks, as its 16 bits."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    try:
        return bits.numpy()
    except (TypeError, RuntimeError):  # on another device, or a lazy conjugate or negative
        return bits.numpy(force=True)


def _zeros(slots: int, field: Field, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros((slots, *field.shape), dtype=field.dtype, device=device)
    # NumPy asks for huge pages where PyTorch does not; rows are read at random, so page table walks count.
    return _as_field(torch.from_numpy(np.zeros(max(slots * field.bytes, 1), np.uint8)), slots, field)


def _as_field(memory: Tensor, slots: int, field: Field) -> Tensor:
    return memory[: slots * field.bytes].view(field.dtype).view(slots, *field.shape)


def _pinned(slots: int, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    if not torch.cuda.is_available():
        raise ValueError("storage='pinned' needs a CUDA GPU: use storage='cpu'")
    return {k: torch.zeros((slots, *f.shape), dtype=f.dtype, pin_memory=True) for k, f in fields.items()}


def _mapped(slots: int, fields: Mapping[str, Field], directory: Path) -> dict[str, Tensor]:
    check_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, field in fields.items():
        size = max(slots * field.bytes, 1)
        with open(directory / f"{path}.bin", "xb") as file:
            file.truncate(size)  # a hole: the disk gives blocks only to what is written
        memory = torch.from_numpy(np.memmap(directory / f"{path}.bin", np.uint8, "r+", shape=(size,)))
        tensors[path] = _as_field(memory, slots, field)
    layout = {k: [list(f.shape), str(f.dtype)] for k, f in fields.items()}
    (directory / _LAYOUT).write_text(json.dumps({"slots": slots, "fields": layout}, indent=1) + "\n")
    return tensors
