"""What PPO's updates came to, gathered on the device and read once a log line."""

import torch
from torch import Tensor

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
        def zeros(n: int) -> Tensor:
            return torch.zeros(n, device=device)

        self._updates, self._kept, self._bad_priorities = zeros(1), zeros(1), zeros(1)
        self._stats, self._variance = zeros(len(STATS) + 1), zeros(2)
        self._bad_terms, self._bad_gradients = zeros(len(STATS)), zeros(1)

    def rollout(self, advantage: Tensor, value: Tensor) -> None:
        """Take in a rollout's advantages A and values V: 1 - var(A) / var(A + V) is the variance that V explains."""
        self._variance += torch.stack([advantage.var(correction=0), (advantage + value).var(correction=0)])

    def update(self, keep: Tensor, stats: Tensor, grad_norm: Tensor, bad_priorities: Tensor) -> None:
        """Take in one update: the loss's STATS, the gradient's norm, and whether the step was taken."""
        self._updates += 1
        self._kept += keep
        self._bad_priorities += bad_priorities
        self._stats += torch.where(keep, torch.cat([stats, grad_norm[None]]), 0)
        self._bad_terms += ~stats.isfinite()
        self._bad_gradients += ~grad_norm.isfinite()

    def read(self, lr: Tensor, beta: Tensor) -> tuple[dict[str, float], list[str]]:
        """The numbers by NAMES and the terms that were not finite in skipped updates; then begin anew."""
        a, r = self._variance
        scalars = (1 - a / r, lr, beta, self._updates - self._kept, self._bad_priorities)
        values = torch.cat([self._stats / self._kept.clamp(min=1), torch.stack([x.float().squeeze() for x in scalars])])
        numbers = dict(zip(NAMES, values.tolist(), strict=True))
        faults: list[str] = []
        if numbers["fault/skipped_updates"]:
            faults = [name for name, n in zip(STATS, self._bad_terms.tolist(), strict=True) if n]
            if self._bad_gradients.item():
                faults.append("gradient")
        for counter in (
            *(self._updates, self._kept, self._bad_priorities, self._stats),
            *(self._variance, self._bad_terms, self._bad_gradients),
        ):
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
