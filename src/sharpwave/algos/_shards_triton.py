"""`tell` and `settle` of `sharpwave.algos.shards`, in one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _tell_kernel(priority_ptr, moments_ptr, told_ptr, n, EPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        w = tl.load(priority_ptr + offs, mask=offs < n, other=0.0)
        good = tl.where((w >= 0) & (w < float("inf")), w, 0.0).to(tl.float64)
        total += tl.where(offs < n, good + EPS, 0.0)
    parts = tl.arange(0, PARTS)
    count = tl.sum(tl.load(moments_ptr + 2 * PARTS + parts), 0)
    safe = tl.maximum(count, 1.0)
    over = tl.sum(tl.load(moments_ptr + parts), 0) / safe
    square = tl.sum(tl.load(moments_ptr + PARTS + parts), 0) / safe
    variance = tl.maximum(square - over * over, 0.0) + 0.0 * square  # maximum() drops a NaN
    tl.store(told_ptr, tl.sum(total, 0))
    tl.store(told_ptr + 1, count)
    tl.store(told_ptr + 2, tl.load(moments_ptr + 3 * PARTS) + over)
    tl.store(told_ptr + 3, variance)


@triton.jit
def _settle_kernel(
    every_ptr, weight_ptr, beta_ptr, moments_ptr, share_ptr, rank, m,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RANKS, and the power of two from it on."""
    row = tl.arange(0, ROWS)
    there = row < RANKS
    total = tl.load(every_ptr + 4 * row, mask=there, other=0.0)
    mass = total * tl.load(every_ptr + 4 * row + 1, mask=there, other=0.0)
    mean = tl.load(every_ptr + 4 * row + 2, mask=there, other=0.0)
    variance = tl.load(every_ptr + 4 * row + 3, mask=there, other=0.0)
    whole = tl.sum(mass, 0)
    share = tl.where(whole > 0, mass / tl.where(whole > 0, whole, 1.0), tl.where(there, 1.0 / RANKS, 0.0))
    joint = tl.sum(share * mean, 0)
    spread = tl.sum(share * (variance + (mean - joint) * (mean - joint)), 0)
    tl.store(share_ptr, tl.sum(tl.where(row == rank, share, 0.0), 0))

    scale = RANKS * tl.sum(tl.where(row == rank, total, 0.0), 0) / tl.sum(total, 0)
    factor = tl.exp2(-tl.load(beta_ptr).to(tl.float64) * tl.log2(scale))
    for start in range(0, m, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + offs, mask=offs < m, other=0.0).to(tl.float64)
        tl.store(weight_ptr + offs, (weight * factor).to(tl.float32), mask=offs < m)

    parts = tl.arange(0, PARTS)
    count = tl.load(moments_ptr + 2 * PARTS + parts)
    over = joint - tl.load(moments_ptr + 3 * PARTS + parts)
    tl.store(moments_ptr + parts, over * count)
    tl.store(moments_ptr + PARTS + parts, (spread + over * over) * count)


def tell(priority: Tensor, eps: float, moments: Tensor) -> Tensor:
    told = torch.empty(4, dtype=torch.float64, device=priority.device)
    _tell_kernel[(1,)](
        priority, moments, told, priority.numel(), EPS=eps, PARTS=moments.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return told


def settle(every: Tensor, rank: int, weight: Tensor, beta: Tensor, moments: Tensor, share: Tensor) -> None:
    _settle_kernel[(1,)](
        every, weight, beta, moments, share, rank, weight.numel(), RANKS=len(every),
        ROWS=triton.next_power_of_2(len(every)), PARTS=moments.shape[1], BLOCK=256,
    )  # fmt: skip
