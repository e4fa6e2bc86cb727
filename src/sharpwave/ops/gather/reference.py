"""Selecting, casting and padding rows, one after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def gather_rows(
    source: Tensor, index: Tensor | None, dtype: torch.dtype, multiple: int, out: Tensor | None = None
) -> Tensor:
    """The contract is `sharpwave.ops.gather.gather_rows`."""
    rows = source if index is None else source.index_select(0, index)
    if source.dtype == torch.uint8 and dtype.is_floating_point:
        rows = rows.float() / 255
    rows = F.pad(rows.to(dtype), (0, -source.shape[-1] % multiple))
    return rows.contiguous() if out is None else out.copy_(rows)


def gather_fields(sources: Sequence[Tensor], index: Tensor, out: Sequence[Tensor]) -> None:
    """The contract is `sharpwave.ops.gather.gather_fields`."""
    for source, target in zip(sources, out, strict=True):
        torch.index_select(source, 0, index, out=target)
