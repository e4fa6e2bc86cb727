"""Linear layers whose GEMMs suit a GPU, whatever the widths."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 8  # a bf16 GEMM whose widths are no multiples of this takes 4 to 5 times as long on an H200


class AlignedLinear(nn.Linear):
    """A linear layer that also takes inputs padded with zeros to a multiple of ALIGNMENT; a GPU's it pads itself.

    There a GEMM whose inner dimension is no such multiple takes 4 to 5 times as long.
    """

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if x.is_cuda and x.shape[-1] == self.in_features:
            if torch.is_autocast_enabled("cuda"):
                x = x.to(torch.get_autocast_dtype("cuda"))
            x = F.pad(x, (0, -self.in_features % ALIGNMENT))
        return F.linear(x, F.pad(self.weight, (0, x.shape[-1] - self.in_features)), self.bias)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T in float32 out, whatever autocast says: for a value and the logits.

    A value of 1 in bf16 moves in steps of 0.4 %, more than most advantages, and a log-probability makes ratios off by
    up to 1.6 % before any update. So x may be bf16 and the products are, but sums and result are float32.

    Args:
        x: (..., H), bf16, or float32 and then computed in float32. weight: (K, H) float32.

    Returns:
        (..., K) float32; for bf16 x on a GPU (..., K'), padded with zeros to a multiple of ALIGNMENT.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        y = _Float32Out.apply(x.reshape(-1, x.shape[-1]), F.pad(weight, (0, 0, 0, -weight.shape[0] % ALIGNMENT)))
        return y.view(*x.shape[:-1], -1)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(weight.dtype), weight)


class _Float32Out(torch.autograd.Function):
    """The GEMM of bf16 operands that keeps its float32 sums; its gradients are bf16 GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        return torch.mm(x, narrow.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # ty: ignore[incompatible-method-override]
        x, narrow = ctx.saved_tensors
        dy = dy.to(x.dtype)
        return torch.mm(dy, narrow), torch.mm(dy.t(), x, out_dtype=torch.float32)
