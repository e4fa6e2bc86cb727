"""What an update learnt of the segments it drew, written back to where they are kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpwave.ops import _backends


def write_back(
    stored: Sequence[Tensor],
    fresh: Sequence[Tensor],
    index: Tensor,
    keep: Tensor,
    *,
    backend: _backends.Backend = "auto",
) -> None:
    """Rows of an update into the rows they were drawn from; of a row drawn twice, the last draw's.

        stored[i][index[m], t] = fresh[i][m, t]    where fresh is finite, keep is finite, and no m' > m has its index

    Args:
        stored: (N, T) float32 each, contiguous; written in place.
        fresh: (M, T) float32 each; columns may lie apart, as those of a wider matrix do.
        index: (M,) int64, in [0, N).
        keep: 0-d floating tensor, usually the loss: where it is not finite, nothing is written.
        backend: see `sharpwave.ops`.

    Deterministic, whatever the order of the writes. In one launch on a GPU.

    Raises:
        ValueError: a shape does not fit. TypeError: `index` is not int64.
    """
    if index.dtype != torch.int64:
        raise TypeError(f"index must be int64; got {index.dtype}")
    for old, new in zip(stored, fresh, strict=True):
        if old.ndim != 2 or not old.is_contiguous():
            raise ValueError(f"stored must be contiguous (N, T); got {tuple(old.shape)}, strides {old.stride()}")
        if new.shape != (index.shape[0], old.shape[1]):
            raise ValueError(f"fresh must be {(index.shape[0], old.shape[1])}; got {tuple(new.shape)}")
    _backends.load("write_back", index.device, backend).write_back(stored, fresh, index, keep)
