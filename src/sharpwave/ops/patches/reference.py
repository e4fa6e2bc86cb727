"""Images cut into patches in plain PyTorch."""

import torch
from torch import Tensor


def patches(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """See `sharpwave.ops.patches.patches`."""
    x = x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, p, p)
    x = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x.flatten(3).permute(0, 3, 1, 2)
