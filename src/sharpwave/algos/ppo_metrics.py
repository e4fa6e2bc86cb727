"""What PPO's updates came to, gathered on the device and read once a log line."""

import torch
from torch import Tensor

from sharpwave.ops._backends import installed
from sharpwave.ops.ppo_loss import STATS

# Names in the order of STATS, then of the trainer's other numbers.
NAMES = (
    *("loss/policy", "loss/value", "loss/entropy", "policy/old_approx_kl", "policy/approx_kl", "policy/clip_fraction"),
    *("grad/norm", "value/explained_variance", "schedule/lr", "schedule/beta"),
    *("fault/skipped_updates", "fault/bad_priorities"),
)


class UpdateMetrics:
    """Means over the updates that were taken, and counts of what went wrong in the others.

    All methods but `read` neither wait for the device nor allocate anew between calls, so that they can be captured.
    """

    def __init__(self, device: torch.device):
        terms = len(STATS) + 1  # and the gradient's norm
        # Sums of the terms over the updates taken, how often each was not finite, and updates in all and taken.
        self._totals = torch.zeros(2 * terms + 2, device=device)
        self._sums, self._faults, self._counters = self._totals.split([terms, terms, 2])
        self._bad_priorities = torch.zeros((), dtype=torch.int64, device=device)
        self._variance = torch.zeros(2, device=device)
        self._triton = device.type == "cuda" and installed("triton")

    def rollout(self, advantage: Tensor, value: Tensor) -> None:
        """Take in a rollout's advantages A and values V: 1 - var(A) / var(A + V) is the variance that V explains."""
        self._variance += torch.stack([advantage.var(correction=0), (advantage + value).var(correction=0)])

    def draw(self, bad_priorities: Tensor) -> None:
        """Take in how many segments had no finite priority in a draw."""
        self._bad_priorities += bad_priorities

    def update(self, loss: Tensor, stats: Tensor, grad_norm: Tensor) -> None:
        """Take in one update: the loss and its STATS, the gradient's norm. It was taken if both are finite."""
        if self._triton:
            from sharpwave.algos._metrics_triton import tally

            tally(self._totals, loss, stats, grad_norm)
            return
        kept = loss.isfinite() & grad_norm.isfinite()
        terms = torch.cat([stats, grad_norm[None]])
        self._sums += torch.where(kept, terms, 0)
        self._faults += ~terms.isfinite()
        self._counters += torch.stack([torch.ones_like(loss), kept.float()])

    def read(self, lr: Tensor, beta: Tensor) -> tuple[dict[str, float], list[str]]:
        """The numbers by NAMES and the terms that were not finite in skipped updates; then begin anew."""
        a, r = self._variance
        updates, kept = self._counters
        scalars = (1 - a / r, lr, beta, updates - kept, self._bad_priorities)
        values = torch.cat([self._sums / kept.clamp(min=1), torch.stack([x.float().squeeze() for x in scalars])])
        numbers = dict(zip(NAMES, values.tolist(), strict=True))
        faults: list[str] = []
        if numbers["fault/skipped_updates"]:
            faults = [name for name, n in zip((*STATS, "gradient"), self._faults.tolist(), strict=True) if n]
        for counter in (self._totals, self._variance, self._bad_priorities):
            counter.zero_()
        return numbers, faults


def log_histogram(values: Tensor, bins: int = 16) -> tuple[float, float, list[float]] | None:
    """(lowest, highest, counts) of the positive ones among `values`, in bins even in the logarithm; None if none is.

    Waits for the device.
    """
    logs = values[values > 0].log10()
    if not logs.numel():
        return None
    low, high = logs.min().item(), logs.max().item()
    return 10**low, 10**high, torch.histc(logs.float().cpu(), bins, low, high).tolist()
