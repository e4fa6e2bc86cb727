"""Returns and lengths of finished episodes, gathered where the data is."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpwave.envs.base import Step
from sharpwave.ops._backends import installed


class EpisodeSummary(NamedTuple):
    """Finished episodes. The figures describe the latest `window` of them, and are NaN before the first."""

    episodes: int
    """Number finished since the beginning."""
    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    mean_length: float
    """Steps."""


class EpisodeStats:
    """Sums each episode's rewards and steps, and keeps those of the latest that finished.

    `update` neither waits for a GPU nor branches on its values, so that it may run every step and inside a captured
    graph; `read` copies the window to the host, and waits.

    Args:
        num_envs: N.
        device: the environment's.
        window: episodes kept, at least 1; the N that may end in one step always fit.

    Episodes that end in one step enter in the order of their environments. Sums are float32.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", window: int = 100):
        if window < 1:
            raise ValueError(f"window must be at least 1; got {window}")
        self.window = max(window, num_envs)
        self._return = torch.zeros(num_envs, device=device)
        self._length = torch.zeros(num_envs, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        # Past the window lies a place for each environment, where the episodes that go on write: in one place for all,
        # a GPU would serve thousands of writes one after the other.
        self._returns = torch.zeros(self.window + num_envs, device=device)
        self._lengths = torch.zeros(self.window + num_envs, device=device)
        self._aside = self.window + torch.arange(num_envs, device=device)
        self._ticket = torch.zeros((), dtype=torch.int64, device=device)
        self._triton = self._return.is_cuda and installed("triton")

    def update(self, step: Step, rows: slice = slice(None)) -> None:
        """Take in one step of the N environments, or of those at `rows`."""
        running = self._return[rows], self._length[rows]
        if self._triton:
            self._update_triton(step, running)
            return
        running[0].add_(step.reward)
        running[1].add_(1.0 if step.valid is None else step.valid)
        ended = step.terminated | step.truncated
        if not ended.is_cuda and not bool(ended.any()):  # Nothing to record; on a host the answer costs no wait.
            return
        slot = (self._count + ended.cumsum(0) - 1).remainder_(self.window)
        slot = torch.where(ended, slot, self._aside[rows])
        for total, kept in zip(running, (self._returns, self._lengths), strict=True):
            kept.scatter_(0, slot, total)
            total.masked_fill_(ended, 0)
        self._count.add_(ended.sum())

    def _update_triton(self, step: Step, running: tuple[Tensor, Tensor]) -> None:
        from sharpwave.envs._stats_triton import update

        kept = (self._returns, self._lengths)
        valid = None if step.valid is None else step.valid.contiguous()
        taken = (step.reward.contiguous(), step.terminated.contiguous(), step.truncated.contiguous(), valid)
        update(*taken, running, self._count, kept, self._ticket, self.window)

    def read(self, gather: Callable[[Tensor], Tensor] | None = None) -> EpisodeSummary:
        """The figures so far. Waits for the device. The deviation is the population's (divided by the number).

        gather: from a tensor to (R, ...), those of R ranks, whose windows are taken together; None: this process's own.
        """
        counts = (self._count[None] if gather is None else gather(self._count)).tolist()
        kept = torch.stack([self._returns[: self.window], self._lengths[: self.window]])
        windows = kept[None] if gather is None else gather(kept)
        parts = [window[:, : min(count, self.window)] for window, count in zip(windows, counts, strict=True)]
        returns, lengths = torch.cat(parts, 1).double().cpu()
        if not len(returns):
            return EpisodeSummary(0, *[math.nan] * 5)
        return EpisodeSummary(
            sum(counts),
            float(returns.mean()),
            float(returns.std(correction=0)),
            float(returns.min()),
            float(returns.max()),
            float(lengths.mean()),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors; running episodes included."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result, copied. ValueError where N or the window differs."""
        for name, tensor in self._tensors().items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(
                    f"EpisodeStats: the state must hold {name!r} of shape {tuple(tensor.shape)}: use the num_envs and "
                    "window it was saved with"
                )
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def forget_running(self) -> None:
        """Drop the episodes that have not ended, where new ones begin in their place."""
        self._return.zero_()
        self._length.zero_()

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "return": self._return,
            "length": self._length,
            "count": self._count,
            "returns": self._returns,
            "lengths": self._lengths,
        }
