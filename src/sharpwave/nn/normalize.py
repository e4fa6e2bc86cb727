"""Running means and variances, and what is normalised by them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

EPSILON = 1e-8
LIMIT = 10.0  # where normalised observations and rewards are cut off (Stable-Baselines3, CleanRL)
ROWS = 65536  # taken in at a time: float64 copies of a whole rollout could be larger than the rollout


Gather = Callable[[Tensor], Tensor]


class RunningMoments(nn.Module):
    """Mean and variance of every row seen so far, entry by entry, in float64.

        delta = mean_b - mean;  n' = n + n_b
        mean' = mean + delta n_b / n';  var' = (n var + n_b var_b + delta^2 n n_b / n') / n'

    The state is in buffers, written in place, so that it travels in a `state_dict` and an update may be captured.
    Before the first update the mean is 0 and the variance 1. The variance is the population's (divided by n). Rows that
    hold anything not finite are left out, with those that came in one call (of 65536 at most).

    Args:
        shape: of a row.

    Deterministic for the order of updates. Source: Chan, Golub, LeVeque 1983.
    """

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.count: Tensor
        self.mean: Tensor
        self.var: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor, gather: Gather | None = None) -> None:
        """Take in (n, *shape), n >= 1, of any dtype. Does not wait for the device.

        gather: from a tensor to (R, ...), those of R ranks, whose rows are taken in one rank after the other, as many
            of each; all of them then have the same moments. None: this process's own rows.
        """
        for part in rows.split(ROWS):
            n = part.shape[0]
            moments = torch.var_mean(part.double(), 0, correction=0)
            for var, mean in [moments] if gather is None else gather(torch.stack(moments)):
                self._take_in(n, mean, var)

    def _take_in(self, n: int | Tensor, mean: Tensor, var: Tensor) -> None:
        total = self.count + n
        delta = mean - self.mean
        var = (self.count * self.var + n * var + delta * delta * (self.count * n / total)) / total
        finite = var.isfinite().all()  # It is not where the mean is not.
        self.var.copy_(torch.where(finite, var, self.var))
        self.mean.copy_(torch.where(finite, self.mean + delta * (n / total), self.mean))
        self.count.copy_(torch.where(finite, total, self.count))


class ObservationNormalizer(RunningMoments):
    """Observations shifted and scaled to mean 0 and variance 1, cut off at -10 and 10.

        y = clamp((x - mean) / sqrt(var + 1e-8), -10, 10), float32

    It never updates itself: whoever trains decides when, so that what a policy made of an observation can be computed
    again.
    """

    def forward(self, obs: Tensor) -> Tensor:
        """(B, *shape) of any dtype -> the same in float32."""
        mean, scale = self.mean.float(), (self.var + EPSILON).rsqrt().float()
        return ((obs.float() - mean) * scale).clamp(-LIMIT, LIMIT)


class RewardNormalizer(RunningMoments):
    """Rewards divided by the standard deviation of the discounted return so far, cut off at -10 and 10.

        G = gamma G + r;  var of all G seen;  r' = clamp(r / sqrt(var + 1e-8), -10, 10);  G = 0 where an episode ended

    The mean is not taken off: that would change which policy is best. Writes its state in place, and does not wait
    for the device.

    Args:
        num_envs: N.
        gamma: the discount.
        joins: whether `join` takes in other ranks' returns.

    Source: the scaling of Engstrom et al. 2020, as Gymnasium's NormalizeReward does it.
    """

    def __init__(self, num_envs: int, gamma: float, joins: bool = False):
        super().__init__()
        self.gamma = gamma
        self.returns: Tensor
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        # What all ranks had seen when they last joined, and what this one has seen since.
        self.joint, self.since = (RunningMoments(), RunningMoments()) if joins else (None, None)

    @torch.no_grad()
    def forward(self, reward: Tensor, ended: Tensor, rows: slice = slice(None)) -> Tensor:
        """(n,) rewards of one step, and (n,) bool, true where it ended an episode -> (n,) float32.

        rows: whose they are, where not all environments stepped.
        """
        returns = self.returns[rows]
        returns.mul_(self.gamma).add_(reward)
        self.update(returns)
        if self.since is not None:
            self.since.update(returns)
        returns.masked_fill_(ended, 0)
        return (reward * (self.var + EPSILON).rsqrt()).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def join(self, gather: Gather) -> None:
        """Take in what other ranks have seen since the last call, which all make together: from here on all scale
        alike. Between two calls each goes by what it has seen itself besides."""
        if self.joint is None or self.since is None:
            return
        for count, mean, var in gather(torch.stack([self.since.count, self.since.mean, self.since.var])):
            self.joint._take_in(count, mean, var)
        for name, value in self.joint.state_dict().items():
            getattr(self, name).copy_(value)
        self.since.count.zero_()
        self.since.mean.zero_()
        self.since.var.fill_(1)

    def forget_running(self) -> None:
        """Begin every return at 0, where new episodes begin."""
        self.returns.zero_()
