"""A row of what an update came to, written to its place in one launch; `UpdateMetrics.update` is the definition."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _log_kernel(
    stats_ptr, grad_norm_ptr, td_error_ptr, log_ptr, place_ptr, count_ptr, kept_ptr,
    n, window, TERMS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    value = tl.load(stats_ptr + offs, mask=offs < TERMS, other=0.0)
    value = tl.where(offs == TERMS, tl.load(grad_norm_ptr), value)
    place = tl.load(place_ptr)
    tl.store(log_ptr + place * (TERMS + 1) + offs, value, mask=offs <= TERMS)
    for start in range(0, n, BLOCK_N):
        item = start + tl.arange(0, BLOCK_N)
        tl.store(kept_ptr + item, tl.load(td_error_ptr + item, mask=item < n), mask=item < n)
    tl.debug_barrier()  # every thread has read the place
    tl.store(place_ptr, tl.where(place + 1 == window, 0, place + 1))
    tl.store(count_ptr, tl.load(count_ptr) + 1)


def log_update(
    stats: Tensor, grad_norm: Tensor, td_error: Tensor, log: Tensor, place: Tensor, count: Tensor, kept: Tensor
) -> None:
    """`log[place]` is the statistics and the norm, `kept` the TD errors; then `place` and `count` move on."""
    n, terms = len(td_error), len(stats)
    _log_kernel[(1,)](
        stats, grad_norm, td_error, log, place, count, kept, n, len(log),
        TERMS=terms, BLOCK=triton.next_power_of_2(terms + 1), BLOCK_N=256, num_warps=4,
    )  # fmt: skip
