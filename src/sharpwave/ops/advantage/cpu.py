"""The advantage recursion for CPUs: one pass backwards over each segment, on one thread."""

import numba
import numpy as np
import torch
from torch import Tensor


@numba.njit(cache=True)
def _puff_advantage(value, next_value, reward, terminated, truncated, ratio, gamma, lam, rho_clip, c_clip, out):
    n_segments, horizon = value.shape
    gamma, lam = np.float32(gamma), np.float32(lam)
    rho_clip, c_clip = np.float32(rho_clip), np.float32(c_clip)
    zero = np.float32(0)
    for i in range(n_segments):
        a = zero
        for s in range(horizon):
            t = horizon - 1 - s
            bootstrap = next_value[i, t] if truncated[i, t] or t == horizon - 1 else value[i, t + 1]
            v_tp1 = zero if terminated[i, t] else bootstrap
            delta = min(ratio[i, t], rho_clip) * (reward[i, t] + gamma * v_tp1 - value[i, t])
            tail = zero if terminated[i, t] or truncated[i, t] else a
            a = delta + gamma * lam * min(ratio[i, t], c_clip) * tail
            out[i, t] = a


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
    """Same as `reference.puff_advantage`, float32 only."""
    if value.dtype != torch.float32:
        raise TypeError(f"the cpu backend of puff_advantage takes float32; got {value.dtype}: use backend='reference'")
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    tensors = (value, next_value, reward, terminated, truncated, ratio)
    arrays = [x.detach().numpy() for x in tensors]
    _puff_advantage(*arrays, gamma, lam, rho_clip, c_clip, out.numpy())
    return out
