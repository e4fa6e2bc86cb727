"""One step of a rollout written to its places in one launch; `Segments.record` is the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["t"])
def _record_kernel(
    action_ptr, logprob_ptr, value_ptr, reward_ptr, terminated_ptr, truncated_ptr, valid_ptr, begins_ptr,
    actions_ptr, logprobs_ptr, values_ptr, rewards_ptr, terminateds_ptr, truncateds_ptr, valids_ptr, resets_ptr,
    n, t, horizon, stride_value,
    COLUMNS: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    place = offs * horizon + t  # [BLOCK]
    terminated = tl.load(terminated_ptr + offs, mask=mask, other=0)
    truncated = tl.load(truncated_ptr + offs, mask=mask, other=0)
    tl.store(logprobs_ptr + place, tl.load(logprob_ptr + offs, mask=mask), mask=mask)
    tl.store(values_ptr + place, tl.load(value_ptr + offs * stride_value, mask=mask), mask=mask)
    tl.store(rewards_ptr + place, tl.load(reward_ptr + offs, mask=mask), mask=mask)
    tl.store(terminateds_ptr + place, terminated, mask=mask)
    tl.store(truncateds_ptr + place, truncated, mask=mask)
    tl.store(resets_ptr + place, tl.load(begins_ptr + offs, mask=mask), mask=mask)
    begins = (terminated | truncated) != 0
    if HAS_VALID:
        valid = tl.load(valid_ptr + offs, mask=mask, other=0)
        tl.store(valids_ptr + place, valid, mask=mask)
        begins = begins | (valid == 0)
    tl.debug_barrier()  # `begins_ptr` has been read.
    tl.store(begins_ptr + offs, begins.to(tl.uint8), mask=mask)

    offs_c = tl.arange(0, BLOCK_C)[None, :]
    mask_c = mask[:, None] & (offs_c < COLUMNS)
    action = tl.load(action_ptr + offs[:, None] * COLUMNS + offs_c, mask=mask_c)
    tl.store(actions_ptr + place[:, None] * COLUMNS + offs_c, action, mask=mask_c)


def record(
    action: Tensor, logprob: Tensor, value: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor,
    valid: Tensor | None, begins: Tensor, into: tuple[Tensor, ...], valids: Tensor | None, t: int,
) -> None:  # fmt: skip
    """`Segments.record`; `into`: action, logprob, value, reward, terminated, truncated and reset of the segments."""
    actions, logprobs, values, rewards, *flags = into
    terminateds, truncateds, resets = (x.view(torch.uint8) for x in flags)
    n, columns = action.shape
    block_c = triton.next_power_of_2(columns)
    block = max(1, min(256, 2048 // block_c))
    _record_kernel[(triton.cdiv(n, block),)](
        action, logprob, value, reward.contiguous(), _bytes(terminated), _bytes(truncated), _bytes(valid),
        begins.view(torch.uint8), actions, logprobs, values, rewards, terminateds, truncateds, _bytes(valids), resets,
        n, t, logprobs.shape[1], value.stride(0),
        COLUMNS=columns, HAS_VALID=valid is not None, BLOCK=block, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)
