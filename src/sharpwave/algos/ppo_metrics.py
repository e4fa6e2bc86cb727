"""What PPO's updates came to, gathered on the device and read once a log line."""

import torch
from torch import Tensor

from sharpwave.ops._backends import installed
from sharpwave.ops.ppo_loss import STATS
from sharpwave.run.distributed import ALONE, World

# Names in the order of STATS, then of the trainer's other numbers.
NAMES = (
    *("loss/policy", "loss/value", "loss/entropy", "policy/old_approx_kl", "policy/approx_kl", "policy/clip_fraction"),
    *("grad/norm", "value/explained_variance", "schedule/lr", "schedule/beta"),
    *("fault/skipped_updates", "fault/bad_priorities"),
)


class UpdateMetrics:
    """Means over the updates that were taken, and counts of what went wrong in the others.

    An update's numbers are held until its gradient's norm is known, and taken in by `settle`: beside the next update,
    or when they are read, so that no update ends with a wait for its counters. All methods but `read` neither wait for
    the device nor allocate anew between calls, so that they can be captured.

    Args:
        grad_norm: 0-d float32, where every step of the optimizer leaves the gradient's norm.
    """

    def __init__(self, grad_norm: Tensor):
        device = grad_norm.device
        terms = len(STATS) + 1  # and the gradient's norm
        # Sums of the terms over the updates taken, how often each was not finite, and updates in all and taken.
        self._totals = torch.zeros(2 * terms + 2, device=device)
        self._sums, self._faults, self._counters = self._totals.split([terms, terms, 2])
        # Of the update since the last `settle`: that there is one, its loss, its STATS.
        self._held = torch.zeros(2 + len(STATS), device=device)
        self._one = torch.ones(1, device=device)
        self._grad_norm = grad_norm
        self._bad_priorities = torch.zeros((), dtype=torch.int64, device=device)
        self._variance = torch.zeros(2, device=device)
        self._triton = device.type == "cuda" and installed("triton")

    def rollout(self, advantage: Tensor, value: Tensor) -> None:
        """Take in a rollout's advantages A and values V: 1 - var(A) / var(A + V) is the variance that V explains."""
        self._variance += torch.stack([advantage.var(correction=0), (advantage + value).var(correction=0)])

    def draw(self, bad_priorities: Tensor) -> None:
        """Take in how many segments had no finite priority in a draw."""
        self._bad_priorities += bad_priorities

    def update(self, loss: Tensor, stats: Tensor) -> None:
        """Hold an update's loss and STATS; the one before was settled."""
        torch.cat([self._one, loss[None], stats], out=self._held)

    def settle(self) -> None:
        """Take in the update that is held, if any, after its optimizer's step.

        The update was taken if its loss and its gradient's norm are finite.
        """
        if self._triton:
            from sharpwave.algos._metrics_triton import settle

            settle(self._totals, self._held, self._grad_norm)
            return
        held, loss, stats = self._held[0] > 0, self._held[1], self._held[2:]
        kept = held & loss.isfinite() & self._grad_norm.isfinite()
        terms = torch.cat([stats, self._grad_norm[None]])
        self._sums += torch.where(kept, terms, 0)
        self._faults += held & ~terms.isfinite()
        self._counters += torch.stack([held, kept])
        self._held[0] = 0

    def read(self, lr: Tensor, beta: Tensor, world: World = ALONE) -> tuple[dict[str, float], list[str]]:
        """The numbers by NAMES and the terms that were not finite in skipped updates; then begin anew.

        Updates are the same on all ranks of `world`; rollouts and draws are each rank's own, and are added up.
        """
        self.settle()
        world.sum_(self._variance)
        world.sum_(self._bad_priorities)
        a, r = self._variance
        updates, kept = self._counters
        scalars = (1 - a / r, lr, beta, updates - kept, self._bad_priorities)
        values = torch.cat([self._sums / kept.clamp(min=1), torch.stack([x.float().squeeze() for x in scalars])])
        numbers = dict(zip(NAMES, values.tolist(), strict=True))
        faults: list[str] = []
        if numbers["fault/skipped_updates"]:
            faults = [name for name, n in zip((*STATS, "gradient"), self._faults.tolist(), strict=True) if n]
        self.forget()
        return numbers, faults

    def forget(self) -> None:
        """Begin anew."""
        for counter in (self._totals, self._held, self._variance, self._bad_priorities):
            counter.zero_()


def log_histogram(values: Tensor, bins: int = 16) -> tuple[float, float, list[float]] | None:
    """(lowest, highest, counts) of the positive ones among `values`, in bins even in the logarithm; None if none is.

    Waits for the device.
    """
    logs = values[values > 0].log10()
    if not logs.numel():
        return None
    low, high = logs.min().item(), logs.max().item()
    return 10**low, 10**high, torch.histc(logs.float().cpu(), bins, low, high).tolist()
