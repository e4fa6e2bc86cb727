"""Prefix sums and draws for CPUs: one pass, one thread, float64 sums."""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from sharpwave.ops._philox import as_signed
from sharpwave.ops._philox_numba import multiply_high, random_bits, uniform53
from sharpwave.ops.cdf import reference

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@numba.njit(cache=True)
def _invalid(bits):
    """How many float32 are negative, NaN or infinite, by their bits, which vectorizes; -0 is not."""
    bad = 0
    for i in range(bits.shape[0]):
        bad += (bits[i] >= np.uint32(0x7F800000)) & (bits[i] != np.uint32(0x80000000))
    return bad


@numba.njit(cache=True)
def _serial_sum(weights, out):
    total = 0.0
    for i in range(weights.shape[0]):
        total += weights[i]
        out[i] = min(total, _FLOAT32_MAX)


@numba.njit(cache=True)
def _sum(weights, out):
    """Four at a time, so that one addition in four waits for the one before. Each step is still monotone, and adds
    nothing where the weight is 0."""
    n = weights.shape[0]
    total = 0.0
    for i in range(0, n - 3, 4):
        a = np.float64(weights[i])
        b = a + weights[i + 1]
        c = b + weights[i + 2]
        d = c + weights[i + 3]
        out[i] = total + a
        out[i + 1] = total + b
        out[i + 2] = total + c
        total += d
        out[i + 3] = total
    for i in range(n - n % 4, n):
        total += weights[i]
        out[i] = total
    if total > _FLOAT32_MAX:
        for i in range(n):
            out[i] = min(out[i], _FLOAT32_MAX)


@numba.njit(cache=True)
def _first_above(cdf, mass, total):
    """First i with cdf[i] > mass, or with cdf[i] = total where rounding took the mass there."""
    low, high = 0, cdf.shape[0] - 1
    while low < high:
        middle = (low + high) >> 1
        if cdf[middle] > mass or cdf[middle] == total:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(cache=True)
def _sample_cdf(cdf, seed, offset, stratified, out):
    n = out.shape[0]
    total = np.float64(cdf[cdf.shape[0] - 1])
    first = offset[0]
    for k in range(n):
        u = uniform53(random_bits(seed, first + k))
        if stratified:
            u = (k + u) / n
        out[k] = _first_above(cdf, u * total, total)
    offset[0] = first + n


@numba.njit(cache=True)
def _clocks(cdf, seed, offset, out):
    below = 0.0
    for i in range(cdf.shape[0]):
        weight = np.float64(cdf[i]) - below
        below = np.float64(cdf[i])
        u = uniform53(random_bits(seed, offset[0] + i))
        out[i] = -np.log(u + 2.0**-54) / weight if weight > 0 else np.inf
    offset[0] += cdf.shape[0]


@numba.njit(cache=True)
def _draw_segments(weight, seed, offset, beta, eps, bits, ends, index, importance):
    count = weight.shape[0]
    bad = 0
    largest = np.float32(0)
    for i in range(count):
        w = weight[i]
        if not (w >= 0.0 and w < np.inf):
            bad += 1
            w = np.float32(0)
        largest = max(largest, w + eps)
    if not largest > 0.0:
        return -1
    _, exponent = math.frexp(largest)
    scale = math.ldexp(1.0, bits - max(exponent, -125))
    total = np.int64(0)
    for i in range(count):
        w = weight[i]
        w = (w if w >= 0.0 and w < np.inf else np.float32(0)) + eps
        if w > 0.0:
            total += np.int64(np.rint(np.float64(w) * scale)) + 1
        ends[i] = total
    first = offset[0]
    for k in range(index.shape[0]):
        mass = np.int64(multiply_high(random_bits(seed, first + k), np.uint64(total)))
        i = np.searchsorted(ends, mass, side="right")
        w = weight[i]
        w = (w if w >= 0.0 and w < np.inf else np.float32(0)) + eps
        index[k] = i
        importance[k] = (count * (np.float64(w) * scale / total)) ** -beta
    offset[0] = first + index.shape[0]
    return bad


def build_cdf(weights: Tensor, out: Tensor) -> None:
    """Same as `reference.build_cdf`."""
    _sum(_valid(weights), out.numpy())


def build_cdf_serial(weights: Tensor, out: Tensor) -> None:
    """Same as `reference.build_cdf`, one addition after the other."""
    _serial_sum(_valid(weights), out.numpy())


def _valid(weights: Tensor) -> np.ndarray:
    array = weights.detach().numpy()
    bad = _invalid(array.view(np.uint32))
    if bad:
        raise reference.invalid_weights(bad)
    return array


def sample_cdf(cdf: Tensor, n: int, seed: int | Tensor, offset: Tensor, stratified: bool, replacement: bool) -> Tensor:
    """Same as `reference.sample_cdf`."""
    if not cdf[-1] > 0:
        raise reference.zero_total()
    key = np.int64(as_signed(int(seed)))
    if not replacement:
        clocks = torch.empty(cdf.numel(), dtype=torch.float64)
        _clocks(cdf.numpy(), key, offset.view(1).numpy(), clocks.numpy())
        return reference.earliest(clocks, n)
    out = torch.empty(n, dtype=torch.int64)
    _sample_cdf(cdf.numpy(), key, offset.view(1).numpy(), stratified, out.numpy())
    return out


def draw_segments(
    weight: Tensor, n: int, seed: int | Tensor, offset: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.draw_segments`."""
    count = weight.numel()
    exponent = float(beta)
    if math.isnan(exponent):
        raise reference.beta_is_nan()
    ends = np.empty(count, np.int64)
    index, importance = torch.empty(n, dtype=torch.int64), torch.empty(n)
    bad = _draw_segments(
        weight.detach().numpy(),
        np.int64(as_signed(int(seed))),
        offset.view(1).numpy(),
        exponent,
        np.float32(eps),
        reference.segment_bits(count),
        ends,
        index.numpy(),
        importance.numpy(),
    )
    if bad < 0:
        raise reference.zero_total()
    return index, importance, torch.tensor(bad)
