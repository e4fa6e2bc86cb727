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
def claim_draws(offset_ptr, n, n_programs):
    """The first draw number of this launch; the launch's last program to ask moves the stream on by `n`.

    Every program of the launch must call this exactly once. The word at `offset_ptr` holds the draw number in its lower
    48 bits and, while the launch runs, the number of programs that have asked in its upper 16: reading and arriving are
    one atomic operation, so no program can read a number that another has already advanced, and nobody waits.
    """
    word = tl.atomic_add(offset_ptr, 1 << 48, sem="relaxed")
    first = word & 0xFFFFFFFFFFFF
    if (word >> 48) == n_programs - 1:
        tl.atomic_xchg(offset_ptr, first + n, sem="relaxed")
    return first


@triton.jit
def read_draws(offset_ptr):
    """`claim_draws` for programs of one warp, without waiting: the first draw number, and a ticket for `advance_draws`.

    Reading and arriving are two operations here, one after the other on one word, so that no program's reading can see
    what the last one's arrival brought about. Nobody waits for the ticket before the program's end.
    """
    first = tl.load(offset_ptr) & 0xFFFFFFFFFFFF
    lanes = tl.arange(0, 32)
    ticket = tl.atomic_add(offset_ptr + lanes * 0, tl.full([32], 1 << 48, tl.int64), mask=lanes == 0, sem="relaxed")
    return first, ticket


@triton.jit
def advance_draws(offset_ptr, first, ticket, n):
    """Move the stream on by `n` if this program's ticket was the launch's last."""
    lanes = tl.arange(0, 32)
    last = (lanes == 0) & ((ticket >> 48) == tl.num_programs(0) - 1)
    tl.atomic_xchg(offset_ptr + lanes * 0, tl.zeros([32], tl.int64) + (first + n), mask=last, sem="relaxed")


# claim_draws counts programs in 15 bits.
MAX_PROGRAMS = 32767
