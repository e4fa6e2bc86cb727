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
    """`claim_draws` in three steps, of which none waits for another program's: the first draw number of this launch."""
    return tl.load(offset_ptr) & 0xFFFFFFFFFFFF


@triton.jit
def arrive(offset_ptr, THREADS: tl.constexpr):
    """Count this program in, after all of it has read the first draw number; a ticket for `advance_draws`.

    The barrier orders every thread's reading before the arrival, so nobody reads what the last arrival brings about.
    The ticket is a vector of one element a thread, the first of which counts: no thread waits for it before its use.
    """
    tl.debug_barrier()
    threads = tl.arange(0, THREADS)
    one = threads.to(tl.int64) * 0 + (1 << 48)
    return tl.atomic_add(offset_ptr + threads * 0, one, mask=threads == 0, sem="relaxed")


@triton.jit
def advance_draws(offset_ptr, first, ticket, n, programs, THREADS: tl.constexpr):
    """Move the stream on by `n` if this program was the last of `programs` to arrive."""
    threads = tl.arange(0, THREADS)
    last = (threads == 0) & ((ticket >> 48) == programs - 1)
    after = tl.zeros([THREADS], tl.int64) + (first + n)
    tl.atomic_xchg(offset_ptr + threads * 0, after, mask=last, sem="relaxed")


# Programs are counted in 15 bits.
MAX_PROGRAMS = 32767
