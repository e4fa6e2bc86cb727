"""Double Q-learning of a narrow network for GPUs: one launch for all forward passes, one for the loss and the data's
gradients, one for the weights'.

Rows are shared out as in `q_mlp`. The second launch leaves each program's sums of the statistics, which one program of
the third adds up, in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops.dqn_loss.reference import STATS
from sharpwave.ops.dqn_loss.triton import _first_best
from sharpwave.ops.q_mlp.triton import (
    COLUMNS,
    LEAST_ACTIONS,
    _as_it_is,
    _block,
    _layer,
    _put_rows,
    _rows,
    _transposed,
    _weight_gradient,
)
from sharpwave.ops.q_mlp_loss import ROWS, _size

_STATS = tl.constexpr(len(STATS))
FORWARD_WARPS = LOSS_WARPS = WEIGHT_WARPS = 8
BLOCK_N = 32  # rows of the batch that a tile of a weight's gradient adds at a time


@triton.jit
def _forward_kernel(
    params_ptr, target_params_ptr, x_ptr, next_x_ptr, q_ptr, h1_ptr, h2_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Pass 0 is Q(x), 1 is Q_target(next_x), 2 is Q(next_x); q_ptr holds them one after the other."""
    which = tl.program_id(1)
    w_ptr = params_ptr
    seen_ptr = next_x_ptr
    if which == 0:
        seen_ptr = x_ptr
    if which == 1:
        w_ptr = target_params_ptr
    B1: tl.constexpr = H * D
    W2: tl.constexpr = B1 + H
    WIDE: tl.constexpr = 2 * K if DUELING else K
    B2: tl.constexpr = W2 + WIDE * H
    WA: tl.constexpr = B2 + WIDE
    BA: tl.constexpr = WA + A * K
    WV: tl.constexpr = BA + A
    kept = tl.where(which == 0, n, 0)  # activations of the others are not needed again
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d, h, k, a = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_A)
    x = _rows(seen_ptr, row, d, n, D, D)
    h1 = _layer(x, _transposed(w_ptr, h, d, H, D), w_ptr + B1, h, H)
    _put_rows(h1_ptr, row, h, kept, H, H, h1)
    if DUELING:
        hv = _layer(h1, _transposed(w_ptr + W2, k, h, K, H), w_ptr + B2, k, K)
        _put_rows(h2_ptr, row, k, kept, K, WIDE, hv)
    ha = _layer(h1, _transposed(w_ptr + W2 + (WIDE - K) * H, k, h, K, H), w_ptr + B2 + (WIDE - K), k, K)
    _put_rows(h2_ptr + (WIDE - K), row, k, kept, K, WIDE, ha)
    q = tl.dot(ha, _transposed(w_ptr + WA, a, k, A, K), input_precision="tf32x3")
    q += tl.load(w_ptr + BA + a, mask=a < A, other=0.0)[None, :]
    if DUELING:
        wv = tl.load(w_ptr + WV + k, mask=k < K, other=0.0)
        value = tl.sum(hv * wv[None, :], 1) + tl.load(w_ptr + WV + K)
        q += (value - tl.sum(tl.where(a[None, :] < A, q, 0.0), 1) / A)[:, None]
    _put_rows(q_ptr + which * n * A, row, a, n, A, A, q)


