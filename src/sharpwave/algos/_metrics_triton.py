"""The counters of an update, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tally_kernel(totals_ptr, loss_ptr, stats_ptr, grad_norm_ptr, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(stats_ptr + offs, mask=offs < TERMS, other=0.0)
    value = tl.where(offs == TERMS, tl.load(grad_norm_ptr), value)
    kept = (tl.abs(tl.load(loss_ptr)) < float("inf")) & (tl.abs(tl.load(grad_norm_ptr)) < float("inf"))
    sums = tl.load(totals_ptr + offs, mask=offs <= TERMS, other=0.0)
    tl.store(totals_ptr + offs, tl.where(kept, sums + value, sums), mask=offs <= TERMS)
    faults = totals_ptr + TERMS + 1
    count = tl.where(tl.abs(value) < float("inf"), 0.0, 1.0)
    tl.store(faults + offs, tl.load(faults + offs, mask=offs <= TERMS, other=0.0) + count, mask=offs <= TERMS)
    counters = totals_ptr + 2 * (TERMS + 1)
    tl.store(counters, tl.load(counters) + 1.0)
    tl.store(counters + 1, tl.load(counters + 1) + tl.where(kept, 1.0, 0.0))


def tally(totals: Tensor, loss: Tensor, stats: Tensor, grad_norm: Tensor) -> None:
    """`UpdateMetrics.update`."""
    terms = stats.shape[0]
    block = triton.next_power_of_2(terms + 1)
    _tally_kernel[(1,)](totals, loss, stats, grad_norm, TERMS=terms, BLOCK=block, num_warps=1)
