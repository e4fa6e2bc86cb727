"""A step of `Synthetic` in one launch; its `_step` is the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _step_kernel(
    action_ptr, row_ptr, t_ptr, drawn_ptr, table_ptr, shown_ptr, obs_ptr, next_obs_ptr, reward_ptr, terminated_ptr,
    truncated_ptr, rows, choices, length, width, shown_width, stride_obs, NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    action, row, t = tl.load(action_ptr + i), tl.load(row_ptr + i), tl.load(t_ptr + i)
    following = (row + 1 + action) % rows
    terminated = t == length - 1
    shown = tl.where(terminated, tl.load(drawn_ptr + i), following)
    tl.debug_barrier()  # All threads have read the state.
    tl.store(reward_ptr + i, tl.where(action == row % choices, 1.0, 0.0))
    tl.store(terminated_ptr + i, terminated.to(tl.uint8))
    tl.store(truncated_ptr + i, 0)
    tl.store(row_ptr + i, shown)
    tl.store(t_ptr + i, tl.where(terminated, 0, t + 1))
    for start in range(0, shown_width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < shown_width
        tl.store(obs_ptr + i * stride_obs + offs, tl.load(shown_ptr + shown * shown_width + offs, mask=mask), mask=mask)
    if NEXT:
        for start in range(0, width, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            mask = offs < width
            tl.store(
                next_obs_ptr + i * width + offs, tl.load(table_ptr + following * width + offs, mask=mask), mask=mask
            )


def step(
    action: Tensor, row: Tensor, t: Tensor, drawn: Tensor, table: Tensor, shown: Tensor, choices: int, length: int,
    obs: Tensor, next_obs: Tensor | None, reward: Tensor, terminated: Tensor, truncated: Tensor,
) -> None:  # fmt: skip
    """Advance `row` and `t`, and write the results: `obs` with its columns side by side, `next_obs` if it is wanted.

    `table` is what `next_obs` shows, `shown` what `obs` does: the same, or rounded and padded.
    """
    flags = terminated.view(torch.uint8), truncated.view(torch.uint8)
    rows, width = table.shape
    _step_kernel[(row.shape[0],)](
        action, row, t, drawn, table, shown, obs, next_obs, reward, *flags, rows, choices, length, width,
        shown.shape[1], obs.stride(0),
        NEXT=next_obs is not None, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