@triton.jit
def _loss_kernel(
    params_ptr, q_ptr, h1_ptr, h2_ptr, action_ptr, reward_ptr, discount_ptr, weight_ptr,
    td_ptr, sums_ptr, da_ptr, dv_ptr, d2_ptr, d1_ptr,
    huber, n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows the TD errors, sums of the statistics, and gradients of what enters each activation."""
    pid = tl.program_id(0)
    row = pid * ROWS + tl.arange(0, ROWS)
    here = row < n
    h, k, a = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_A)
    W2: tl.constexpr = H * D + H
    WIDE: tl.constexpr = 2 * K if DUELING else K
    WA: tl.constexpr = W2 + WIDE * H + WIDE
    WV: tl.constexpr = WA + A * K + A

    q = _rows(q_ptr, row, a, n, A, A)
    following = _rows(q_ptr + n * A, row, a, n, A, A)
    chooser = following
    if DOUBLE:
        chooser = _rows(q_ptr + 2 * n * A, row, a, n, A, A)
    mask = here[:, None] & (a[None, :] < A)
    best = _first_best(chooser, a[None, :], mask, BLOCK_A)
    value = tl.sum(tl.where(mask & (a[None, :] == best), following, 0.0), 1)
    taken = a[None, :] == tl.load(action_ptr + row, mask=here, other=0)[:, None]
    q_taken = tl.sum(tl.where(mask & taken, q, 0.0), 1)
    reward = tl.load(reward_ptr + row, mask=here, other=0.0)
    weight = tl.load(weight_ptr + row, mask=here, other=0.0)
    td = reward + tl.load(discount_ptr + row, mask=here, other=0.0) * value - q_taken
    size = tl.abs(td)
    # minimum() drops a NaN, which must reach the loss.
    inside = tl.minimum(size, huber) + 0.0 * td
    slope = -weight * tl.where(td < 0.0, -inside, inside) / n
    tl.store(td_ptr + row, td, mask=here)
    da = tl.where(mask & taken, slope[:, None], 0.0)

    high = tl.max(tl.where(mask, q, float("-inf")), 1)
    low = tl.min(tl.where(mask, q, float("inf")), 1)
    sums_ptr += pid * _STATS
    tl.store(sums_ptr, tl.sum(tl.where(here, weight * inside * (size - 0.5 * inside), 0.0), 0))
    tl.store(sums_ptr + 1, tl.sum(tl.where(here, size, 0.0), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(here, q_taken, 0.0), 0))
    tl.store(sums_ptr + 3, tl.max(tl.where(here, high, float("-inf")), 0))
    tl.store(sums_ptr + 4, tl.sum(tl.where(here, high - low, 0.0), 0))

    if DUELING:
        dv = tl.sum(da, 1)
        da = tl.where(mask, da - dv[:, None] / A, 0.0)
        tl.store(dv_ptr + row, dv, mask=here)
        wv = tl.load(params_ptr + WV + k, mask=k < K, other=0.0)
        d2v = tl.where(_rows(h2_ptr, row, k, n, K, WIDE) > 0.0, dv[:, None] * wv[None, :], 0.0)
        _put_rows(d2_ptr, row, k, n, K, WIDE, d2v)
    _put_rows(da_ptr, row, a, n, A, A, da)
    d2 = tl.dot(da, _as_it_is(params_ptr + WA, a, k, A, K), input_precision="tf32x3")
    d2 = tl.where(_rows(h2_ptr + (WIDE - K), row, k, n, K, WIDE) > 0.0, d2, 0.0)
    _put_rows(d2_ptr + (WIDE - K), row, k, n, K, WIDE, d2)
    d1 = tl.dot(d2, _as_it_is(params_ptr + W2 + (WIDE - K) * H, k, h, K, H), input_precision="tf32x3")
    if DUELING:
        d1 += tl.dot(d2v, _as_it_is(params_ptr + W2, k, h, K, H), input_precision="tf32x3")
    d1 = tl.where(_rows(h1_ptr, row, h, n, H, H) > 0.0, d1, 0.0)
    _put_rows(d1_ptr, row, h, n, H, H, d1)


@triton.jit
def _weights_kernel(
    x_ptr, h1_ptr, h2_ptr, d1_ptr, d2_ptr, da_ptr, dv_ptr, sums_ptr, grad_ptr, stats_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, TILES_1: tl.constexpr, TILES_2: tl.constexpr, TILES_A: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Each program a tile of one layer's gradient, the widest layer's first; the last one adds up the statistics."""
    pid = tl.program_id(0)
    WIDE: tl.constexpr = 2 * K if DUELING else K
    B1: tl.constexpr = H * D
    W2: tl.constexpr = B1 + H
    B2: tl.constexpr = W2 + WIDE * H
    WA: tl.constexpr = B2 + WIDE
    BA: tl.constexpr = WA + A * K
    WV: tl.constexpr = BA + A
    if pid < TILES_2:
        _weight_gradient(
            d2_ptr, h1_ptr, grad_ptr + W2, grad_ptr + B2, pid * COLUMNS, n, WIDE, WIDE, H, H, BLOCK_H, COLUMNS, BLOCK_N
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1:
        first = (pid - TILES_2) * COLUMNS
        _weight_gradient(
            d1_ptr, x_ptr, grad_ptr, grad_ptr + B1, first, n, H, H, D, D, BLOCK_D, COLUMNS, BLOCK_N
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1 + TILES_A:
        first = (pid - TILES_2 - TILES_1) * COLUMNS
        _weight_gradient(
            da_ptr, h2_ptr + (WIDE - K), grad_ptr + WA, grad_ptr + BA, first, n, A, A, K, WIDE, BLOCK_K, COLUMNS,
            BLOCK_N,
        )  # fmt: skip
    elif pid == TILES_2 + TILES_1 + TILES_A:
        part = tl.arange(0, BLOCK_PARTS)
        for i in tl.static_range(_STATS):
            if i == 3:
                high = tl.load(sums_ptr + part * _STATS + i, mask=part < PARTS, other=float("-inf"))
                tl.store(stats_ptr + i, tl.max(high, 0))
            else:
                total = tl.load(sums_ptr + part * _STATS + i, mask=part < PARTS, other=0.0)
                tl.store(stats_ptr + i, tl.sum(total, 0) / n)
    elif DUELING:
        _weight_gradient(
            dv_ptr, h2_ptr, grad_ptr + WV, grad_ptr + WV + K, 0, n, 1, 1, K, WIDE, BLOCK_K, COLUMNS, BLOCK_N
        )  # fmt: skip


def q_mlp_loss(
    params: Tensor,
    target_params: Tensor,
    x: Tensor,
    next_x: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    hidden: int,
    k: int,
    actions: int,
    dueling: bool,
    double: bool,
    huber: float,
) -> tuple[Tensor, ...]:
    """As the reference, float32, with a row of sums for each program."""
    n, d = x.shape
    wide, parts = 2 * k if dueling else k, triton.cdiv(n, ROWS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=x.device)

    q, td_error = empty(3 if double else 2, n, actions), empty(n)
    h1, h2, d1, d2 = empty(n, hidden), empty(n, wide), empty(n, hidden), empty(n, wide)
    da, dv, sums = empty(n, actions), empty(n), empty(parts, len(STATS))
    common = dict(
        D=d, H=hidden, K=k, A=actions, DUELING=dueling,
        BLOCK_H=_block(hidden), BLOCK_K=_block(k), BLOCK_A=_block(actions, LEAST_ACTIONS), ROWS=ROWS,
    )  # fmt: skip
    _forward_kernel[(parts, len(q))](
        params,
        target_params,
        x,
        next_x.contiguous(),
        q,
        h1,
        h2,
        n,
        BLOCK_D=_block(d),
        **common,
        num_warps=FORWARD_WARPS,
    )
    rows = (t.contiguous() for t in (action, reward, discount, weight))
    _loss_kernel[(parts,)](params, q, h1, h2, *rows, td_error, sums, da, dv, d2, d1, huber, n, DOUBLE=double, **common)
    return td_error, h1, h2, d1, d2, da, dv, sums


def q_mlp_gradient(
    x: Tensor,
    h1: Tensor,
    h2: Tensor,
    d1: Tensor,
    d2: Tensor,
    da: Tensor,
    dv: Tensor,
    sums: Tensor,
    hidden: int,
    k: int,
    actions: int,
    dueling: bool,
) -> tuple[Tensor, Tensor]:
    """As the reference, float32."""
    (n, d), parts = x.shape, len(sums)
    gradient = torch.empty(_size(d, hidden, k, actions, dueling), device=x.device)
    stats = torch.empty(len(STATS), device=x.device)
    tiles = {"TILES_1": hidden, "TILES_2": h2.shape[1], "TILES_A": actions}
    tiles = {name: triton.cdiv(width, COLUMNS) for name, width in tiles.items()}
    _weights_kernel[(sum(tiles.values()) + 1 + dueling,)](
        x, h1, h2, d1, d2, da, dv, sums, gradient, stats,
        n, D=d, H=hidden, K=k, A=actions, DUELING=dueling,
        BLOCK_D=_block(d), BLOCK_H=_block(hidden), BLOCK_K=_block(k), BLOCK_N=BLOCK_N, COLUMNS=COLUMNS, **tiles,
        PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return gradient, stats
