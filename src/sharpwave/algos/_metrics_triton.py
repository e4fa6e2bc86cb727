"""The counters of an update, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _settle_kernel(totals_ptr, held_ptr, grad_norm_ptr, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    held, loss = tl.load(held_ptr), tl.load(held_ptr + 1)
    grad_norm = tl.load(grad_norm_ptr)
    offs = tl.arange(0, BLOCK)
    value = tl.load(held_ptr + 2 + offs, mask=offs < TERMS, other=0.0)
    value = tl.where(offs == TERMS, grad_norm, value)
    kept = (held > 0) & (tl.abs(loss) < float("inf")) & (tl.abs(grad_norm) < float("inf"))
    sums = tl.load(totals_ptr + offs, mask=offs <= TERMS, other=0.0)
    tl.store(totals_ptr + offs, tl.where(kept, sums + value, sums), mask=offs <= TERMS)
    faults = totals_ptr + TERMS + 1
    count = tl.where(tl.abs(value) < float("inf"), 0.0, held)
    tl.store(faults + offs, tl.load(faults + offs, mask=offs <= TERMS, other=0.0) + count, mask=offs <= TERMS)
    counters = totals_ptr + 2 * (TERMS + 1)
    tl.store(counters, tl.load(counters) + held)
    tl.store(counters + 1, tl.load(counters + 1) + tl.where(kept, 1.0, 0.0))
    tl.store(held_ptr, 0.0)


def settle(totals: Tensor, held: Tensor, grad_norm: Tensor) -> None:
    """`UpdateMetrics.settle`."""
    terms = held.shape[0] - 2
    _settle_kernel[(1,)](totals, held, grad_norm, TERMS=terms, BLOCK=triton.next_power_of_2(terms + 1), num_warps=1)
