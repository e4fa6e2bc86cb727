"""The advantage recursion, step by step."""

import torch
from torch import Tensor


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
    """A of shape (N, T); the contract is `sharpwave.ops.advantage.puff_advantage`."""
    n = 1 - terminated.to(value.dtype)
    k = 1 - (terminated | truncated).to(value.dtype)
    rho = ratio.clamp(max=rho_clip)
    c = ratio.clamp(max=c_clip)
    v_tp1 = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    v_tp1[:, -1] = next_value[:, -1]
    v_tp1 = torch.where(truncated, next_value, v_tp1)
    delta = rho * (reward + gamma * n * v_tp1 - value)

    advantage = torch.zeros_like(value)
    a_tp1 = torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        a_tp1 = delta[:, t] + gamma * lam * c[:, t] * k[:, t] * a_tp1
        advantage[:, t] = a_tp1
    return advantage
