"""Philox 4x32-10 for Numba kernels; the stream is defined in `_philox`."""

import numba
import numpy as np

from sharpwave.ops._philox import MULTIPLIERS, ROUNDS, WEYL

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint32(WEYL[0]), np.uint32(WEYL[1])
_32 = np.uint64(32)
_11 = np.uint64(11)


@numba.njit(inline="always", cache=True)
def random_bits(seed, draw):
    """The 64 random bits of one draw; `seed` and `draw` are int64."""
    k0, k1 = np.uint32(np.uint64(seed)), np.uint32(np.uint64(seed) >> _32)
    c0, c1 = np.uint32(np.uint64(draw)), np.uint32(np.uint64(draw) >> _32)
    c2, c3 = np.uint32(0), np.uint32(0)
    for _ in range(ROUNDS):
        p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
        c0, c1 = np.uint32(p1 >> _32) ^ c1 ^ k0, np.uint32(p1)
        c2, c3 = np.uint32(p0 >> _32) ^ c3 ^ k1, np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return (np.uint64(c0) << _32) | np.uint64(c1)


@numba.njit(inline="always", cache=True)
def uniform53(bits):
    """float64 in [0, 1): the upper 53 of 64 random bits, times 2^-53."""
    return np.float64(bits >> _11) * 2.0**-53


@numba.njit(inline="always", cache=True)
def multiply_high(a, b):
    """Upper 64 bits of the 128-bit product of two uint64."""
    mask = np.uint64(0xFFFFFFFF)
    a1, a0 = a >> _32, a & mask
    b1, b0 = b >> _32, b & mask
    low = a0 * b0
    cross = a1 * b0 + (low >> _32)
    other = a0 * b1 + (cross & mask)
    return a1 * b1 + (cross >> _32) + (other >> _32)
