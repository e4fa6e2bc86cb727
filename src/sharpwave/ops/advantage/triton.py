"""The advantage recursion for GPUs: an associative scan over time, several segments a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _affine(a1, b1, a2, b2):
    """Composition of y = a1 x + b1, then y = a2 x + b2."""
    return a1 * a2, tl.fma(a2, b1, b2)


@triton.jit
def _puff_advantage_kernel(
    value_ptr,
    next_value_ptr,
    reward_ptr,
    terminated_ptr,
    truncated_ptr,
    ratio_ptr,
    valid_ptr,
    rows_ptr,
    out_ptr,
    priority_ptr,
    n_segments,
    horizon,
    gamma,
    lam,
    rho_clip,
    c_clip,
    alpha,
    HAS_VALID: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PRIORITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_segments
    if HAS_ROWS:
        offs_n = tl.load(rows_ptr + offs_n, mask=mask_n, other=0)
    carry = tl.zeros([BLOCK_N], tl.float32)
    size = tl.zeros([BLOCK_N], tl.float32)
    n_blocks = tl.cdiv(horizon, BLOCK_T)
    for block in range(n_blocks):
        offs_t = (n_blocks - 1 - block) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = mask_n[:, None] & (offs_t < horizon)[None, :]  # [BLOCK_N, BLOCK_T]
        offs = offs_n[:, None] * horizon + offs_t[None, :]
        last = (offs_t == horizon - 1)[None, :]
        value = tl.load(value_ptr + offs, mask=mask, other=0.0)
        reward = tl.load(reward_ptr + offs, mask=mask, other=0.0)
        ratio = tl.load(ratio_ptr + offs, mask=mask, other=0.0)
        terminated = tl.load(terminated_ptr + offs, mask=mask, other=0) != 0
        truncated = tl.load(truncated_ptr + offs, mask=mask, other=0) != 0
        boundary = truncated | last
        v_tp1 = tl.load(value_ptr + offs + 1, mask=mask & ~boundary, other=0.0)
        v_tp1 += tl.load(next_value_ptr + offs, mask=mask & boundary & ~terminated, other=0.0)
        v_tp1 = tl.where(terminated, 0.0, v_tp1)
        delta = tl.minimum(ratio, rho_clip) * (reward + gamma * v_tp1 - value)
        decay = gamma * lam * tl.minimum(ratio, c_clip)
        decay = tl.where(terminated | truncated, 0.0, decay)
        # Steps past the horizon are the identity map, so that the carry passes through them.
        decay = tl.where(mask, decay, 1.0)
        delta = tl.where(mask, delta, 0.0)
        slope, local = tl.associative_scan((decay, delta), 1, _affine, reverse=True)
        advantage = tl.fma(slope, tl.broadcast_to(carry[:, None], [BLOCK_N, BLOCK_T]), local)
        first = (tl.arange(0, BLOCK_T) == 0)[None, :]
        carry = tl.sum(tl.where(first, advantage, 0.0), 1)
        if HAS_VALID:
            advantage = tl.where(tl.load(valid_ptr + offs, mask=mask, other=0) != 0, advantage, 0.0)
        tl.store(out_ptr + offs, advantage, mask=mask)
        size += tl.sum(tl.where(mask, tl.abs(advantage), 0.0), 1)
    if PRIORITY:
        priority = tl.where(size == 0.0, 0.0, tl.exp2(alpha * tl.log2(tl.maximum(size, 1e-45))))
        priority = tl.where(alpha == 0.0, 1.0, priority)
        priority = tl.where(size < float("inf"), priority, float("nan"))
        tl.store(priority_ptr + offs_n, priority, mask=mask_n)


def puff_advantage(
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    ratio: Tensor,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> Tensor:
    """Same as `reference.puff_advantage`, float32 only; sums are reassociated within blocks of time."""
    inputs = (value, next_value, reward, terminated, truncated, ratio)
    return _launch(inputs, None, None, None, value.new_empty(value.shape), gamma, lam, rho_clip, c_clip, 0.0)


def advantage_and_priority(
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    ratio: Tensor,
    valid: Tensor | None,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
    alpha: float,
    rows: Tensor | None,
    out: tuple[Tensor, Tensor],
) -> None:
    """`puff_advantage` and the sums after it, in the one launch."""
    inputs = (value, next_value, reward, terminated, truncated, ratio)
    _launch(inputs, valid, rows, out[1], out[0], gamma, lam, rho_clip, c_clip, alpha)


def _launch(
    inputs: tuple[Tensor, ...], valid: Tensor | None, rows: Tensor | None, priority: Tensor | None, out: Tensor,
    gamma: float, lam: float, rho_clip: float, c_clip: float, alpha: float,
) -> Tensor:  # fmt: skip
    value = inputs[0]
    if value.dtype != torch.float32:
        raise TypeError(
            f"the triton backend of puff_advantage takes float32; got {value.dtype}: use backend='reference'"
        )
    n, horizon = value.shape
    n = n if rows is None else len(rows)
    # Tiles do not depend on how many segments there are, so that a segment's bits do not.
    block_t = min(triton.next_power_of_2(horizon), 128)
    block_n = max(1, 1024 // block_t)
    if n:
        _puff_advantage_kernel[(triton.cdiv(n, block_n),)](
            *(x.contiguous() for x in inputs), None if valid is None else valid.contiguous(), rows, out, priority,
            n, horizon, gamma, lam, rho_clip, c_clip, alpha,
            HAS_VALID=valid is not None, HAS_ROWS=rows is not None, PRIORITY=priority is not None,
            BLOCK_N=block_n, BLOCK_T=block_t,
        )  # fmt: skip
    return out
