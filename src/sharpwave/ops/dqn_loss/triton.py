"""The Q-learning loss, its gradient, TD errors and statistics for GPUs.

Programs leave sums of their rows, which a second launch adds up in order: one program for all rows takes twice as long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops.dqn_loss.reference import STATS, c51_loss

__all__ = ["c51_loss", "dqn_loss"]

ELEMENTS = 1024  # of a [rows, actions] tile
_STATS = tl.constexpr(len(STATS))


@triton.jit
def first_best(values, column, mask, BLOCK_A: tl.constexpr):
    """The first column with the largest value, [rows, 1]; a NaN counts as the largest, as argmax has it."""
    is_nan = values != values  # noqa: PLR0124
    high = tl.where(is_nan, float("inf"), values)
    top = tl.max(tl.where(mask, high, float("-inf")), 1)
    any_nan = tl.max(tl.where(mask & is_nan, 1, 0), 1) > 0
    is_top = tl.where(any_nan[:, None], is_nan, high == top[:, None])
    return tl.min(tl.where(mask & is_top, column, BLOCK_A), 1)[:, None]


@triton.jit
def _dqn_loss_kernel(
    q_ptr,
    action_ptr,
    next_q_ptr,
    next_target_q_ptr,
    reward_ptr,
    discount_ptr,
    weight_ptr,
    td_ptr,
    d_q_ptr,
    sums_ptr,
    huber,
    n,
    A: tl.constexpr,
    DOUBLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    column = tl.arange(0, BLOCK_A)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < n
    mask = here[:, None] & (column < A)  # [ROWS, BLOCK_A]
    place = row[:, None].to(tl.int64) * A + column
    q = tl.load(q_ptr + place, mask=mask, other=0.0)
    following = tl.load(next_target_q_ptr + place, mask=mask, other=0.0)
    chooser = following
    if DOUBLE:
        chooser = tl.load(next_q_ptr + place, mask=mask, other=0.0)
    best = first_best(chooser, column, mask, BLOCK_A)
    value = tl.sum(tl.where(mask & (column == best), following, 0.0), 1)
    action = tl.load(action_ptr + row, mask=here, other=0)
    taken = column == action[:, None]
    q_taken = tl.sum(tl.where(mask & taken, q, 0.0), 1)
    reward = tl.load(reward_ptr + row, mask=here, other=0.0)
    discount = tl.load(discount_ptr + row, mask=here, other=0.0)
    weight = tl.load(weight_ptr + row, mask=here, other=0.0)

    td = reward + discount * value - q_taken
    size = tl.abs(td)
    # minimum() drops a NaN, which must reach the loss.
    inside = tl.minimum(size, huber) + 0.0 * td
    slope = -weight * tl.where(td < 0.0, -inside, inside) / n
    tl.store(td_ptr + row, td, mask=here)
    tl.store(d_q_ptr + place, tl.where(taken, slope[:, None], 0.0), mask=mask)
    high = tl.max(tl.where(mask, q, float("-inf")), 1)
    low = tl.min(tl.where(mask, q, float("inf")), 1)
    sums_ptr += tl.program_id(0) * _STATS
    tl.store(sums_ptr, tl.sum(tl.where(here, weight * inside * (size - 0.5 * inside), 0.0), 0))
    tl.store(sums_ptr + 1, tl.sum(tl.where(here, size, 0.0), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(here, q_taken, 0.0), 0))
    tl.store(sums_ptr + 3, tl.max(tl.where(here, high, float("-inf")), 0))
    tl.store(sums_ptr + 4, tl.sum(tl.where(here, high - low, 0.0), 0))


@triton.jit
def add_up(sums_ptr, stats_ptr, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """STATS of n rows from the sums [PARTS, STATS] that programs left."""
    part = tl.arange(0, BLOCK)
    for i in tl.static_range(_STATS):
        if i == 3:
            high = tl.load(sums_ptr + part * _STATS + i, mask=part < PARTS, other=float("-inf"))
            tl.store(stats_ptr + i, tl.max(high, 0))
        else:
            total = tl.load(sums_ptr + part * _STATS + i, mask=part < PARTS, other=0.0)
            tl.store(stats_ptr + i, tl.sum(total, 0) / n)


@triton.jit
def _stats_kernel(sums_ptr, stats_ptr, loss_ptr, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    add_up(sums_ptr, stats_ptr, n, PARTS, BLOCK)
    part = tl.arange(0, BLOCK)
    tl.store(loss_ptr, tl.sum(tl.load(sums_ptr + part * _STATS, mask=part < PARTS, other=0.0), 0) / n)


def dqn_loss(
    q: Tensor,
    action: Tensor,
    next_q: Tensor | None,
    next_target_q: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    huber: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, float32."""
    n, actions = q.shape
    loss, td_error, stats = q.new_empty(()), q.new_empty(n), q.new_empty(len(STATS))
    d_q = torch.empty((n, actions), dtype=torch.float32, device=q.device)
    block_a = triton.next_power_of_2(actions)
    rows = max(min(triton.next_power_of_2(n), ELEMENTS // block_a), 1)
    programs = triton.cdiv(n, rows)
    sums = q.new_empty(programs, len(STATS))
    inputs = (x if x is None else x.contiguous() for x in (q, action, next_q, next_target_q, reward, discount, weight))
    _dqn_loss_kernel[(programs,)](
        *inputs, td_error, d_q, sums, huber, n, A=actions, DOUBLE=next_q is not None, ROWS=rows, BLOCK_A=block_a,
        num_warps=4,
    )  # fmt: skip
    _stats_kernel[(1,)](sums, stats, loss, n, PARTS=programs, BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, td_error, d_q, stats
