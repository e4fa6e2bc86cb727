"""What ranks that draw from shards of their own must know of each other, to draw from the whole together.

R ranks hold N / R segments each, and rank r draws M of its own. Item i of shard r has weight w_i, and is drawn by

    P^r_i = w_i / W_r,   W_r = sum of the shard's w;      P_i = w_i / W = P^r_i W_r / W   is its share of the whole.

What is to be estimated is a mean under P. The mean of M draws from shard r estimates it under P^r, and

    sum_i P_i f_i = sum_r W_r / W  sum_{i in r} P^r_i f_i,

so that the ranks' means, averaged with the shares W_r / W, have its expectation exactly: a stratified draw, each shard
a stratum. Where only n_r of the M T steps drawn count, the loss is a ratio of two such means, sum_i P_i f_i over
sum_i P_i n_i, and the share of a rank's mean over its n_r steps is W_r n_r / sum_s W_s n_s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sharpwave.ops._backends import installed
from sharpwave.ops.ppo_loss.reference import summary


class Joined(NamedTuple):
    """How one rank's draw stands to all ranks'."""

    share: Tensor
    """0-d float64: what its mean counts for. The shares of all ranks add up to 1."""
    scale: Tensor
    """0-d float64: N P_i / (N_r P^r_i) = R W_r / W."""
    mean: Tensor
    variance: Tensor
    """0-d float64: of the values drawn by all ranks, each rank's counting for its share."""


def total_weight(priority: Tensor, eps: float) -> Tensor:
    """W_r, 0-d float64: what `draw_segments` draws from, (N,) raw priorities of which it takes bad ones as 0."""
    good = (priority >= 0) & (priority < torch.inf)
    return torch.where(good, priority, 0).double().sum() + priority.numel() * eps


def tell(priority: Tensor, eps: float, moments: Tensor) -> Tensor:
    """(4,) float64, what a rank tells the others of its draw: W_r; count, mean and variance of what it drew.

    Args:
        priority, eps: as of `draw_segments`. moments: `advantage_moments` of the steps drawn.
    """
    if priority.is_cuda and installed("triton"):
        from sharpwave.algos import _shards_triton

        return _shards_triton.tell(priority, eps, moments)
    return torch.stack([total_weight(priority, eps), *summary(moments)])


def settle(every: Tensor, rank: int, weight: Tensor, beta: Tensor, moments: Tensor, share: Tensor) -> None:
    """What every rank told, (R, 4), into what a rank's update goes by, in place.

        weight *= (R W_r / W)^-beta, so that (N_r P^r)^-beta becomes (N P)^-beta

    Args:
        weight: (M,) importance weights of its draw. beta: 0-d float32.
        moments: `advantage_moments`, which get the mean and variance of all ranks' draws.
        share: 0-d float64, what the rank's mean counts for.
    """
    if weight.is_cuda and installed("triton"):
        from sharpwave.algos import _shards_triton

        _shards_triton.settle(every, rank, weight, beta, moments, share)
        return
    joined = join(every, rank)
    share.copy_(joined.share)
    weight *= joined.scale.pow(-beta.double())
    put_moments(moments, joined.mean, joined.variance)


def join(every: Tensor, rank: int) -> Joined:
    """From (R, 4), what each rank told.

        q_r = W_r n_r / sum_s W_s n_s
        mean = sum_r q_r mean_r;   variance = sum_r q_r (variance_r + (mean_r - mean)^2)

    NaN of one rank reaches all. Without a step that counts, on any rank, shares are equal.
    """
    total, count, mean, variance = every.unbind(1)
    mass = total * count
    share = torch.where(mass.sum() > 0, mass / mass.sum(), 1 / len(every))
    joint = (share * mean).sum()
    spread = (share * (variance + (mean - joint).square())).sum()
    return Joined(share[rank], len(every) * total[rank] / total.sum(), joint, spread)


def put_moments(moments: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Give `advantage_moments`, in place, another mean and variance. Counts and origin stay."""
    over = mean - moments[3]
    moments[0] = over * moments[2]
    moments[1] = (variance + over.square()) * moments[2]
