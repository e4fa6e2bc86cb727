"""A market of bars as tensors: hold, flat or short, one instrument an environment."""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sharpwave.envs._bar_files import generate_instruments, read_instruments
from sharpwave.envs.base import Discrete, Observation, Reset, Step
from sharpwave.envs.tensor import TensorEnv

FEATURES = 5


class Bars(TensorEnv):
    """Choose before each bar of a market to be short, flat or long in one instrument.

    An environment stands at a bar t, which has closed. The action chooses the position p' in {-1, 0, 1} that is taken
    when the next bar opens; the position so far, p, is held until then. With open o, close c and cost k:

        reward = p (o_{t+1} / c_t - 1) + p' (c_{t+1} / o_{t+1} - 1) - k |p' - p|

    the return on one unit of money, to which the position is set anew at each bar: gains are not reinvested, so that
    rewards add up and no short position can lose more than it is told to. Then the environment stands at t + 1.

    An observation holds the last `window` bars and the position p. Each bar is five numbers, in percent but for the
    last: 100 log(x_t / c_{t-1}) for x = open, high, low, close, and log((1 + volume_t) / (1 + volume_{t-1})).

    No look-ahead: a bar's features are computed from it and the bar before, the window is read at rows t - window + 1
    to t, and the reward of a step ends with the bar that the step shows. Nothing is measured over the whole series. So
    what was observed and earned up to bar t does not change by a bit when any later bar does.

    Episodes begin at a random bar of a random instrument, each start that leaves room for a whole episode as likely as
    any other, with no position; they are `truncated` after `episode_length` bars, and never `terminated`.

    Args:
        num_envs: N.
        device: any. Bars are held there: 28 bytes each.
        path: a CSV or Parquet file, several, or patterns; see `docs/bars.md` for their columns. None generates bars.
        window: bars in an observation, at least 1.
        episode_length: bars in an episode, at least 1; None goes on to the last bar.
        cost: of changing the position by 1, as a fraction: commission and half the spread.
        start: "random", or "first": environment i begins each episode at the first bar of run i mod R, where the R runs
            are the instruments, cut at gaps. With episode_length=None that is a backtest.
        split: the part of each instrument's bars to use, from and to, in [0, 1]: (0, 0.8) to train, (0.8, 1) to test.
        gaps: bars that do not follow each other at the usual time. "error" refuses them, "split" lets no episode cross
            one, "ignore" takes bars as consecutive, as over nights and weekends.
        instruments, length, data_seed, momentum, volatility: of generated bars, whose returns have that correlation
            from bar to bar and that standard deviation.

    Observation: (5 window + 1,) float32, the oldest bar first, the position last. Action: Discrete((3,)): 0 short,
    1 flat, 2 long. Deterministic for a seed, device and N.

    Raises:
        ValueError: an option out of range; bars that cannot be used, with file, row and column; too few bars.
        ImportError: a file is given, and polars, which reads it, is not installed.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        path: str | list[str] | None = None,
        window: int = 16,
        episode_length: int | None = 256,
        cost: float = 1e-4,
        start: Literal["random", "first"] = "random",
        split: tuple[float, float] = (0.0, 1.0),
        gaps: Literal["error", "split", "ignore"] = "error",
        instruments: int = 8,
        length: int = 4096,
        data_seed: int = 0,
        momentum: float = 0.3,
        volatility: float = 0.01,
    ):
        whole = {"window": window, "instruments": instruments, "length": length, "episode_length": episode_length}
        for name, value in whole.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if not 0 <= cost < 1:
            raise ValueError(f"cost must be a fraction in [0, 1); got {cost}")
        if len(split) != 2 or not 0 <= split[0] < split[1] <= 1:
            raise ValueError(f"split must be two rising numbers in [0, 1]; got {split}")
        for name, value, allowed in (
            ("start", start, ("random", "first")),
            ("gaps", gaps, ("error", "split", "ignore")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        if not (-1 < momentum < 1 and volatility > 0):
            raise ValueError(f"momentum must be in (-1, 1) and volatility above 0; got {momentum}, {volatility}")
        observation = Observation((FEATURES * window + 1,), torch.float32)
        super().__init__("sharpwave/Bars", num_envs, device, observation, Discrete((3,)))
        self.window, self.cost = window, cost
        self.from_first = start == "first"
        self.instruments = (
            generate_instruments(instruments, length, data_seed, momentum, volatility)
            if path is None
            else read_instruments(path, allow_gaps=gaps != "error")
        )
        self._lay_out(split, gaps == "split", episode_length)
        self._bar = self._keep("bar", torch.zeros(num_envs, dtype=torch.int64))
        self._end = self._keep("end", torch.zeros(num_envs, dtype=torch.int64))
        self._position = self._keep("position", torch.zeros(num_envs))
        self._drawn = torch.zeros_like(self._bar)
        self._positions = torch.tensor([-1.0, 0.0, 1.0], device=self.device)
        self._back = torch.arange(1 - window, 1, device=self.device)

    def _lay_out(self, split: tuple[float, float], cut: bool, episode_length: int | None) -> None:
        """Put all bars' features and returns one after the other, and list where an episode may begin and must end."""
        features, returns, starts, ends = [], [], [], []
        offset = 0
        for instrument in self.instruments:
            count = len(instrument.bars)
            features.append(bar_features(instrument.bars))
            returns.append(bar_returns(instrument.bars))
            low, high = round(split[0] * count), round(split[1] * count)
            inner = [int(g) for g in instrument.gaps if low < g < high] if cut else []
            for begin, end in zip([low, *inner], [*inner, high], strict=True):
                # The first bar of a run has no bar before it, so that the first window ends at begin + window.
                first, last = begin + self.window, end - 1 - (episode_length or 1)
                if first <= last:
                    at = np.array([first]) if self.from_first else np.arange(first, last + 1)
                    starts.append(offset + at)
                    ends.append(offset + np.minimum(at + (episode_length or count), end - 1))
            offset += count
        if not starts:
            longest = max(self.instruments, key=lambda instrument: len(instrument.bars))
            raise ValueError(
                f"an episode takes window + 1 + episode_length = {self.window + 1 + (episode_length or 1)} bars in a "
                f"row; the longest instrument, {longest.name!r}, has {len(longest.bars)}, of which split {split} and "
                "gaps leave too few: make window or episode_length smaller"
            )
        table, earned = np.concatenate(features), np.concatenate(returns)
        self.fingerprint = hashlib.sha256(table.tobytes() + earned.tobytes()).hexdigest()
        self._features = torch.from_numpy(table).to(self.device)
        self._overnight, self._body = torch.from_numpy(earned).to(self.device).unbind(1)
        self._starts = torch.from_numpy(np.concatenate(starts)).to(self.device)
        self._ends = torch.from_numpy(np.concatenate(ends)).to(self.device)

    def _choose(self) -> Tensor:
        """Which of the starts each environment's next episode takes."""
        if self.from_first:
            torch.remainder(torch.arange(self.num_envs, device=self.device), len(self._starts), out=self._drawn)
        else:
            self._drawn.random_(0, len(self._starts), generator=self.generator)
        return self._drawn

    def _begin(self) -> None:
        chosen = self._choose()
        torch.index_select(self._starts, 0, chosen, out=self._bar)
        torch.index_select(self._ends, 0, chosen, out=self._end)
        self._position.zero_()

    def _observe(self) -> Reset:
        return Reset(self._obs())

    def _obs(self) -> Tensor:
        rows = (self._bar.unsqueeze(1) + self._back).flatten()
        bars = self._features.index_select(0, rows).view(self.num_envs, -1)
        return torch.cat([bars, self._position.unsqueeze(1)], 1)

    def _step(self, action: Tensor) -> Step:
        position = self._positions.index_select(0, action)
        self._bar.add_(1)
        reward = self._position * self._overnight.index_select(0, self._bar)
        reward += position * self._body.index_select(0, self._bar)
        reward -= self.cost * (position - self._position).abs()
        self._position.copy_(position)
        truncated = self._bar == self._end
        next_obs = self._obs()

        chosen = self._choose()
        torch.where(truncated, self._starts.index_select(0, chosen), self._bar, out=self._bar)
        torch.where(truncated, self._ends.index_select(0, chosen), self._end, out=self._end)
        self._position.masked_fill_(truncated, 0)
        return Step(self._obs(), reward, torch.zeros_like(truncated), truncated, next_obs)

    def _state(self) -> dict[str, Any]:
        return {"bars": self.fingerprint, **super()._state()}

    def _load(self, state: Mapping[str, Any]) -> Reset:
        if state.get("bars") != self.fingerprint:
            raise ValueError(f"{self.name}: the state was saved over other bars: give the files it was saved with")
        return super()._load(state)


def bar_features(bars: np.ndarray) -> np.ndarray:
    """(B, 5) open, high, low, close, volume -> (B, 5) float32; row t from rows t - 1 and t alone, row 0 is 0."""
    result = np.zeros((len(bars), FEATURES), dtype=np.float32)
    result[1:, :4] = 100 * np.log(bars[1:, :4] / bars[:-1, 3:4])
    result[1:, 4] = np.log1p(bars[1:, 4]) - np.log1p(bars[:-1, 4])
    return result


def bar_returns(bars: np.ndarray) -> np.ndarray:
    """(B, 5) bars -> (B, 2) float32: from the last close to the open (row 0: 0), and from the open to the close."""
    overnight = np.zeros(len(bars))
    overnight[1:] = bars[1:, 0] / bars[:-1, 3] - 1
    return np.stack([overnight, bars[:, 3] / bars[:, 0] - 1], 1).astype(np.float32)
