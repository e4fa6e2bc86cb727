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
from sharpwave.ops.dqn_loss.triton import add_up, first_best
from sharpwave.ops.q_mlp.triton import (
    COLUMNS,
    LEAST_ACTIONS,
    block_of,
    layer,
    load_rows,
    load_transposed,
    load_weight,
    store_rows,
    weight_gradient,
)
from sharpwave.ops.q_mlp_loss import ROWS, _size

_STATS = tl.constexpr(len(STATS))
FORWARD_PART, LOSS_PART, WEIGHT_PART = 64, 32, 64  # columns of a program's product, at most
BLOCK_N = 64  # rows of the batch that a tile of a weight's gradient adds at a time


@triton.jit
def _forward_kernel(
    params_ptr, target_params_ptr, x_ptr, next_x_ptr, q_ptr, h1_ptr, h2_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_A: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Pass 0 is Q(x), 1 is Q_target(next_x), 2 is Q(next_x).

    After its last activation the network is linear: programs take PART of the K units of each stream, and leave PARTS
    summands of Q, [pass, part, n, A].
    """
    which = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
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
    rows = tl.where(which == 0, n, 0)  # activations of the others are not needed again
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d, h, a = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_A)
    k = part * PART + tl.arange(0, PART)
    x = load_rows(seen_ptr, row, d, n, D, D)
    h1 = layer(x, load_transposed(w_ptr, h, d, H, D), w_ptr + B1, h, H)
    store_rows(h1_ptr, row, h, tl.where(part == 0, rows, 0), H, H, h1)
    if DUELING:
        hv = layer(h1, load_transposed(w_ptr + W2, k, h, K, H), w_ptr + B2, k, K)
        store_rows(h2_ptr, row, k, rows, K, WIDE, hv)
    ha = layer(h1, load_transposed(w_ptr + W2 + (WIDE - K) * H, k, h, K, H), w_ptr + B2 + (WIDE - K), k, K)
    store_rows(h2_ptr + (WIDE - K), row, k, rows, K, WIDE, ha)
    q = tl.dot(ha, load_transposed(w_ptr + WA, a, k, A, K), input_precision="tf32x3")
    q += tl.load(w_ptr + BA + a, mask=a < tl.where(part == 0, A, 0), other=0.0)[None, :]
    if DUELING:
        wv = tl.load(w_ptr + WV + k, mask=k < K, other=0.0)
        value = tl.sum(hv * wv[None, :], 1)
        if part == 0:
            value += tl.load(w_ptr + WV + K)
        q += (value - tl.sum(tl.where(a[None, :] < A, q, 0.0), 1) / A)[:, None]
    store_rows(q_ptr + tl.program_id(1) * n * A, row, a, n, A, A, q)


@triton.jit
def _q_values(q_ptr, row, a, n, A: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the summands of Q that one pass left, [ROWS, BLOCK_A]."""
    q = load_rows(q_ptr, row, a, n, A, A)
    for part in tl.static_range(1, PARTS):
        q += load_rows(q_ptr + part * n * A, row, a, n, A, A)
    return q


@triton.jit
def _loss_kernel(
    params_ptr, q_ptr, h1_ptr, h2_ptr, action_ptr, reward_ptr, discount_ptr, weight_ptr,
    td_ptr, sums_ptr, da_ptr, dv_ptr, d2_ptr, d1_ptr,
    huber, n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    DOUBLE: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows the TD errors, sums of the statistics, and gradients of what enters each activation.

    The gradient of the first layer's is shared out between programs, a SLICE of its columns each, which all work out
    the rest: the product is most of the time, for the weight lies across what it adds up.
    """
    pid = tl.program_id(0)
    row = pid * ROWS + tl.arange(0, ROWS)
    here = row < n
    h = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    k, a = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_A)
    is_first = tl.program_id(1) == 0
    kept = tl.where(is_first, n, 0)  # what all slices work out, one writes
    W2: tl.constexpr = H * D + H
    WIDE: tl.constexpr = 2 * K if DUELING else K
    WA: tl.constexpr = W2 + WIDE * H + WIDE
    WV: tl.constexpr = WA + A * K + A

    q = _q_values(q_ptr, row, a, n, A, PARTS)
    following = _q_values(q_ptr + PARTS * n * A, row, a, n, A, PARTS)
    chooser = following
    if DOUBLE:
        chooser = _q_values(q_ptr + 2 * PARTS * n * A, row, a, n, A, PARTS)
    mask = here[:, None] & (a[None, :] < A)
    best = first_best(chooser, a[None, :], mask, BLOCK_A)
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
    tl.store(td_ptr + row, td, mask=row < kept)
    da = tl.where(mask & taken, slope[:, None], 0.0)

    if is_first:
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
        tl.store(dv_ptr + row, dv, mask=row < kept)
        wv = tl.load(params_ptr + WV + k, mask=k < K, other=0.0)
        d2v = tl.where(load_rows(h2_ptr, row, k, n, K, WIDE) > 0.0, dv[:, None] * wv[None, :], 0.0)
        store_rows(d2_ptr, row, k, kept, K, WIDE, d2v)
    store_rows(da_ptr, row, a, kept, A, A, da)
    d2 = tl.dot(da, load_weight(params_ptr + WA, a, k, A, K), input_precision="tf32x3")
    d2 = tl.where(load_rows(h2_ptr + (WIDE - K), row, k, n, K, WIDE) > 0.0, d2, 0.0)
    store_rows(d2_ptr + (WIDE - K), row, k, kept, K, WIDE, d2)
    d1 = tl.dot(d2, load_weight(params_ptr + W2 + (WIDE - K) * H, k, h, K, H), input_precision="tf32x3")
    if DUELING:
        d1 += tl.dot(d2v, load_weight(params_ptr + W2, k, h, K, H), input_precision="tf32x3")
    d1 = tl.where(load_rows(h1_ptr, row, h, n, H, H) > 0.0, d1, 0.0)
    store_rows(d1_ptr, row, h, n, H, H, d1)


@triton.jit
def _weights_kernel(
    x_ptr, h1_ptr, h2_ptr, d1_ptr, d2_ptr, da_ptr, dv_ptr, sums_ptr, grad_ptr, stats_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    TILES_1: tl.constexpr, TILES_2: tl.constexpr, TILES_A: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Each program a tile of one layer's gradient, the widest layer's first; one adds up the statistics."""
    pid = tl.program_id(0)
    first_in = tl.program_id(1) * BLOCK_IN
    WIDE: tl.constexpr = 2 * K if DUELING else K
    B1: tl.constexpr = H * D
    W2: tl.constexpr = B1 + H
    B2: tl.constexpr = W2 + WIDE * H
    WA: tl.constexpr = B2 + WIDE
    BA: tl.constexpr = WA + A * K
    WV: tl.constexpr = BA + A
    if pid < TILES_2:
        weight_gradient(
            d2_ptr, h1_ptr, grad_ptr + W2, grad_ptr + B2, pid * COLUMNS, first_in, n,
            WIDE, WIDE, H, H, BLOCK_IN, COLUMNS, BLOCK_N,
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1:
        weight_gradient(
            d1_ptr, x_ptr, grad_ptr, grad_ptr + B1, (pid - TILES_2) * COLUMNS, first_in, n,
            H, H, D, D, BLOCK_IN, COLUMNS, BLOCK_N,
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1 + TILES_A:
        weight_gradient(
            da_ptr, h2_ptr + (WIDE - K), grad_ptr + WA, grad_ptr + BA, (pid - TILES_2 - TILES_1) * COLUMNS, first_in, n,
            A, A, K, WIDE, BLOCK_IN, COLUMNS, BLOCK_N,
        )  # fmt: skip
    elif pid == TILES_2 + TILES_1 + TILES_A:
        add_up(sums_ptr, stats_ptr, n, PARTS, BLOCK_PARTS)
    elif DUELING:
        weight_gradient(
            dv_ptr, h2_ptr, grad_ptr + WV, grad_ptr + WV + K, 0, first_in, n,
            1, 1, K, WIDE, BLOCK_IN, COLUMNS, BLOCK_N,
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
    wide, programs, passes = 2 * k if dueling else k, triton.cdiv(n, ROWS), 3 if double else 2
    block_h, block_k = block_of(hidden), block_of(k)
    part, piece = min(block_k, FORWARD_PART), min(block_h, LOSS_PART)
    parts = triton.cdiv(k, part)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=x.device)

    q, td_error = empty(passes, parts, n, actions), empty(n)
    h1, h2, d1, d2 = empty(n, hidden), empty(n, wide), empty(n, hidden), empty(n, wide)
    da, dv, sums = empty(n, actions), empty(n), empty(programs, len(STATS))
    common = dict(
        D=d, H=hidden, K=k, A=actions, DUELING=dueling, PARTS=parts, BLOCK_A=block_of(actions, LEAST_ACTIONS), ROWS=ROWS
    )  # fmt: skip
    _forward_kernel[(programs, passes * parts)](
        params, target_params, x, next_x.contiguous(), q, h1, h2, n,
        PART=part, BLOCK_D=block_of(d), BLOCK_H=block_h, **common, num_warps=8,
    )  # fmt: skip
    rows = (t.contiguous() for t in (action, reward, discount, weight))
    _loss_kernel[(programs, triton.cdiv(hidden, piece))](
        params, q, h1, h2, *rows, td_error, sums, da, dv, d2, d1, huber, n,
        DOUBLE=double, SLICE=piece, BLOCK_K=block_k, **common, num_warps=4,
    )  # fmt: skip
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
    widest = max(d, hidden, k)
    block_in = min(block_of(widest), WEIGHT_PART)
    _weights_kernel[(sum(tiles.values()) + 1 + dueling, triton.cdiv(widest, block_in))](
        x, h1, h2, d1, d2, da, dv, sums, gradient, stats,
        n, D=d, H=hidden, K=k, A=actions, DUELING=dueling, BLOCK_IN=block_in, BLOCK_N=BLOCK_N, COLUMNS=COLUMNS, **tiles,
        PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return gradient, stats
