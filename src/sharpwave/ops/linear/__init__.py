"""A linear layer's product, forward."""

from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register

__all__ = ["linear"]


def _kernel(x: Tensor, weight: Tensor, settled: bool, backend: _backends.Backend) -> Tensor:
    if backend == "auto" and _backends.choose("linear", x.device.type) == "triton":
        backend = "triton" if _backends.load("linear", x.device).pays(x, weight) else "reference"
    return _backends.load("linear", x.device, backend).linear(x, weight, settled)


_op = register(
    "linear(Tensor x, Tensor weight, bool settled, str backend) -> Tensor",
    _kernel,
    lambda x, weight, _settled, _backend: x.new_empty(*x.shape[:-1], weight.shape[0]),
)


def linear(x: Tensor, weight: Tensor, *, settled: bool = False, backend: _backends.Backend = "auto") -> Tensor:
    """y = x @ weight^T

    Args:
        x: (..., K). weight: (N, K), of x's dtype and device.
        settled: the last launch on this stream does not write `weight`, which may be loaded before that has ended.
        backend: "triton" takes 16-bit matrices, contiguous, with K one of 64, 128 and 256 and N a multiple of 128;
            "auto" takes it where there are so many rows that it is faster than PyTorch's product, on a GPU that has
            what it needs (compute capability 9 on).

    Returns:
        (..., N), of x's dtype: sums in float32 (float64 for float64), rounded once. Deterministic. NaN stays in its
        row. No gradient: asking for it raises.

    Raises:
        ValueError: shapes disagree, or do not fit the backend. TypeError: dtypes disagree.
    """
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K); got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"weight must have x's dtype {x.dtype}; got {weight.dtype}: cast one of them")
    return _op(x, weight, settled, backend)
