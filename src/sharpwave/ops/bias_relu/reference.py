"""Bias and ReLU in plain PyTorch, with their gradients written out."""

import torch
from torch import Tensor


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """See `sharpwave.ops.bias_relu.bias_relu`."""
    return (x + bias.view(-1, *[1] * (x.ndim - 2))).relu().to(x.dtype)


def bias_relu_backward(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias."""
    dx = torch.where(y <= 0, 0, dy)
    wide = torch.promote_types(y.dtype, torch.float32)
    return dx, dx.sum([d for d in range(y.ndim) if d != 1], dtype=wide)
