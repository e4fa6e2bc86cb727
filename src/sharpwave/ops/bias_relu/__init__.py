"""Bias and ReLU after a convolution, in one pass; backward too."""

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register

__all__ = ["bias_relu"]


def _forward(x: Tensor, bias: Tensor, backend: _backends.Backend) -> Tensor:
    return _backends.load("bias_relu", x.device, backend).bias_relu(x, bias)


def _backward(dy: Tensor, y: Tensor, backend: _backends.Backend) -> tuple[Tensor, Tensor]:
    return _backends.load("bias_relu", y.device, backend).bias_relu_backward(dy, y)


def _backward_fake(dy: Tensor, y: Tensor, _backend: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.backend, ctx.dtype = inputs[2], inputs[1].dtype


def _autograd(ctx, dy):
    dx, dbias = _backward_op(dy, ctx.saved_tensors[0], ctx.backend)
    return dx, dbias.to(ctx.dtype), None


_op = register(
    "bias_relu(Tensor x, Tensor bias, str backend) -> Tensor",
    _forward,
    lambda x, _bias, _backend: torch.empty_like(x),
    _autograd,
    _save,
)
_backward_op = register(
    "bias_relu_backward(Tensor dy, Tensor y, str backend) -> (Tensor, Tensor)", _backward, _backward_fake
)


def bias_relu(x: Tensor, bias: Tensor, *, backend: _backends.Backend = "auto") -> Tensor:
    """relu(x + bias), the bias along dimension 1.

    Args:
        x: (n, C, ...), float; on a GPU channels last in memory, (n, C) too, and copied into that order where it is not.
        bias: (C,), of x's dtype or wider.
        backend: "triton" wants C to be a power of 2.

    Returns:
        Like x, rounded once. Differentiable; the bias's gradient is summed in float32 at least, in a fixed order, so
        that it is deterministic. A NaN stays one.

    Raises:
        ValueError: a shape does not fit the other or the backend.
    """
    if x.ndim < 2 or bias.shape != x.shape[1:2]:
        raise ValueError(f"x must be (n, C, ...) and bias (C,); got {tuple(x.shape)} and {tuple(bias.shape)}")
    channels = len(bias)
    if _backends.choose("bias_relu", x.device.type, backend) == "triton" and channels & (channels - 1):
        raise ValueError(f"backend='triton' takes a power of 2 of channels; got {channels}: use backend='reference'")
    return _op(x, bias, backend)
