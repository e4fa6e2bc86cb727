"""A narrow Q network for GPUs: a program takes a few rows through all layers, and a layer's gradient is a few programs.

Hidden activations go through memory only because the gradients read them. "tf32x3" splits float32 operands into parts
for the tensor cores, and loses nothing that float32 sums would keep.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program: the fewest a tensor core takes, so that a batch of 256 spreads over 16 multiprocessors
COLUMNS = 16  # rows of a weight's gradient that one program computes
LEAST_ACTIONS = 32  # columns of a tile of actions: eight warps spill thousands of words over a product 16 wide


@triton.jit
def load_transposed(w_ptr, offs_out, offs_in, N_OUT, N_IN):
    """A weight (N_OUT, N_IN) as [IN, OUT], zero beyond its edges."""
    mask = (offs_in[:, None] < N_IN) & (offs_out[None, :] < N_OUT)
    return tl.load(w_ptr + offs_out[None, :] * N_IN + offs_in[:, None], mask=mask, other=0.0)


@triton.jit
def load_weight(w_ptr, offs_out, offs_in, N_OUT, N_IN):
    """A weight (N_OUT, N_IN) as [OUT, IN], zero beyond its edges."""
    mask = (offs_out[:, None] < N_OUT) & (offs_in[None, :] < N_IN)
    return tl.load(w_ptr + offs_out[:, None] * N_IN + offs_in[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(x_ptr, offs_row, offs, n, WIDTH, STRIDE):
    """Rows of (n, STRIDE), their first WIDTH entries from x_ptr on."""
    mask = (offs_row[:, None] < n) & (offs[None, :] < WIDTH)
    return tl.load(x_ptr + offs_row[:, None] * STRIDE + offs[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x_ptr, offs_row, offs, n, WIDTH, STRIDE, value):
    mask = (offs_row[:, None] < n) & (offs[None, :] < WIDTH)
    tl.store(x_ptr + offs_row[:, None] * STRIDE + offs[None, :], value, mask=mask)


@triton.jit
def layer(x, w, b_ptr, offs, WIDTH):
    """relu(x w + b), [ROWS, OUT]."""
    bias = tl.load(b_ptr + offs, mask=offs < WIDTH, other=0.0)
    return tl.maximum(tl.dot(x, w, input_precision="tf32x3") + bias[None, :], 0.0)


@triton.jit
def _forward_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, wa_ptr, ba_ptr, wv_ptr, bv_ptr, q_ptr, h1_ptr, h2_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d, h, k, a = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_A)
    x = load_rows(x_ptr, row, d, n, D, D)
    h1 = layer(x, load_transposed(w1_ptr, h, d, H, D), b1_ptr, h, H)
    store_rows(h1_ptr, row, h, n, H, H, h1)
    if DUELING:
        hv = layer(h1, load_transposed(w2_ptr, k, h, K, H), b2_ptr, k, K)
        store_rows(h2_ptr, row, k, n, K, 2 * K, hv)
        ha = layer(h1, load_transposed(w2_ptr + K * H, k, h, K, H), b2_ptr + K, k, K)
        store_rows(h2_ptr + K, row, k, n, K, 2 * K, ha)
    else:
        ha = layer(h1, load_transposed(w2_ptr, k, h, K, H), b2_ptr, k, K)
        store_rows(h2_ptr, row, k, n, K, K, ha)
    q = tl.dot(ha, load_transposed(wa_ptr, a, k, A, K), input_precision="tf32x3")
    q += tl.load(ba_ptr + a, mask=a < A, other=0.0)[None, :]
    if DUELING:
        wv = tl.load(wv_ptr + k, mask=k < K, other=0.0)
        value = tl.sum(hv * wv[None, :], 1) + tl.load(bv_ptr)
        q += (value - tl.sum(tl.where(a[None, :] < A, q, 0.0), 1) / A)[:, None]
    store_rows(q_ptr, row, a, n, A, A, q)


@triton.jit
def _data_kernel(
    dq_ptr, h1_ptr, h2_ptr, w2_ptr, wa_ptr, wv_ptr, da_ptr, dv_ptr, d2_ptr, d1_ptr,
    n, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_A: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of what enters each activation, for ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h, k, a = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_A)
    da = load_rows(dq_ptr, row, a, n, A, A)
    if DUELING:
        dv = tl.sum(da, 1)
        da = tl.where(a[None, :] < A, da - dv[:, None] / A, 0.0)
        tl.store(dv_ptr + row, dv, mask=row < n)
        store_rows(da_ptr, row, a, n, A, A, da)
        wv = tl.load(wv_ptr + k, mask=k < K, other=0.0)
        d2v = tl.where(load_rows(h2_ptr, row, k, n, K, 2 * K) > 0.0, dv[:, None] * wv[None, :], 0.0)
        store_rows(d2_ptr, row, k, n, K, 2 * K, d2v)
        d1 = tl.dot(d2v, load_weight(w2_ptr, k, h, K, H), input_precision="tf32x3")
        d2 = tl.dot(da, load_weight(wa_ptr, a, k, A, K), input_precision="tf32x3")
        d2 = tl.where(load_rows(h2_ptr + K, row, k, n, K, 2 * K) > 0.0, d2, 0.0)
        store_rows(d2_ptr + K, row, k, n, K, 2 * K, d2)
        d1 += tl.dot(d2, load_weight(w2_ptr + K * H, k, h, K, H), input_precision="tf32x3")
    else:
        d2 = tl.dot(da, load_weight(wa_ptr, a, k, A, K), input_precision="tf32x3")
        d2 = tl.where(load_rows(h2_ptr, row, k, n, K, K) > 0.0, d2, 0.0)
        store_rows(d2_ptr, row, k, n, K, K, d2)
        d1 = tl.dot(d2, load_weight(w2_ptr, k, h, K, H), input_precision="tf32x3")
    d1 = tl.where(load_rows(h1_ptr, row, h, n, H, H) > 0.0, d1, 0.0)
    store_rows(d1_ptr, row, h, n, H, H, d1)


@triton.jit
def weight_gradient(
    g_ptr, x_ptr, dw_ptr, db_ptr, first, first_in, n,
    N_OUT: tl.constexpr, G_STRIDE: tl.constexpr, N_IN: tl.constexpr, X_STRIDE: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT rows of dw = g^T x, BLOCK_IN columns of them, and of db = sum g, over all n rows in order."""
    out, into = first + tl.arange(0, BLOCK_OUT), first_in + tl.arange(0, BLOCK_IN)
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    bias = tl.zeros([BLOCK_OUT], tl.float32)
    for start in range(0, n, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        mask = (row[None, :] < n) & (out[:, None] < N_OUT)
        g = tl.load(g_ptr + row[None, :] * G_STRIDE + out[:, None], mask=mask, other=0.0)  # [OUT, N]
        total = tl.dot(g, load_rows(x_ptr, row, into, n, N_IN, X_STRIDE), total, input_precision="tf32x3")
        bias += tl.sum(g, 1)
    mask = (out[:, None] < N_OUT) & (into[None, :] < N_IN)
    tl.store(dw_ptr + out[:, None] * N_IN + into[None, :], total, mask=mask)
    tl.store(db_ptr + out, bias, mask=out < tl.where(first_in == 0, N_OUT, 0))


@triton.jit
def _weights_kernel(
    x_ptr, h1_ptr, h2_ptr, d1_ptr, d2_ptr, da_ptr, dv_ptr,
    dw1_ptr, db1_ptr, dw2_ptr, db2_ptr, dwa_ptr, dba_ptr, dwv_ptr, dbv_ptr,
    n, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr, DUELING: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, TILES_1: tl.constexpr, TILES_2: tl.constexpr, TILES_A: tl.constexpr,
):  # fmt: skip
    """Each program a tile of one layer's gradient; the widest layer's come first."""
    pid = tl.program_id(0)
    wide: tl.constexpr = 2 * K if DUELING else K
    if pid < TILES_2:
        weight_gradient(
            d2_ptr, h1_ptr, dw2_ptr, db2_ptr, pid * COLUMNS, 0, n, wide, wide, H, H, BLOCK_H, COLUMNS, BLOCK_N
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1:
        weight_gradient(
            d1_ptr, x_ptr, dw1_ptr, db1_ptr, (pid - TILES_2) * COLUMNS, 0, n, H, H, D, D, BLOCK_D, COLUMNS, BLOCK_N
        )  # fmt: skip
    elif pid < TILES_2 + TILES_1 + TILES_A:
        first = (pid - TILES_2 - TILES_1) * COLUMNS
        weight_gradient(
            da_ptr, h2_ptr + (wide - K), dwa_ptr, dba_ptr, first, 0, n, A, A, K, wide, BLOCK_K, COLUMNS, BLOCK_N
        )  # fmt: skip
    elif DUELING:
        weight_gradient(dv_ptr, h2_ptr, dwv_ptr, dbv_ptr, 0, 0, n, 1, 1, K, wide, BLOCK_K, COLUMNS, BLOCK_N)


def block_of(width: int, least: int = 16) -> int:
    return max(triton.next_power_of_2(width), least)


def q_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    wa: Tensor,
    ba: Tensor,
    wv: Tensor | None,
    bv: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, float32."""
    x = x.contiguous()
    n, d = x.shape
    (actions, k), h = wa.shape, w1.shape[0]
    q, h1, h2 = (torch.empty((n, width), device=x.device) for width in (actions, h, w2.shape[0]))
    weights = (None if w is None else w.contiguous() for w in (w1, b1, w2, b2, wa, ba, wv, bv))
    _forward_kernel[(triton.cdiv(n, ROWS),)](
        x, *weights, q, h1, h2, n, D=d, H=h, K=k, A=actions, DUELING=wv is not None,
        BLOCK_D=block_of(d), BLOCK_H=block_of(h), BLOCK_K=block_of(k), BLOCK_A=block_of(actions, LEAST_ACTIONS),
        ROWS=ROWS, num_warps=8,
    )  # fmt: skip
    return q, h1, h2


def q_mlp_backward(
    dq: Tensor, x: Tensor, h1: Tensor, h2: Tensor, w2: Tensor, wa: Tensor, wv: Tensor | None
) -> tuple[Tensor, ...]:
    """As the reference, float32."""
    x = x.contiguous()
    (n, d), h, (actions, k), wide = x.shape, h1.shape[1], wa.shape, w2.shape[0]
    dueling = wv is not None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=x.device)

    d1, d2 = empty(n, h), empty(n, wide)
    da, dv = (empty(n, actions), empty(n)) if dueling else (dq, None)
    grads = [empty(h, d), empty(h), empty(wide, h), empty(wide), empty(actions, k), empty(actions)]
    grads += [empty(1, k), empty(1)] if dueling else [empty(0), empty(0)]
    blocks = dict(BLOCK_H=block_of(h), BLOCK_K=block_of(k))
    _data_kernel[(triton.cdiv(n, ROWS),)](
        dq, h1, h2, w2.contiguous(), wa.contiguous(), None if wv is None else wv.contiguous(), da, dv, d2, d1,
        n, H=h, K=k, A=actions, DUELING=dueling, BLOCK_A=block_of(actions, LEAST_ACTIONS), ROWS=ROWS, **blocks,
        num_warps=8,
    )  # fmt: skip
    tiles_1, tiles_2, tiles_a = (triton.cdiv(width, COLUMNS) for width in (h, wide, actions))
    _weights_kernel[(tiles_1 + tiles_2 + tiles_a + dueling,)](
        x, h1, h2, d1, d2, da, dv, *grads, n, D=d, H=h, K=k, A=actions, DUELING=dueling,
        BLOCK_D=block_of(d), **blocks, BLOCK_N=32, COLUMNS=COLUMNS,
        TILES_1=tiles_1, TILES_2=tiles_2, TILES_A=tiles_a, num_warps=8,
    )  # fmt: skip
    return tuple(grads)
