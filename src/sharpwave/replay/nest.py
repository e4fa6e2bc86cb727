"""Nests of named tensors: what `add` takes and `sample` returns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Batch(dict):
    """A dict whose entries are attributes too: `batch.obs` is `batch["obs"]`; nested fields are Batches.

    Copied and pickled as any dict; a copy is no batch for `out=`.
    """

    __slots__ = ("_outputs",)
    _outputs: Any
    """The memory behind the entries, as the buffer that made them keeps it for `out=`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has no field {name!r}; it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_outputs":
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __repr__(self) -> str:
        """Dtypes and shapes; values are an entry's own to print."""
        return f"Batch({', '.join(f'{name}={_brief(value)}' for name, value in self.items())})"

    def __reduce__(self):
        # A copy is of the entries alone: it must not pass for the memory that `out=` overwrites.
        return Batch, (), None, None, iter(self.items())


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


# What `sample` adds to the fields.
DRAWN = ("indices", "weights", "probabilities", "generations", "discount", "mask")


def check_name(path: str) -> None:
    """Raise unless each part of a dotted path can be a field's name."""
    for part in path.split("."):
        if part in DRAWN:
            raise ValueError(
                f"field {path!r}: {part!r} is what sample() returns beside the fields; choose another name"
            )
        if part.startswith("_") or hasattr(Batch, part) or not part.isidentifier():
            raise ValueError(f"field {path!r}: {part!r} cannot be an attribute of a batch; choose another name")


def flatten(nest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"obs": {"image": x}} as {"obs.image": x}; takes any Mapping, and a TensorDict where one comes."""
    flat: dict[str, Any] = {}
    for key, value in nest.items():
        if not isinstance(key, str):
            raise TypeError(f"field names must be str; got {key!r} of {type(key).__name__}")
        if isinstance(value, Mapping) or hasattr(value, "batch_size"):  # a TensorDict is no Mapping everywhere
            flat = merge(flat, flatten(value, f"{prefix}{key}."))
        elif prefix + key in flat:
            raise _twice(prefix + key)
        else:
            flat[prefix + key] = value
    return flat


def merge(flat: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, which must not share a path."""
    if both := flat.keys() & more.keys():
        raise _twice(min(both))
    return flat | more


def _twice(path: str) -> ValueError:
    return ValueError(f"field {path!r} is given twice, under one name: rename one of them")


def put(batch: Batch, path: str, value: Any) -> None:
    """Set a dotted path in a nest of Batches."""
    *parents, name = path.split(".")
    for parent in parents:
        batch = batch.setdefault(parent, Batch())
    batch[name] = value


def find(nest: Mapping[str, Any], path: str) -> Any:
    """What lies at a dotted path; None if nothing does."""
    value: Any = nest
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def as_tensor(value: Any, path: str) -> Tensor:
    """A tensor that shares memory with `value` where it can: not with an array of negative strides, of another
    machine's byte order, or that is read-only.

    Raises:
        TypeError: neither tensor nor array, nor numbers that make one.
        ValueError: a sparse or nested tensor, or one on device "meta".
    """
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided or value.is_nested:
            kind = "on device 'meta'" if value.is_meta else "that is nested" if value.is_nested else str(value.layout)
            raise ValueError(f"field {path!r} must be a dense tensor with values; got one {kind}")
        return value.detach() if value.requires_grad else value
    try:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.kind in "USMm":
            raise TypeError(array.dtype)
        if not (array.flags.writeable and array.dtype.isnative):
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        try:
            return torch.from_numpy(array)
        except ValueError:  # strides that PyTorch lacks
            return torch.from_numpy(array.copy(order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"field {path!r} must be a tensor or an array of numbers; got {type(value).__name__} ({error})"
        ) from None
