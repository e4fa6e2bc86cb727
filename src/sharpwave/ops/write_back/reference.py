"""Writing rows back with PyTorch's own scatters."""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_back(stored: Sequence[Tensor], fresh: Sequence[Tensor], index: Tensor, keep: Tensor) -> None:
    """The contract is `sharpwave.ops.write_back.write_back`."""
    draws = torch.arange(index.shape[0], device=index.device)
    winner = torch.zeros(stored[0].shape[0], dtype=torch.int64, device=index.device)
    winner.scatter_reduce_(0, index, draws, "amax", include_self=False)
    source = winner.index_select(0, index)
    for target, rows in zip(stored, fresh, strict=True):
        new, old = rows.index_select(0, source), target.index_select(0, index)
        target.index_copy_(0, index, torch.where(keep.isfinite() & new.isfinite(), new, old))
