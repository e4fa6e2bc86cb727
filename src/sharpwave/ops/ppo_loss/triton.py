"""The PPO loss and its gradient for GPUs: the advantages' moments, one pass over the rows, and the sums' sum.

Rows are shared out to programs in fixed blocks. Each writes its sums to a place of its own, and one more launch adds
them in order, so that the loss does not depend on who came when. The gradient need not wait for that launch.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sharpwave.run.graphs import Branch

N_STATS = 6
MOMENT_BLOCK = 1024
PROGRAMS = 1024  # about eight for each multiprocessor of a large GPU; they share the rows
_LOG_2PI = tl.constexpr(1.8378770664093453)


@triton.jit
def _moments_kernel(
    advantage_ptr, valid_ptr, moments_ptr, n, HAS_VALID: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program's sum, sum of squares and count of valid advantages over the first of all, in float64; and that one.

    Over one of them, or the squares would cancel where all are nearly equal.
    """
    pid = tl.program_id(0)
    first = tl.load(advantage_ptr).to(tl.float64)
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    total = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float64)
    for start in range(pid * BLOCK, n, PARTS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < n
        if HAS_VALID:
            mask = mask & (tl.load(valid_ptr + offs, mask=mask, other=0) != 0)
        a = tl.where(mask, tl.load(advantage_ptr + offs, mask=mask, other=0.0).to(tl.float64) - first, 0.0)
        total += a
        square += a * a
        count += tl.where(mask, 1.0, 0.0)
    tl.store(moments_ptr + pid, tl.sum(total, 0))
    tl.store(moments_ptr + PARTS + pid, tl.sum(square, 0))
    tl.store(moments_ptr + 2 * PARTS + pid, tl.sum(count, 0))
    tl.store(moments_ptr + 3 * PARTS + pid, first)


@triton.jit
def _moments(moments_ptr, PARTS: tl.constexpr):
    """Origin, mean over it, population standard deviation and count (at least 1), float32."""
    offs = tl.arange(0, PARTS)
    count = tl.maximum(tl.sum(tl.load(moments_ptr + 2 * PARTS + offs), 0), 1.0)
    mean = tl.sum(tl.load(moments_ptr + offs), 0) / count
    square = tl.sum(tl.load(moments_ptr + PARTS + offs), 0) / count
    # maximum() drops a NaN, which must reach the loss.
    variance = tl.maximum(square - mean * mean, 0.0) + 0.0 * square
    origin = tl.load(moments_ptr + 3 * PARTS)
    return origin.to(tl.float32), mean.to(tl.float32), tl.sqrt(variance).to(tl.float32), count.to(tl.float32)


@triton.jit
def _surrogate(logprob, value, old_logprob, old_value, advantage, a_hat, weight, clip, vf_clip):
    """Of each row: the ratio, d loss / d logprob, d value loss / d value, and the terms of the five other means."""
    log_ratio = logprob - old_logprob
    ratio = tl.exp(log_ratio)
    wa = -weight * a_hat
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip)
    surrogate, surrogate_clipped = wa * ratio, wa * clipped
    use_clipped = surrogate_clipped > surrogate
    d_logprob = tl.where((ratio == clipped) | (use_clipped == 0), wa * ratio, 0.0)
    policy = tl.maximum(surrogate, surrogate_clipped) + 0.0 * surrogate

    ret = advantage + old_value
    step = value - old_value
    step_clipped = tl.minimum(tl.maximum(step, -vf_clip), vf_clip)
    error, error_clipped = value - ret, old_value + step_clipped - ret
    value_clipped = error_clipped * error_clipped > error * error
    d_value = tl.where(value_clipped, tl.where(step == step_clipped, error_clipped, 0.0), error)
    value_term = 0.5 * tl.maximum(error * error, error_clipped * error_clipped) + 0.0 * error
    outside = tl.where(tl.abs(ratio - 1.0) > clip, 1.0, 0.0)
    return ratio, d_logprob, d_value, policy, value_term, -log_ratio, ratio - 1.0 - log_ratio, outside


