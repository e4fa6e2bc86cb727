"""A linear layer's product by PyTorch."""

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `sharpwave.ops.linear.linear`."""
    return F.linear(x, weight)
