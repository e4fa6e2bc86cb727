"""Images cut into patches, whose pixels become channels."""

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register

__all__ = ["patches"]


def _kernel(x: Tensor, size: int, dtype: torch.dtype, backend: _backends.Backend) -> Tensor:
    return _backends.load("patches", x.device, backend).patches(x, size, dtype)


def _fake(x: Tensor, size: int, dtype: torch.dtype, _backend: str) -> Tensor:
    b, c, h, w = x.shape
    return x.new_empty((b, h // size, w // size, c * size * size), dtype=dtype).permute(0, 3, 1, 2)


_op = register("patches(Tensor x, int size, ScalarType dtype, str backend) -> Tensor", _kernel, _fake)


def patches(x: Tensor, size: int, dtype: torch.dtype, *, backend: _backends.Backend = "auto") -> Tensor:
    """Square patches of an image as channels.

        y[b, (c p + u) p + v, i, j] = x[b, c, i p + u, j p + v],   p = size

    Args:
        x: (B, C, H, W), any dtype; H and W multiples of `size`.
        size: p, >= 1.
        dtype: of the result. bfloat16 holds the whole numbers up to 256 exactly.

    Returns:
        (B, C p p, H / p, W / p), channels last in memory. No gradient flows to x. Deterministic.

    Raises:
        ValueError: the shape does not fit.
    """
    if x.ndim != 4 or size < 1 or x.shape[2] % size or x.shape[3] % size:
        raise ValueError(f"x must be (B, C, H, W) with H and W multiples of size {size}; got {tuple(x.shape)}")
    return _op(x, size, dtype, backend)
