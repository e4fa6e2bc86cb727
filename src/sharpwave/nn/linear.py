"""Linear layers whose GEMMs suit a GPU, whatever the widths."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpwave.ops._library import first_order

if TYPE_CHECKING:
    from sharpwave.run.graphs import Branch

ALIGNMENT = 8  # a bf16 GEMM whose widths are no multiples of this takes 4 to 5 times as long on an H200


def rounded_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, H) in `dtype`, padded with zeros until both are multiples of ALIGNMENT."""
    rows, cols = weight.shape
    return F.pad(weight.detach().to(dtype), (0, -cols % ALIGNMENT, 0, -rows % ALIGNMENT)).contiguous()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, of one device, as `F.linear` takes them under the present autocast: float64 stays float64."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # asking for a meta tensor raises
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


class AlignedLinear(nn.Linear):
    """A linear layer that also takes inputs padded with zeros to a multiple of ALIGNMENT; a GPU's it pads itself.

    There a GEMM whose inner dimension is no such multiple takes 4 to 5 times as long. Where `rounded`, a
    `rounded_copy` of the weight, is set, the product is of it, and the weight's gradient has float32 sums.
    """

    rounded: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if self.rounded is not None:
            y = _rounded_linear(x, self.weight, self.rounded, None)[..., : self.out_features]
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if x.is_cuda and x.shape[-1] == self.in_features:
            (x,) = autocast(x)
            x = F.pad(x, (0, -self.in_features % ALIGNMENT))
        return F.linear(x, F.pad(self.weight, (0, x.shape[-1] - self.in_features)), self.bias)


def linear_float32(x: Tensor, weight: Tensor, rounded: Tensor | None = None) -> Tensor:
    """x @ weight^T in float32 out, whatever autocast says: for a value and the logits.

    A value of 1 in bf16 moves in steps of 0.4 %, more than most advantages, and a log-probability makes ratios off by
    up to 1.6 % before any update. So x may be bf16 and the products are, but sums and result are float32.

    Args:
        x: (..., H), bf16, or float32 and then computed in float32. weight: (K, H) float32.
        rounded: a `rounded_copy` of the weight, where one is at hand.

    Returns:
        (..., K) float32; for bf16 x on a GPU (..., K'), padded with zeros to a multiple of ALIGNMENT.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        narrow = rounded_copy(weight, x.dtype) if rounded is None else rounded
        return _rounded_linear(x, weight, narrow, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(weight.dtype), weight)


def _rounded_linear(x: Tensor, weight: Tensor, rounded: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    wide = rounded.shape[1]
    if x.shape[-1] != wide:
        x = F.pad(x, (0, wide - x.shape[-1]))
    flat = x.reshape(-1, wide).to(rounded.dtype)
    return _RoundedLinear.apply(flat, weight, rounded, out_dtype).view(*x.shape[:-1], -1)


class _RoundedLinear(torch.autograd.Function):
    """x @ rounded^T, for a float32 weight and its copy: no GEMM's operand is cast, and no sum is rounded twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor, out_dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, rounded)
        ctx.weight = weight
        return product(x, rounded.t(), out_dtype)

    @staticmethod
    @partial(first_order, "a product with a rounded copy of its weight")
    def backward(ctx: Any, dy: Tensor):
        x, rounded = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dweight = weight_gradient(ctx.weight, dy, x, last=not ctx.needs_input_grad[0])
        dx = torch.mm(dy, rounded) if ctx.needs_input_grad[0] else None
        return dx, dweight, None, None


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """a @ b with float32 sums, written as `out_dtype` (a's dtype by default)."""
    if out_dtype is None or out_dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


class WeightGradients:
    """Collects the gradients of the weights that `weight_gradient` is asked for, computed on a branch.

    with WeightGradients(branch):
        y.backward(dy)              # the chain from layer to layer goes on beside the weights' GEMMs
    # each weight's .grad is set, and the current stream waits for the branch
    """

    active: ClassVar["WeightGradients | None"] = None

    def __init__(self, branch: "Branch"):
        self.branch = branch
        self.grads: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        WeightGradients.active = self

    def __exit__(self, *error) -> None:
        WeightGradients.active = None
        self.branch.join()
        for weight, grad in self.grads:
            weight.grad = grad


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, last: bool = False) -> Tensor | None:
    """d loss / d weight = dy^T x in float32, cut to weight's shape; None where `WeightGradients` takes it.

    last: the chain ends here, and has nothing to go on with beside this product.
    """
    rows, cols = weight.shape
    collector = WeightGradients.active
    if collector is None:
        return product(dy.t(), x, torch.float32)[:rows, :cols]
    with nullcontext() if last else collector.branch:
        collector.grads.append((weight, product(dy.t(), x, torch.float32)[:rows, :cols]))
    collector.branch.keep(dy, x)
    return None
