"""A memory task: see a cue, wait, and say which it was."""

from typing import Literal

import torch
from torch import Tensor

from sharpwave.envs.base import Discrete, Observation, Reset, Step
from sharpwave.envs.tensor import TensorEnv


class CueRecall(TensorEnv):
    """One of K cues is shown, blank steps follow, then a query; the action taken at the query should name the cue.

    An episode has delay + 2 steps:

        step 0                obs = one-hot cue, no flag
        steps 1 .. delay      obs = the blank flag
        step delay + 1        obs = the query flag; reward = 1 where action = answer, else 0; terminated

    and every other reward is 0, so that the best return is 1, and chance, which no memoryless policy exceeds, 1/K. The
    observation after the query is blank.

    With target="previous" the answer is the cue of the episode before, in the first episode an unseen random one. A
    policy whose state starts afresh with each episode then stays at 1/K; more means that state leaks between episodes.

    Args:
        num_envs: N.
        device: any.
        k: number of cues and of actions, at least 2.
        delay: blank steps between cue and query, at least 0.
        target: "cue" or "previous".

    Observation: (k + 2,) float32, one-hot: the cues, the query flag, the blank flag. A blank is a symbol of its own, as
    a network without biases could set no gate on an observation of zeros. Action: Discrete((k,)).
    Deterministic for a seed, device and N. All N episodes begin and end together; their cues are independent.
    """

    may_truncate = False

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        k: int = 4,
        delay: int = 8,
        target: Literal["cue", "previous"] = "cue",
    ):
        if k < 2:
            raise ValueError(f"k must be at least 2; got {k}")
        if delay < 0:
            raise ValueError(f"delay must be at least 0; got {delay}")
        if target not in ("cue", "previous"):
            raise ValueError(f"target must be 'cue' or 'previous'; got {target!r}")
        super().__init__("sharpwave/CueRecall", num_envs, device, Observation((k + 2,), torch.float32), Discrete((k,)))
        self.k, self.delay, self.target = k, delay, target
        self._t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))
        self._cue = self._keep("cue", torch.zeros(num_envs, dtype=torch.int64))
        self._answer = self._keep("answer", torch.zeros(num_envs, dtype=torch.int64))
        self._drawn = torch.zeros_like(self._cue)
        # Row i < k shows cue i, row k the query, row k + 1 a blank; `_shown` says which row a step shows, cues apart.
        self._rows = torch.eye(k + 2, device=self.device)
        self._shown = torch.tensor([0, *[k + 1] * delay, k], device=self.device)

    def _begin(self) -> None:
        self._t.zero_()
        self._cue.random_(0, self.k, generator=self.generator)
        if self.target == "previous":
            self._answer.random_(0, self.k, generator=self.generator)
        else:
            self._answer.copy_(self._cue)

    def _observe(self) -> Reset:
        return Reset(self._rows.index_select(0, self._row()))

    def _row(self) -> Tensor:
        return torch.where(self._t == 0, self._cue, self._shown.index_select(0, self._t))

    def _step(self, action: Tensor) -> Step:
        terminated = self._t == self.delay + 1
        reward = (terminated & (action == self._answer)).to(torch.float32)

        self._t.add_(1).masked_fill_(terminated, 0)
        self._drawn.random_(0, self.k, generator=self.generator)
        following = self._cue if self.target == "previous" else self._drawn
        torch.where(terminated, following, self._answer, out=self._answer)
        torch.where(terminated, self._drawn, self._cue, out=self._cue)

        row = self._row()
        next_obs = self._rows.index_select(0, row.masked_fill(terminated, self.k + 1))
        return Step(self._rows.index_select(0, row), reward, terminated, torch.zeros_like(terminated), next_obs)
