"""One step's episode statistics in one launch; `EpisodeStats.update` is their definition."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _ended(terminated_ptr, truncated_ptr, offs, mask):
    either = tl.load(terminated_ptr + offs, mask=mask, other=0) | tl.load(truncated_ptr + offs, mask=mask, other=0)
    return (either != 0).to(tl.int32)


@triton.jit
def _update_kernel(
    reward_ptr, terminated_ptr, truncated_ptr, valid_ptr, return_ptr, length_ptr, count_ptr, returns_ptr, lengths_ptr,
    ticket_ptr, n, window, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    count = tl.load(count_ptr)
    # How many episodes ended in the environments before this block's, whose places come first.
    before = 0
    for start in range(0, pid * BLOCK, AHEAD):
        offs = start + tl.arange(0, AHEAD)
        before += tl.sum(_ended(terminated_ptr, truncated_ptr, offs, offs < pid * BLOCK), 0)

    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    ended = _ended(terminated_ptr, truncated_ptr, offs, mask)
    steps = tl.where(mask, 1.0, 0.0)
    if HAS_VALID:
        steps = (tl.load(valid_ptr + offs, mask=mask, other=0) != 0).to(tl.float32)
    total = tl.load(return_ptr + offs, mask=mask, other=0.0) + tl.load(reward_ptr + offs, mask=mask, other=0.0)
    length = tl.load(length_ptr + offs, mask=mask, other=0.0) + steps
    slot = (count + before + tl.cumsum(ended, 0) - 1) % window
    record = mask & (ended != 0)
    tl.store(returns_ptr + slot, total, mask=record)
    tl.store(lengths_ptr + slot, length, mask=record)
    tl.store(return_ptr + offs, tl.where(ended != 0, 0.0, total), mask=mask)
    tl.store(length_ptr + offs, tl.where(ended != 0, 0.0, length), mask=mask)

    # The last program to get here adds what all counted, when every one has read the count. The ticket holds how many
    # came in its low half and their ends in its high half.
    tl.debug_barrier()
    here = tl.sum(ended, 0).to(tl.int64)
    seen = tl.atomic_add(ticket_ptr, (here << 32) + 1, sem="acq_rel")
    if (seen & 0xFFFFFFFF) == tl.num_programs(0) - 1:
        tl.store(count_ptr, count + (seen >> 32) + here)
        tl.store(ticket_ptr, 0)


def update(
    reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor | None, running: tuple[Tensor, Tensor],
    count: Tensor, kept: tuple[Tensor, Tensor], ticket: Tensor, window: int,
) -> None:  # fmt: skip
    """`EpisodeStats.update`; `running` and `kept` are (returns, lengths), `ticket` a zero that is left zero."""
    n = reward.shape[0]
    # Each program counts the ends before its own, so there should be few: 128 of them up to a million environments.
    block = min(8192, max(512, triton.next_power_of_2(triton.cdiv(n, 128))))
    _update_kernel[(triton.cdiv(n, block),)](
        reward, terminated, truncated, valid, *running, count, *kept, ticket, n, window,
        HAS_VALID=valid is not None, BLOCK=block, AHEAD=min(8192, triton.next_power_of_2(n)),
        num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
