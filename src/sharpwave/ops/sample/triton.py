"""Drawing actions for GPUs: in one launch, from the noise given."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG_2PI = tl.constexpr(1.8378770664093453)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def _categorical_kernel(
    logits_ptr, noise_ptr, mask_ptr, action_ptr, logprob_ptr, n, stride_logits,
    NVEC: tl.constexpr, WIDTH: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask_m = offs_m < n
    mask = mask_m[:, None] & (offs_k < WIDTH)  # [BLOCK_M, BLOCK_K]
    rows = offs_m[:, None] * WIDTH + offs_k
    logits = tl.load(logits_ptr + offs_m[:, None] * stride_logits + offs_k, mask=mask, other=0.0).to(tl.float32)
    noisy = logits
    if HAS_NOISE:
        e = tl.load(noise_ptr + rows, mask=mask, other=1.0)
        noisy = logits - tl.log(tl.maximum(e, _TINY))
    noisy = tl.where(noisy == noisy, noisy, float("inf"))  # noqa: PLR0124 (NaN is not)
    given = mask
    if HAS_MASK:
        given = mask & (tl.load(mask_ptr + rows, mask=mask, other=0) != 0)

    logprob = tl.zeros([BLOCK_M], tl.float32)
    start = 0
    for head in tl.static_range(len(NVEC)):
        legal = mask & (offs_k >= start) & (offs_k < start + NVEC[head])
        if HAS_MASK:
            none = tl.max((given & legal).to(tl.int32), 1) == 0
            legal = legal & (given | none[:, None])
        best = tl.max(tl.where(legal, noisy, -float("inf")), 1)
        # The first that reaches it, which is always one of the legal: not so with an argmax where all are -inf.
        chosen = tl.min(tl.where(legal & (noisy == best[:, None]), offs_k, WIDTH), 1)
        tl.store(action_ptr + offs_m * len(NVEC) + head, (chosen - start).to(tl.int64), mask=mask_m)

        top = tl.where(mask_m, tl.max(tl.where(legal, logits, -float("inf")), 1), 0.0)
        total = tl.sum(tl.where(legal, tl.exp(logits - top[:, None]), 0.0), 1)
        total = tl.where(mask_m, total, 1.0)
        picked = tl.sum(tl.where(offs_k == chosen[:, None], logits - top[:, None], 0.0), 1)
        logprob += picked - tl.log(total)
        start += NVEC[head]
    tl.store(logprob_ptr + offs_m, logprob, mask=mask_m)


@triton.jit
def _gaussian_kernel(
    mean_ptr, log_std_ptr, noise_ptr, action_ptr, logprob_ptr, n, stride_mean,
    DIM: tl.constexpr, HAS_NOISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < n
    mask = mask_m[:, None] & (offs_k < DIM)[None, :]  # [BLOCK_M, BLOCK_K]
    rows = offs_m[:, None] * DIM + offs_k[None, :]
    mean = tl.load(mean_ptr + offs_m[:, None] * stride_mean + offs_k[None, :], mask=mask, other=0.0).to(tl.float32)
    log_std = tl.load(log_std_ptr + offs_k, mask=offs_k < DIM, other=0.0).to(tl.float32)[None, :]
    action = mean
    if HAS_NOISE:
        action = mean + tl.exp(log_std) * tl.load(noise_ptr + rows, mask=mask, other=0.0)
    z = (action - mean) * tl.exp(-log_std)
    tl.store(action_ptr + rows, action, mask=mask)
    logprob = tl.sum(tl.where(mask, -0.5 * z * z - log_std - 0.5 * _LOG_2PI, 0.0), 1)
    tl.store(logprob_ptr + offs_m, logprob, mask=mask_m)


def _tile(width: int) -> tuple[int, int]:
    """BLOCK_M and BLOCK_K: tiles that stay in the registers of two warps, or a row at a time."""
    block_k = triton.next_power_of_2(width)
    return max(1, min(64, 1024 // block_k)), block_k


def sample_categorical(
    logits: Tensor, noise: Tensor | None, nvec: tuple[int, ...], mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Same as `reference.sample_categorical`."""
    n, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    action = torch.empty(n, len(nvec), dtype=torch.int64, device=logits.device)
    logprob = torch.empty(n, device=logits.device)
    block_m, block_k = _tile(width)
    if n:
        _categorical_kernel[(triton.cdiv(n, block_m),)](
            logits, None if noise is None else noise.contiguous(), None if mask is None else mask.contiguous(),
            action, logprob, n, logits.stride(0), NVEC=nvec, WIDTH=width, HAS_NOISE=noise is not None,
            HAS_MASK=mask is not None, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=2 if block_k <= 1024 else 8,
        )  # fmt: skip
    return action, logprob


def sample_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `reference.sample_gaussian`."""
    n, dim = mean.shape
    mean = mean if mean.stride(1) == 1 else mean.contiguous()
    action, logprob = torch.empty(n, dim, device=mean.device), torch.empty(n, device=mean.device)
    block_m, block_k = _tile(dim)
    if n:
        _gaussian_kernel[(triton.cdiv(n, block_m),)](
            mean, log_std.contiguous(), None if noise is None else noise.contiguous(), action, logprob, n,
            mean.stride(0), DIM=dim, HAS_NOISE=noise is not None, BLOCK_M=block_m, BLOCK_K=block_k,
            num_warps=2 if block_k <= 1024 else 8,
        )  # fmt: skip
    return action, logprob
