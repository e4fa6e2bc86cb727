"""The arithmetic of n-step windows, frame stacks, priorities and weights, as pure functions on tensors.

These are the definitions. The Numba and Triton kernels of the buffer compute the same, and are tested against them.
"""

import torch
from torch import Tensor


def n_step_return(reward: Tensor, terminated: Tensor, truncated: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return, bootstrap factor and length of windows of n steps that stop where their episode does.

        m        = the number of steps up to and including the first that ended the episode; n if none did
        return   = sum_{k<m} gamma^k r_k
        discount = gamma^m (1 - terminated_{m-1})

    so that `return + discount * V(next_obs)` is the target, with next_obs the observation after step m - 1.

    Args:
        reward, terminated, truncated: (B, n): float, bool, bool.

    Returns:
        return (B,), discount (B,) like reward, m (B,) int64.

    Source: Sutton 1988; termination and truncation apart as in Pardo et al. 2018 (arXiv 1712.00378).
    """
    n = reward.shape[1]
    goes_on = ~(terminated | truncated)
    reached = torch.ones_like(goes_on)
    reached[:, 1:] = goes_on[:, :-1].cumprod(1).bool()
    length = reached.sum(1)
    powers = gamma ** torch.arange(n, device=reward.device, dtype=reward.dtype)
    total = torch.where(reached, reward * powers, 0).sum(1)
    ends_terminal = terminated.gather(1, length[:, None] - 1)[:, 0]
    discount = torch.where(ends_terminal, 0, torch.full_like(total, gamma) ** length)
    return total, discount, length


def move(slot: Tensor, steps: Tensor | int, ring: int) -> Tensor:
    """The slot `steps` later (earlier if negative) in the same environment's ring of `ring` slots."""
    position = slot % ring
    return slot - position + (position + steps) % ring


def stack_slots(slot: Tensor, step: Tensor, frames: int, ring: int) -> Tensor:
    """Slots of the frames of a stack, oldest first; before the episode's first frame it repeats that frame.

    Args:
        slot: (B,) int64, where the newest frame lies.
        step: (B,) how many steps after the episode's first observation it was seen.

    Returns:
        (B, frames) int64.
    """
    back = torch.arange(frames - 1, -1, -1, device=slot.device)
    return move(slot[:, None], -torch.minimum(back, step[:, None].long()), ring)


def importance_weights(values: Tensor, total: Tensor, held: Tensor, beta: Tensor, reference: Tensor | None) -> Tensor:
    """Importance weights of drawn items.

        w_i = (N P_i)^-beta, P_i = leaf_i / total;   with a reference leaf l: w_i = (l / leaf_i)^beta

    The second is the first divided by the weight of an item of leaf l: the smallest leaf of the batch or of the buffer
    gives weights of at most 1. A value of 0 (nothing was drawn) weighs 0.

    Args:
        values: (B,) float32 leaves. total: 0-d float64. held: how many items can be drawn. beta: 0-d float32.
        reference: 0-d float32 or None.

    Source: Schaul et al. 2016 (arXiv 1511.05952), section 3.4.
    """
    leaves = values.double()
    ratio = total / (leaves * held) if reference is None else reference.double() / leaves
    return torch.where(values > 0, ratio ** beta.double(), 0).float()


def sequence_td(td_error: Tensor, eta: float, mask: Tensor | None = None) -> Tensor:
    """One TD error a sequence, >= 0: eta max_t |td_t| + (1 - eta) mean_t |td_t|.

    Args:
        td_error: (B, L). mask: (B, L) bool, steps that count; a sequence without any gives 0.

    A NaN or infinite step makes the whole sequence's value NaN or infinite, which the buffer then refuses and counts.

    Source: Kapturowski et al. 2019 (R2D2), section 2.3, eta = 0.9.
    """
    size = td_error.abs()
    if size.dtype != torch.float64:  # whose numbers may be too large for float32
        size = size.float()
    if mask is None:
        return eta * size.amax(1) + (1 - eta) * size.mean(1)
    size = torch.where(mask, size, 0)
    return eta * size.amax(1) + (1 - eta) * size.sum(1) / mask.sum(1).clamp(min=1)
