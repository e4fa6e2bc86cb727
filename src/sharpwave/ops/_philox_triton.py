"""Philox 4x32-10 for Triton kernels (Triton's own generator, on the stream that `_philox` defines)."""

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, draw):
    """The 64 random bits (uint64) of each draw; `seed` and `draw` are int64."""
    bits = draw.to(tl.uint64)
    c0 = (bits & 0xFFFFFFFF).to(tl.uint32)
    c1 = (bits >> 32).to(tl.uint32)
    zero = c0 * 0
    w0, w1, _, _ = tl.philox(seed, c0, c1, zero, zero)
    return (w0.to(tl.uint64) << 32) | w1.to(tl.uint64)


@triton.jit
def uniform53(bits):
    """float64 in [0, 1): the upper 53 of 64 random bits, times 2^-53."""
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def first_draw(offset_ptr, n, programs):
    """The first draw number of this launch, in which `programs` programs make `n` draws; none waits for another.

    The word at `offset_ptr` holds the number in its lower 48 bits. In `count_draws` each program adds its share of the
    draws to them and 1 to the upper 16, but the last program adds there what brings them back to 0 when all have come.
    So the upper bits tell which shares are in the lower ones, whenever a program reads.
    """
    word = tl.load(offset_ptr)
    came = (word >> 48) & 0xFFFF
    last_came = came > 0x7FFF
    others = tl.where(last_came, came + programs - 0x10001, came)
    share = tl.cast(n // programs, tl.int64)
    return (word & 0xFFFFFFFFFFFF) - others * share - tl.where(last_came, n - (programs - 1) * share, 0)


@triton.jit
def count_draws(offset_ptr, n, programs, THREADS: tl.constexpr):
    """Move the stream on by this program's share; every program must call it once, after `first_draw`.

    The barrier orders every thread's reading before it. One thread adds, and none waits for what that returns.
    """
    tl.debug_barrier()
    threads = tl.arange(0, THREADS)
    share = tl.cast(n // programs, tl.int64)
    one = tl.full([], 1 << 48, tl.int64)
    rest = n - (programs - 1) * share - (programs - 1) * one  # 2^16 - (programs - 1) in the upper bits
    added = tl.where(tl.program_id(0) == programs - 1, rest, share + one)
    tl.atomic_add(offset_ptr + threads * 0, added + threads * 0, mask=threads == 0, sem="relaxed")


# Programs are counted in 15 bits.
MAX_PROGRAMS = 32767
