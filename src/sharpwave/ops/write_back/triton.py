"""Writing rows back for GPUs: one program a drawn row, which first looks whether a later draw took the same."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_back_kernel(
    stored, fresh, strides, index_ptr, keep_ptr, n, horizon,
    FIELDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    row = tl.load(index_ptr + m)
    later = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, n, BLOCK_M):
        offs = start + tl.arange(0, BLOCK_M)
        later += (tl.load(index_ptr + offs, mask=(offs > m) & (offs < n), other=-1) == row).to(tl.int32)
    keep = tl.abs(tl.load(keep_ptr)) < float("inf")
    if (tl.sum(later, 0) == 0) & keep:
        for field in tl.static_range(FIELDS):
            stride_m, stride_t = strides[2 * field], strides[2 * field + 1]
            for start in range(0, horizon, BLOCK_T):
                offs_t = start + tl.arange(0, BLOCK_T)
                mask = offs_t < horizon
                here = fresh[field] + m.to(tl.int64) * stride_m + offs_t.to(tl.int64) * stride_t
                x = tl.load(here, mask=mask, other=0.0)
                tl.store(stored[field] + row * horizon + offs_t, x, mask=mask & (tl.abs(x) < float("inf")))


def write_back(stored: Sequence[Tensor], fresh: Sequence[Tensor], index: Tensor, keep: Tensor) -> None:
    """Same as `reference.write_back`."""
    n, horizon = index.shape[0], stored[0].shape[1]
    if n == 0:
        return
    _write_back_kernel[(n,)](
        tuple(stored), tuple(x.float() for x in fresh), tuple(stride for x in fresh for stride in x.stride()),
        index.contiguous(), keep, n, horizon, FIELDS=len(stored), BLOCK_M=min(1024, triton.next_power_of_2(n)),
        BLOCK_T=min(1024, triton.next_power_of_2(horizon)), num_warps=4,
    )  # fmt: skip
