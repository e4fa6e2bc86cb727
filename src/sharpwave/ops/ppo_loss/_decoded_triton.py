"""Decoder, PPO loss and their gradient in one pass over the features: logits and their gradient stay in registers."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._backends import triton_interpreted
from sharpwave.ops.ppo_loss.triton import Launch, _categorical_rows, _moments, _store_sums

if TYPE_CHECKING:
    from sharpwave.run.graphs import Branch

BLOCK_M = 64
BLOCK_H = 64
WIDEST = 128  # columns of the decoder that a program's registers hold


@triton.jit
def _decoded_kernel(
    features_ptr, decoder_ptr, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr, mask_ptr,
    valid_ptr, ent_coef_ptr, ratio_ptr, value_ptr, d_output_ptr, d_features_ptr, moments_ptr, partial_ptr,
    n, stride_features, stride_decoder, stride_action, rows_per_weight, clip, vf_clip, vf_coef,
    NVEC: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_VALID: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    origin, mean, std, count = _moments(moments_ptr, PARTS)
    ent_coef = tl.load(ent_coef_ptr)
    offs_k, offs_h = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H)
    decoder_ptr += offs_k[:, None] * stride_decoder + offs_h[None, :]
    sum_policy = tl.zeros([BLOCK_M], tl.float32)
    sum_value, sum_entropy, sum_old_kl, sum_kl, sum_outside = sum_policy, sum_policy, sum_policy, sum_policy, sum_policy
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK_M), tl.num_programs(0)):
        offs_m = tl.arange(0, BLOCK_M).to(tl.int64) + block * BLOCK_M
        mask_m = offs_m < n
        own_ptr = features_ptr + offs_m[:, None] * stride_features + offs_h[None, :]
        output = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for start in range(0, H, BLOCK_H):
            mask_h = (start + offs_h < H)[None, :]
            x = tl.load(own_ptr + start, mask=mask_m[:, None] & mask_h, other=0.0)
            w = tl.load(decoder_ptr + start, mask=(offs_k <= WIDTH)[:, None] & mask_h, other=0.0)
            output = tl.dot(x, tl.trans(w), output)
        value = tl.sum(tl.where((offs_k == WIDTH)[None, :], output, 0.0), 1)
        tl.store(value_ptr + offs_m, value, mask=mask_m)
        given = mask_m[:, None] & (offs_k < WIDTH)[None, :]
        if HAS_MASK:
            given = given & (tl.load(mask_ptr + offs_m[:, None] * WIDTH + offs_k[None, :], mask=given, other=0) != 0)
        d, d_value, policy, value_term, entropy, old_kl, kl, outside = _categorical_rows(
            output, given, value, action_ptr, old_logprob_ptr, old_value_ptr, advantage_ptr, weight_ptr, valid_ptr,
            ratio_ptr, stride_action, rows_per_weight, offs_m, mask_m, offs_k, origin, mean, std, count, ent_coef,
            clip, vf_clip, vf_coef, NVEC, HAS_MASK, HAS_VALID,
        )  # fmt: skip
        d = tl.where((offs_k < WIDTH)[None, :], d, tl.where((offs_k == WIDTH)[None, :], d_value[:, None], 0.0))
        d = d.to(d_output_ptr.dtype.element_ty)
        inside = mask_m[:, None] & (offs_k < OUT)[None, :]
        tl.store(d_output_ptr + offs_m[:, None] * OUT + offs_k[None, :], d, mask=inside)
        for start in range(0, H, BLOCK_H):
            mask_h = (start + offs_h < H)[None, :]
            w = tl.load(decoder_ptr + start, mask=(offs_k <= WIDTH)[:, None] & mask_h, other=0.0)
            dx = tl.dot(d, w).to(d_features_ptr.dtype.element_ty)
            tl.store(
                d_features_ptr + offs_m[:, None] * H + (start + offs_h)[None, :], dx, mask=mask_m[:, None] & mask_h
            )
        sum_policy += policy
        sum_value += value_term
        sum_entropy += entropy
        sum_old_kl += old_kl
        sum_kl += kl
        sum_outside += outside
    _store_sums(sum_policy, sum_value, sum_entropy, sum_old_kl, sum_kl, sum_outside, partial_ptr)


def usable(features: Tensor, decoder: Tensor) -> bool:
    """Whether the kernel serves them: 16-bit numbers, for others are not multiplied exactly, and not too many columns.

    The interpreter, which multiplies the bits of bf16 numbers, takes float32.
    """
    fits = (
        features.dtype == torch.float32 if triton_interpreted() else features.dtype in (torch.bfloat16, torch.float16)
    )
    return fits and decoder.dtype == features.dtype and decoder.shape[0] <= WIDEST


def _registers(block_k: int) -> dict[str, int]:
    """Some numbers spill, and twice as many programs fit: 17 us for 21 with 32768 rows of 256, 48 columns (H200)."""
    return {"maxnreg": 128} if block_k == 64 and torch.version.hip is None else {}


def categorical(
    features: Tensor, decoder: Tensor, action: Tensor, old_logprob: Tensor, old_value: Tensor, advantage: Tensor,
    weight: Tensor, mask: Tensor | None, valid: Tensor | None, ent_coef: Tensor, nvec: list[int],
    clip: float, vf_clip: float, vf_coef: float, moments: Tensor | None, beside: "Branch | None",
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, ratio, stats, value, d loss/d output, d loss/d features) of output = features decoder^T."""
    features, decoder, action = (v if v.stride(1) == 1 else v.contiguous() for v in (features, decoder, action))
    rows = [x.float().contiguous() for x in (old_logprob, old_value, advantage, weight)]
    mask = None if mask is None else mask.contiguous()
    valid = None if valid is None else valid.contiguous()
    n, h = features.shape
    out, block_k = decoder.shape[0], max(16, triton.next_power_of_2(decoder.shape[0]))
    launch = Launch(rows[2], valid, BLOCK_M, moments)
    value = torch.empty(n, device=features.device)
    d_output, d_features = features.new_empty(n, out), features.new_empty(n, h)
    _decoded_kernel[launch.grid](
        features, decoder, action, *rows, mask, valid, ent_coef, launch.ratio, value, d_output, d_features,
        launch.moments, launch.partial, n, features.stride(0), decoder.stride(0), action.stride(0),
        n // weight.shape[0], clip, vf_clip, vf_coef, NVEC=tuple(nvec), WIDTH=sum(nvec), OUT=out, H=h,
        HAS_MASK=mask is not None, HAS_VALID=valid is not None, PARTS=launch.parts, BLOCK_M=BLOCK_M, BLOCK_K=block_k,
        BLOCK_H=min(BLOCK_H, max(16, triton.next_power_of_2(h))), num_warps=4 if block_k <= 64 else 8, num_stages=2,
        **_registers(block_k),
    )  # fmt: skip
    launch.finish(ent_coef, vf_coef, beside)
    return launch.loss, launch.ratio, launch.stats, value, d_output, d_features
