"""Selecting, casting and padding rows, one after the other."""

import torch
from torch import Tensor
from torch.nn import functional as F


def gather_rows(source: Tensor, index: Tensor, dtype: torch.dtype, multiple: int) -> Tensor:
    """The contract is `sharpwave.ops.gather.gather_rows`."""
    rows = source.index_select(0, index)
    if source.dtype == torch.uint8 and dtype.is_floating_point:
        rows = rows.float() / 255
    return F.pad(rows.to(dtype), (0, -source.shape[-1] % multiple)).contiguous()