@triton.jit
def _store_gradient(
    d_ptr, d_value_ptr, d, d_value, offs_m, offs_k, mask_m, WIDTH: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """OUT = 0: two tensors. Else rows of OUT columns: the parameters' gradients, the value's, and zeros."""
    if OUT == 0:
        tl.store(d_value_ptr + offs_m, d_value.to(d_value_ptr.dtype.element_ty), mask=mask_m)
        mask = mask_m[:, None] & (offs_k < WIDTH)[None, :]
        tl.store(d_ptr + offs_m[:, None] * WIDTH + offs_k[None, :], d.to(d_ptr.dtype.element_ty), mask=mask)
    else:
        d = tl.where((offs_k < WIDTH)[None, :], d, tl.where((offs_k == WIDTH)[None, :], d_value[:, None], 0.0))
        mask = mask_m[:, None] & (offs_k < OUT)[None, :]
        tl.store(d_ptr + offs_m[:, None] * OUT + offs_k[None, :], d.to(d_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(policy, value, entropy, old_kl, kl, outside, partial_ptr):
    """This program's sums, for `_finish_kernel`."""
    # Side by side, for every reduction costs two barriers.
    terms = tl.join(
        tl.join(tl.join(policy, kl), tl.join(entropy, kl)), tl.join(tl.join(value, outside), tl.join(old_kl, outside))
    )
    sums = tl.sum(
        tl.reshape(terms, [policy.shape[0], 8]), 0
    )  # policy, value, entropy, old_kl, kl, outside, kl, outside
    offs = tl.arange(0, 8)
    tl.store(partial_ptr + offs * tl.num_programs(0) + tl.program_id(0), sums, mask=offs < 6)


@triton.jit
def _finish_kernel(
    moments_ptr, partial_ptr, ent_coef_ptr, loss_ptr, stats_ptr, programs, vf_coef,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The programs' sums, added up in order: the means, and the loss of them."""
    offs = tl.arange(0, BLOCKS)[None, :]
    stat = tl.arange(0, 8)[:, None]
    parts = tl.load(partial_ptr + stat * programs + offs, mask=(stat < 6) & (offs < programs), other=0.0)  # [8, BLOCKS]
    _, _, _, count = _moments(moments_ptr, PARTS)
    means = tl.sum(parts, 1) / count  # [8]
    offs_stat = tl.arange(0, 8)
    tl.store(stats_ptr + offs_stat, means, mask=offs_stat < 6)
    ent_coef = tl.load(ent_coef_ptr)
    share = tl.where(offs_stat == 0, 1.0, tl.where(offs_stat == 1, vf_coef, tl.where(offs_stat == 2, -ent_coef, 0.0)))
    # A coefficient of 0 must not hide a NaN behind 0 * NaN, nor spread one from the means that are only reported.
    tl.store(loss_ptr, tl.sum(tl.where(offs_stat < 3, share * means, 0.0), 0))


@triton.jit
def _heads(
    logits, given, action_ptr, stride_action, offs_m, mask_m, offs_k, NVEC: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Of logits [BLOCK_M, BLOCK_K], the heads side by side: each row's log-probability of its action and its entropy;
    each entry's probability, its log, its head's entropy, and whether it was taken."""
    logprob = tl.zeros_like(offs_m).to(tl.float32)
    entropy = logprob
    probs = tl.zeros_like(logits)
    logps, entropies = probs, probs
    taken = probs != 0
    start = 0
    for head in tl.static_range(len(NVEC)):
        inside = ((offs_k >= start) & (offs_k < start + NVEC[head]))[None, :] & mask_m[:, None]
        legal = given & inside
        if HAS_MASK:
            none = tl.max(legal.to(tl.int32), 1) == 0
            legal = legal | (inside & none[:, None])
        top = tl.max(tl.where(legal, logits, -float("inf")), 1)
        top = tl.where(mask_m, top, 0.0)
        shifted = tl.where(legal, logits - top[:, None], -float("inf"))
        e = tl.exp(shifted)
        total = tl.where(mask_m, tl.sum(e, 1), 1.0)
        p = e * (1.0 / total)[:, None]
        logp = tl.where(legal, shifted - tl.log(total)[:, None], 0.0)
        h = -tl.sum(p * logp, 1)
        action = tl.load(action_ptr + offs_m * stride_action + head, mask=mask_m, other=0).to(tl.int32)
        chosen = inside & (offs_k[None, :] == (start + action)[:, None])
        # An illegal action has probability 0, as its log-probability must say.
        logprob += tl.sum(tl.where(chosen, tl.where(legal, logp, -float("inf")), 0.0), 1)
        entropy += h
        probs = tl.where(inside, p, probs)
        logps = tl.where(inside, logp, logps)
        entropies = tl.where(inside, h[:, None], entropies)
        taken = taken | chosen
        start += NVEC[head]
    return logprob, entropy, probs, logps, entropies, taken


@triton.jit
def _categorical_rows(
    logits, given, value, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr, valid_ptr, ratio_ptr,
    stride_action, rows_per_weight, offs_m, mask_m, offs_k, origin, mean, std, count, ent_coef, clip, vf_clip, vf_coef,
    NVEC: tl.constexpr, HAS_MASK: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Of each row: the gradients in logits and value, and its share in each sum. The ratios are stored."""
    logprob, entropy, probs, logps, entropies, taken = _heads(
        logits, given, action_ptr, stride_action, offs_m, mask_m, offs_k, NVEC, HAS_MASK
    )
    valid = mask_m
    if HAS_VALID:
        valid = mask_m & (tl.load(valid_ptr + offs_m, mask=mask_m, other=0) != 0)
    old_logprob = tl.load(old_logprob_ptr + offs_m, mask=mask_m, other=0.0)
    old_value = tl.load(old_value_ptr + offs_m, mask=mask_m, other=0.0)
    advantage = tl.load(advantage_ptr + offs_m, mask=mask_m, other=0.0)
    weight = tl.load(weight_ptr + offs_m // rows_per_weight, mask=mask_m, other=0.0)
    a_hat = (advantage - origin - mean) / (std + 1e-8)
    ratio, d_logprob, d_value, policy, value_term, old_kl, kl, outside = _surrogate(
        logprob, value, old_logprob, old_value, advantage, a_hat, weight, clip, vf_clip
    )
    tl.store(ratio_ptr + offs_m, ratio, mask=mask_m)
    share = tl.where(valid, 1.0 / count, 0.0)
    d_value = tl.where(valid, vf_coef * share * d_value, 0.0)
    d_logprob, d_entropy = d_logprob * share, ent_coef * share
    d = tl.where(taken, d_logprob[:, None], 0.0) + probs * (
        d_entropy[:, None] * (logps + entropies) - d_logprob[:, None]
    )
    d = tl.where(valid[:, None], d, 0.0)
    return (
        d,
        d_value,
        tl.where(valid, policy, 0.0),
        tl.where(valid, value_term, 0.0),
        tl.where(valid, entropy, 0.0),
        tl.where(valid, old_kl, 0.0),
        tl.where(valid, kl, 0.0),
        tl.where(valid, outside, 0.0),
    )


@triton.jit
def _categorical_kernel(
    logits_ptr, value_ptr, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr, mask_ptr, valid_ptr,
    ent_coef_ptr, ratio_ptr, d_logits_ptr, d_value_ptr, moments_ptr, partial_ptr,
    n, stride_logits, stride_value, stride_action, rows_per_weight, clip, vf_clip, vf_coef,
    NVEC: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_VALID: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    origin, mean, std, count = _moments(moments_ptr, PARTS)
    ent_coef = tl.load(ent_coef_ptr)
    sum_policy = tl.zeros([BLOCK_M], tl.float32)
    sum_value, sum_entropy, sum_old_kl, sum_kl, sum_outside = sum_policy, sum_policy, sum_policy, sum_policy, sum_policy
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK_M), tl.num_programs(0)):
        offs_m = tl.arange(0, BLOCK_M).to(tl.int64) + block * BLOCK_M
        offs_k = tl.arange(0, BLOCK_K)
        mask_m = offs_m < n
        given = mask_m[:, None] & (offs_k < WIDTH)[None, :]  # [BLOCK_M, BLOCK_K]
        logits = tl.load(logits_ptr + offs_m[:, None] * stride_logits + offs_k[None, :], mask=given, other=0.0)
        if HAS_MASK:
            given = given & (tl.load(mask_ptr + offs_m[:, None] * WIDTH + offs_k[None, :], mask=given, other=0) != 0)
        value = tl.load(value_ptr + offs_m * stride_value, mask=mask_m, other=0.0).to(tl.float32)
        d, d_value, policy, value_term, entropy, old_kl, kl, outside = _categorical_rows(
            logits.to(tl.float32), given, value, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr,
            valid_ptr, ratio_ptr, stride_action, rows_per_weight, offs_m, mask_m, offs_k, origin, mean, std, count,
            ent_coef, clip, vf_clip, vf_coef, NVEC, HAS_MASK, HAS_VALID,
        )  # fmt: skip
        _store_gradient(d_logits_ptr, d_value_ptr, d, d_value, offs_m, offs_k, mask_m, WIDTH, OUT)
        sum_policy += policy
        sum_value += value_term
        sum_entropy += entropy
        sum_old_kl += old_kl
        sum_kl += kl
        sum_outside += outside
    _store_sums(sum_policy, sum_value, sum_entropy, sum_old_kl, sum_kl, sum_outside, partial_ptr)


@triton.jit
def _gaussian_kernel(
    mean_ptr, log_std_ptr, value_ptr, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr, valid_ptr,
    ent_coef_ptr, ratio_ptr, d_mean_ptr, d_log_std_ptr, d_value_ptr, moments_ptr, partial_ptr,
    n, stride_mean, stride_log_std, stride_value, rows_per_weight, clip, vf_clip, vf_coef,
    DIM: tl.constexpr, OUT: tl.constexpr, HAS_VALID: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    a_origin, a_mean, a_std, count = _moments(moments_ptr, PARTS)
    ent_coef = tl.load(ent_coef_ptr)
    sum_policy = tl.zeros([BLOCK_M], tl.float32)
    sum_value = tl.zeros([BLOCK_M], tl.float32)
    sum_entropy = tl.zeros([BLOCK_M], tl.float32)
    sum_old_kl = tl.zeros([BLOCK_M], tl.float32)
    sum_kl = tl.zeros([BLOCK_M], tl.float32)
    sum_outside = tl.zeros([BLOCK_M], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK_M), tl.num_programs(0)):
        offs_m = tl.arange(0, BLOCK_M).to(tl.int64) + block * BLOCK_M
        offs_k = tl.arange(0, BLOCK_K)
        mask_m = offs_m < n
        mask_mk = mask_m[:, None] & (offs_k < DIM)[None, :]  # [BLOCK_M, BLOCK_K]
        mean = tl.load(mean_ptr + offs_m[:, None] * stride_mean + offs_k[None, :], mask=mask_mk, other=0.0).to(
            tl.float32
        )
        log_std = tl.load(log_std_ptr + offs_m[:, None] * stride_log_std + offs_k[None, :], mask=mask_mk, other=0.0)
        log_std = log_std.to(tl.float32)
        action = tl.load(action_ptr + offs_m[:, None] * DIM + offs_k[None, :], mask=mask_mk, other=0.0)
        inv_std = tl.exp(-log_std)
        z = (action - mean) * inv_std
        logprob = tl.sum(tl.where(mask_mk, -0.5 * z * z - log_std - 0.5 * _LOG_2PI, 0.0), 1)
        entropy = tl.sum(tl.where(mask_mk, log_std + 0.5 * (_LOG_2PI + 1.0), 0.0), 1)

        valid = mask_m
        if HAS_VALID:
            valid = mask_m & (tl.load(valid_ptr + offs_m, mask=mask_m, other=0) != 0)
        value = tl.load(value_ptr + offs_m * stride_value, mask=mask_m, other=0.0).to(tl.float32)
        old_logprob = tl.load(old_logprob_ptr + offs_m, mask=mask_m, other=0.0)
        old_value = tl.load(old_value_ptr + offs_m, mask=mask_m, other=0.0)
        advantage = tl.load(advantage_ptr + offs_m, mask=mask_m, other=0.0)
        weight = tl.load(weight_ptr + offs_m // rows_per_weight, mask=mask_m, other=0.0)
        a_hat = (advantage - a_origin - a_mean) / (a_std + 1e-8)
        ratio, d_logprob, d_value, policy, value_term, old_kl, kl, outside = _surrogate(
            logprob, value, old_logprob, old_value, advantage, a_hat, weight, clip, vf_clip
        )
        tl.store(ratio_ptr + offs_m, ratio, mask=mask_m)
        d_value = tl.where(valid, vf_coef * d_value / count, 0.0)
        d_mean = tl.where(valid[:, None], d_logprob[:, None] * z * inv_std / count, 0.0)
        _store_gradient(d_mean_ptr, d_value_ptr, d_mean, d_value, offs_m, offs_k, mask_m, DIM, OUT)
        d_log_std = tl.where(valid[:, None], (d_logprob[:, None] * (z * z - 1.0) - ent_coef) / count, 0.0)
        tl.store(
            d_log_std_ptr + offs_m[:, None] * DIM + offs_k[None, :],
            d_log_std.to(d_log_std_ptr.dtype.element_ty),
            mask=mask_mk,
        )
        sum_policy += tl.where(valid, policy, 0.0)
        sum_value += tl.where(valid, value_term, 0.0)
        sum_entropy += tl.where(valid, entropy, 0.0)
        sum_old_kl += tl.where(valid, old_kl, 0.0)
        sum_kl += tl.where(valid, kl, 0.0)
        sum_outside += tl.where(valid, outside, 0.0)
    _store_sums(sum_policy, sum_value, sum_entropy, sum_old_kl, sum_kl, sum_outside, partial_ptr)


def advantage_moments(advantage: Tensor, valid: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Sums, sums of squares and counts of the valid advantages, and what they are over, (4, parts) float64."""
    n = advantage.shape[0]
    parts = min(16, triton.next_power_of_2(triton.cdiv(n, 2 * MOMENT_BLOCK)))  # all that read them add them up again
    moments = torch.empty(4, parts, dtype=torch.float64, device=advantage.device) if out is None else out
    _moments_kernel[(parts,)](
        advantage, valid, moments, n, HAS_VALID=valid is not None, PARTS=parts, BLOCK=MOMENT_BLOCK
    )
    return moments


class Launch:
    """The buffers that the kernels need, and the moments of the advantages.

    Args:
        advantage: (n,). valid: (n,) or None. moments: `advantage_moments` of them, where they are at hand.
        block_m: rows of a block; at most PROGRAMS programs share the blocks.
    """

    def __init__(self, advantage: Tensor, valid: Tensor | None, block_m: int, moments: Tensor | None = None):
        n, device = advantage.shape[0], advantage.device
        self.grid = (min(triton.cdiv(n, block_m), PROGRAMS),)
        self.moments = advantage_moments(advantage, valid) if moments is None else moments
        self.parts = self.moments.shape[1]
        self.partial = torch.empty(N_STATS * self.grid[0], device=device)
        self.loss = torch.empty((), device=device)
        self.stats = torch.empty(N_STATS, device=device)
        self.ratio = torch.empty(n, device=device)

    def finish(self, ent_coef: Tensor, vf_coef: float, beside: "Branch | None") -> None:
        """Sum up the loss and the statistics: on `beside`, a branch, where nothing waits for them at once."""
        if beside is not None:
            beside.keep(self.moments, self.partial, self.loss, self.stats)
        with nullcontext() if beside is None else beside:
            _finish_kernel[(1,)](
                self.moments, self.partial, ent_coef, self.loss, self.stats, self.grid[0], vf_coef,
                PARTS=self.parts, BLOCKS=triton.next_power_of_2(self.grid[0]), num_warps=8,
            )  # fmt: skip


def _blocks(width: int) -> dict[str, int]:
    """The half dozen tiles of a program stay in registers: 16 entries a thread, or a row at a time."""
    block_k = triton.next_power_of_2(width)
    block_m = max(1, min(64, 1024 // block_k))
    return {"BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": 2 if block_k <= 1024 else 8}


def _check(*tensors: Tensor) -> None:
    if any(x.dtype == torch.float64 for x in tensors):
        raise TypeError("the triton backend of the PPO loss takes no float64; use backend='reference'")


def _row_contiguous(x: Tensor) -> Tensor:
    """`x` with columns side by side; rows may lie apart, so that a slice of a wider matrix needs no copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def categorical(
    logits: Tensor, value: Tensor, action: Tensor, old_logprob: Tensor, old_value: Tensor, advantage: Tensor,
    weight: Tensor, mask: Tensor | None, valid: Tensor | None, ent_coef: Tensor, nvec: list[int],
    clip: float, vf_clip: float, vf_coef: float, joint: Tensor | None = None,
    beside: "Branch | None" = None, moments: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, ratio, stats, d loss/d logits, d loss/d value).

    With `joint` (n, K), K > width, both gradients go there side by side, and its other columns are set to 0; it stands
    in their places in the result.
    """
    _check(logits, value, old_logprob, old_value, advantage, weight)
    logits, action = _row_contiguous(logits), action.contiguous()
    rows = [x.float().contiguous() for x in (old_logprob, old_value, advantage, weight)]
    mask = None if mask is None else mask.contiguous()
    valid = None if valid is None else valid.contiguous()
    blocks = _blocks(logits.shape[1] if joint is None else joint.shape[1])
    launch = Launch(rows[2], valid, blocks["BLOCK_M"], moments)
    d_logits, d_value = _gradients(logits, value, joint)
    _categorical_kernel[launch.grid](
        logits, value, action, *rows, mask, valid, ent_coef, launch.ratio, d_logits, d_value, launch.moments,
        launch.partial, value.shape[0], logits.stride(0), value.stride(0),
        action.stride(0), value.shape[0] // weight.shape[0], clip, vf_clip, vf_coef, NVEC=tuple(nvec),
        WIDTH=logits.shape[1], OUT=0 if joint is None else joint.shape[1], HAS_MASK=mask is not None,
        HAS_VALID=valid is not None, PARTS=launch.parts, **blocks,
    )  # fmt: skip
    launch.finish(ent_coef, vf_coef, beside)
    return launch.loss, launch.ratio, launch.stats, d_logits, d_value


def gaussian(
    mean: Tensor, log_std: Tensor, value: Tensor, action: Tensor, old_logprob: Tensor, old_value: Tensor,
    advantage: Tensor, weight: Tensor, valid: Tensor | None, ent_coef: Tensor,
    clip: float, vf_clip: float, vf_coef: float, joint: Tensor | None = None,
    beside: "Branch | None" = None, moments: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, ratio, stats, d loss/d mean, d loss/d log_std, d loss/d value); `joint` as in `categorical`."""
    _check(mean, log_std, value, action, old_logprob, old_value, advantage, weight)
    mean = _row_contiguous(mean)
    log_std = _row_contiguous(log_std)
    rows = [x.float().contiguous() for x in (action, old_logprob, old_value, advantage, weight)]
    valid = None if valid is None else valid.contiguous()
    blocks = _blocks(mean.shape[1] if joint is None else joint.shape[1])
    launch = Launch(rows[3], valid, blocks["BLOCK_M"], moments)
    d_mean, d_value = _gradients(mean, value, joint)
    d_log_std = torch.empty(mean.shape, dtype=log_std.dtype, device=mean.device)
    _gaussian_kernel[launch.grid](
        mean, log_std, value, *rows, valid, ent_coef, launch.ratio, d_mean, d_log_std, d_value, launch.moments,
        launch.partial, mean.shape[0], mean.stride(0), log_std.stride(0),
        value.stride(0), value.shape[0] // weight.shape[0], clip, vf_clip, vf_coef, DIM=mean.shape[1],
        OUT=0 if joint is None else joint.shape[1], HAS_VALID=valid is not None, PARTS=launch.parts, **blocks,
    )  # fmt: skip
    launch.finish(ent_coef, vf_coef, beside)
    return launch.loss, launch.ratio, launch.stats, d_mean, d_log_std, d_value


def _gradients(params: Tensor, value: Tensor, joint: Tensor | None) -> tuple[Tensor, Tensor]:
    if joint is not None:
        return joint, joint
    return (
        torch.empty(params.shape, dtype=params.dtype, device=params.device),
        torch.empty(value.shape, dtype=value.dtype, device=value.device),
    )
