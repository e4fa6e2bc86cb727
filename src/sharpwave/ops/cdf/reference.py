"""Inclusive prefix sums and proportional draws from them, in plain PyTorch."""

import torch
from torch import Tensor

from sharpwave.ops import _philox

# Sums of up to this many segment weights are exact in float64 too, of more in int64: a weight has so many bits less
# the count's.
SMALL_DRAW = 16384
_SMALL_BITS, _SUM_BITS = 52, 62


def build_cdf(weights: Tensor, out: Tensor) -> None:
    """The contract is `sharpwave.ops.cdf.build_cdf`; float64 sums, one after the other on a CPU."""
    valid = (weights >= 0) & (weights < torch.inf)
    if weights.device.type == "cpu" and not valid.all():
        raise invalid_weights(int((~valid).sum()))
    total = torch.cumsum(torch.where(valid, weights, 0).double(), 0)
    out.copy_(total.clamp(max=torch.finfo(out.dtype).max))


build_cdf_serial = build_cdf


def sample_cdf(cdf: Tensor, n: int, seed: int | Tensor, offset: Tensor, stratified: bool, replacement: bool) -> Tensor:
    """The contract is `sharpwave.ops.cdf.sample_cdf`."""
    if cdf.device.type == "cpu" and not cdf[-1] > 0:
        raise zero_total()
    draws = n if replacement else cdf.numel()
    u = _philox.uniform53(*_philox.draw_words(seed, offset, draws))
    offset += draws
    if not replacement:
        # Successive draws without replacement are the order of exponential clocks of rate w_i (Efraimidis and
        # Spirakis 2006); half a step more keeps the logarithm finite.
        weights = torch.diff(cdf.double(), prepend=cdf.new_zeros(1, dtype=torch.float64))
        return earliest(-torch.log(u + 2.0**-54) / weights, n)
    if stratified:
        u = (torch.arange(n, device=cdf.device) + u) / n
    total = cdf[-1]
    mass = u * total.double()
    # First i with cdf_i > mass. Where the product rounded up to the total there is none, and the item that completes
    # the total is the one: it is the first to reach it, so its weight is positive.
    index = torch.searchsorted(cdf.double(), mass, right=True)
    return torch.where(index == cdf.numel(), torch.searchsorted(cdf, total), index)


def earliest(clocks: Tensor, n: int) -> Tensor:
    """Indices of the n smallest clocks, in order. An infinite clock never rings: raises on a CPU, else the first
    index stands in for it."""
    values, index = torch.topk(clocks, n, largest=False, sorted=True)
    never = torch.isinf(values)
    if clocks.device.type == "cpu" and never.any():
        raise ValueError(
            f"n must be at most the number of positive weights when replacement=False; got n={n} with "
            f"{int((~never).sum())} positive weights"
        )
    return torch.where(never, index[0], index)


def draw_segments(
    weight: Tensor, n: int, seed: int | Tensor, offset: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract is `sharpwave.ops.cdf.draw_segments`."""
    count = weight.numel()
    valid = (weight >= 0) & (weight < torch.inf)
    bad = (~valid).sum()
    w = torch.where(valid, weight, 0) + torch.tensor(eps, dtype=weight.dtype, device=weight.device)
    if weight.device.type == "cpu" and not w.max() > 0:
        raise zero_total()
    if weight.device.type == "cpu" and beta.isnan():
        raise beta_is_nan()
    # Exact sums: w in units of 2^-shift, so that the largest has as many bits as fit beside the count, and one more
    # unit, so that no positive weight is lost.
    exponent = torch.frexp(w.max()).exponent.clamp(min=-125)
    shift = segment_bits(count) - exponent
    scaled = torch.ldexp(w.double(), shift)
    units = torch.where(w > 0, scaled.round().long() + 1, 0)
    ends = torch.cumsum(units, 0)
    total = ends[-1]

    w0, w1 = _philox.draw_words(seed, offset, n)
    offset += n
    mass = _multiply_high(w0, w1, total)
    index = torch.searchsorted(ends, mass, right=True).clamp(max=count - 1)
    probability = scaled[index] / total
    importance = (count * probability).pow(-beta.double()).to(weight.dtype)
    empty = total == 0
    return torch.where(empty, 0, index), torch.where(empty, 0, importance), bad


def segment_bits(count: int) -> int:
    """Bits of the largest weight, so that `count` of them add up to less than 2^53, or 2^63."""
    return (_SMALL_BITS if count <= SMALL_DRAW else _SUM_BITS) - (count - 1).bit_length()


def _multiply_high(w1: Tensor, w0: Tensor, total: Tensor) -> Tensor:
    """floor((w1 2^32 + w0) total / 2^64) for 32-bit words and 0 <= total < 2^62, without leaving int64."""
    t1, t0 = total >> 32, total & _philox.MASK32
    (h00, _), (h01, l01), (h10, l10) = (_philox.multiply_words(a, b) for a, b in ((w0, t0), (w0, t1), (w1, t0)))
    return w1 * t1 + h01 + h10 + ((h00 + l01 + l10) >> 32)


def invalid_weights(count: int) -> ValueError:
    return ValueError(f"weights must be finite and not negative; got {count} that are not: clean them first")


def beta_is_nan() -> ValueError:
    return ValueError("beta must be a number; got NaN")


def zero_total() -> ValueError:
    return ValueError("nothing to draw from: every weight is 0; set at least one positive weight")
