"""The Q-learning loss for CPUs: one pass over the rows, where PyTorch's twenty operations cost more than the work."""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from sharpwave.ops.dqn_loss.reference import STATS, c51_loss

__all__ = ["c51_loss", "dqn_loss"]


@numba.njit(cache=True, error_model="numpy")
def _best(row):
    """The first largest entry's place; a NaN is larger than anything."""
    best = 0
    for a in range(1, len(row)):
        if row[a] > row[best] or (row[a] != row[a] and row[best] == row[best]):
            best = a
    return best


@numba.njit(cache=True, error_model="numpy")
def _loss(q, action, chooser, following, reward, discount, weight, huber, td_error, d_q, stats):
    n = len(q)
    loss, size_sum, taken_sum, spread_sum = 0.0, 0.0, 0.0, 0.0
    largest = -np.inf
    for i in range(n):
        td = reward[i] + discount[i] * following[i, _best(chooser[i])] - q[i, action[i]]
        size = abs(td)
        # A NaN must reach the loss, and min() may drop it.
        inside = huber if size > huber else size
        td_error[i] = td
        loss += np.float64(weight[i]) * inside * (size - 0.5 * inside)
        high, low = q[i, 0], q[i, 0]
        for a in range(q.shape[1]):
            d_q[i, a] = 0.0
            high, low = max(high, q[i, a]), min(low, q[i, a])
        d_q[i, action[i]] = -weight[i] * math.copysign(inside, td) / n
        size_sum += size
        taken_sum += q[i, action[i]]
        spread_sum += high - low
        largest = max(largest, high)
    stats[0], stats[1], stats[2], stats[3], stats[4] = loss / n, size_sum / n, taken_sum / n, largest, spread_sum / n


def dqn_loss(
    q: Tensor,
    action: Tensor,
    next_q: Tensor | None,
    next_target_q: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    huber: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, float32; sums in float64, in order."""
    chooser = next_target_q if next_q is None else next_q
    inputs = (x.detach().numpy() for x in (q, action, chooser, next_target_q, reward, discount, weight))
    td_error, d_q, stats = torch.empty(len(q)), torch.empty(q.shape), torch.empty(len(STATS))
    _loss(*inputs, np.float32(huber), td_error.numpy(), d_q.numpy(), stats.numpy())
    return stats[0].clone(), td_error, d_q, stats
