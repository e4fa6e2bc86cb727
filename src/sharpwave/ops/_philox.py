"""Philox 4x32-10, the counter-based random numbers of every draw, as PyTorch tensor operations.

One definition a language: this one (any device), `_philox_numba` and `_philox_triton`. All three give the same words
for the same key and counter, so a draw does not depend on the backend that made it.

A draw number d of the stream `seed` is the block of counter (d mod 2^32, d div 2^32, 0, 0) and key (seed mod 2^32,
seed div 2^32); its first two words, w0 and w1, are the 64 random bits w0 2^32 + w1 that a draw uses.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import operator

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK32 = 0xFFFFFFFF


def as_signed(seed: int) -> int:
    """The seed's low 64 bits as the int64 that PyTorch and Triton take. TypeError where it is no integer."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int, or a tensor where that is documented; got {seed!r}") from None
    return (seed + 2**63) % 2**64 - 2**63


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words per counter; every tensor is int64 and holds 32-bit words in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        hi0, lo0 = multiply_words(c0, MULTIPLIERS[0])
        hi1, lo1 = multiply_words(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def draw_words(seed: int | Tensor, offset: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Words (w0, w1), each (n,) int64 in [0, 2^32), of draws offset, offset + 1, ..., offset + n - 1."""
    device = offset.device
    if not isinstance(seed, Tensor):
        seed = torch.full((), as_signed(seed), dtype=torch.int64, device=device)
    seed = seed.to(device)
    draw = offset.reshape(()) + torch.arange(n, device=device)
    zero = torch.zeros_like(draw)
    key = (seed & MASK32, (seed >> 32) & MASK32)
    w0, w1, _, _ = philox((draw & MASK32, (draw >> 32) & MASK32, zero, zero), key)
    return w0, w1


def uniform53(w0: Tensor, w1: Tensor) -> Tensor:
    """float64 in [0, 1): the upper 53 of the 64 random bits, times 2^-53."""
    return ((w0 << 21) | (w1 >> 11)).double() * 2.0**-53


def multiply_words(a: Tensor, b: int | Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the product of 32-bit words; no partial product leaves int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK32
