"""What DQN's updates came to, and how its values compare with what was earned: gathered on the device."""

import math
from typing import Any

import torch
from torch import Tensor

from sharpwave.envs.base import Step
from sharpwave.ops import _backends
from sharpwave.ops.dqn_loss import STATS
from sharpwave.run.distributed import World

NAMES = ("loss/td", "td/mean", "q/mean", "q/max", "q/spread", "grad/norm")
"""Names in the order of STATS, and the gradient's norm."""


class UpdateMetrics:
    """What the latest updates came to, at most `window` of them, whose numbers are kept until they are read.

    `update` neither waits for the device nor allocates anything that lasts, so that it can be captured.
    """

    def __init__(self, device: torch.device, batch_size: int, window: int = 8192):
        self.window = window
        self._log = torch.zeros(window, len(NAMES), device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self.td_error = torch.zeros(batch_size, device=device)

    def update(self, stats: Tensor, grad_norm: Tensor, td_error: Tensor) -> None:
        """Take in one update: the loss's STATS and the gradient's norm."""
        if _backends.choose("dqn_loss", stats.device.type) == "triton":
            from sharpwave.algos._log_triton import log_update

            log_update(stats, grad_norm, td_error, self._log, self._place, self._count, self.td_error)
            return
        self._log.index_copy_(0, self._place, torch.cat([stats, grad_norm.view(1)])[None])
        self._place.add_(1).remainder_(self.window)
        self._count += 1
        self.td_error.copy_(td_error)

    def read(self) -> tuple[dict[str, float], list[str]]:
        """The numbers by name and what was not finite in skipped updates; then begin anew. Waits for the device.

        Means are over the updates that were taken, `q/max` is the largest of them; quantiles of the TD errors' sizes
        are those of the last update. Without updates their numbers are left out.
        """
        updates = int(self._count)
        rows = self._log[: min(updates, self.window)].cpu()
        kept = rows[:, [0, -1]].isfinite().all(1)
        numbers = {"update/count": float(updates), "fault/skipped_updates": float(len(rows) - int(kept.sum()))}
        if updates:
            numbers |= dict(zip(NAMES, rows[kept].double().mean(0).tolist(), strict=True))
            numbers["q/max"] = float(rows[kept, NAMES.index("q/max")].max()) if kept.any() else math.nan
            tails = torch.quantile(self.td_error.abs().cpu(), torch.tensor([0.5, 0.9, 1.0])).tolist()
            numbers |= dict(zip(("td/p50", "td/p90", "td/max"), tails, strict=True))
        bad = (~rows.isfinite()).any(0).tolist()
        self._place.zero_()
        self._count.zero_()
        return numbers, [name for name, is_bad in zip((*STATS, "gradient"), bad, strict=True) if is_bad]


class ReturnCheck:
    """How far the value of an episode's first observation was above the discounted return that followed.

        error = max_a Q(s_0, a) - sum_t gamma^t r_t        (+ gamma^T max_a Q(s_{T-1}, a) in the sum where truncated)

    Rewards are those trained on. The return is that of the exploring policy, so that an error above 0 is what exploring
    costs and overestimation together. Nothing waits for the device before `read`.
    """

    def __init__(self, num_envs: int, gamma: float, device: torch.device):
        self._gamma = gamma
        self._first, self._value, self._return = (torch.zeros(num_envs, device=device) for _ in range(3))
        self._power = torch.ones(num_envs, device=device)
        self._sum, self._count = torch.zeros((), device=device), torch.zeros((), device=device)

    def value(self, value: Tensor, begins: Tensor) -> None:
        """Take in the values (N,) of the observations acted on next, and which of them begin an episode."""
        self._value.copy_(value)
        self._first.copy_(torch.where(begins, value, self._first))

    def step(self, step: Step, reward: Tensor) -> None:
        """Take in what the actions earned, (N,), and where episodes ended."""
        self._return.addcmul_(self._power, reward)
        self._power *= self._gamma
        ended = step.terminated | step.truncated
        left = torch.where(step.terminated, 0, self._power * self._value)
        self._sum += torch.where(ended, self._first - self._return - left, 0).sum()
        self._count += ended.sum()
        begins = step.begins
        self._return.masked_fill_(begins, 0)
        self._power.masked_fill_(begins, 1)

    def read(self) -> float:
        """The mean error of the episodes that ended since the last call; NaN without any."""
        mean = (self._sum / self._count).item()
        self._sum.zero_()
        self._count.zero_()
        return mean

    def forget_running(self) -> None:
        """Drop the episodes that have not ended, where new ones begin in their place."""
        self._return.zero_()
        self._power.fill_(1)

    def state(self) -> dict[str, Tensor]:
        """Tensors to be saved and, in place, restored."""
        names = ("first", "value", "return", "power", "sum", "count")
        return {name: getattr(self, f"_{name}") for name in names}


def replay_metrics(stats: dict[str, Any]) -> dict[str, float]:
    """Of `PrioritizedReplay.stats()` what a log line shows; priorities are p^alpha."""
    names = ("held", "mean_age", "stale", "bad_td_errors", "max_priority", "beta")
    numbers = {f"replay/{name}": float(stats[name]) for name in names}
    counts, edges = stats["histogram"]
    total = int(counts.sum())
    for percent in (10, 50, 90) if total else ():
        numbers[f"replay/priority_p{percent}"] = float(edges[1:][counts.cumsum(0) * 100 >= percent * total][0])
    return numbers


SUMS = ("replay/held", "replay/stale", "replay/bad_td_errors")
LARGEST = ("q/max", "td/max", "replay/max_priority")
SOMETIMES = tuple(f"replay/priority_p{percent}" for percent in (10, 50, 90))  # where a shard holds anything


def join_numbers(numbers: dict[str, float], world: World) -> dict[str, float]:
    """All ranks' numbers in one: SUMS, the LARGEST, and means of the others over the ranks that have them."""
    names = sorted({*numbers, *SOMETIMES})
    own = torch.tensor([numbers.get(name, math.nan) for name in names], dtype=torch.float64)
    every = world.gather(own)
    joined = dict(zip(names, every.nanmean(0).tolist(), strict=True))
    for name, column in zip(names, every.unbind(1), strict=True):
        if name in SUMS:
            joined[name] = float(column.sum())
        if name in LARGEST:
            joined[name] = float(column.max())
    return {name: value for name, value in joined.items() if name in numbers or not math.isnan(value)}
