"""Small environments whose right answer is known in closed form."""

import torch
from torch import Tensor

from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv


class Clock(TensorEnv):
    """Episodes of `length` steps, all in step; the observation is (first flag, last flag, `memory` of the choice, 1).

    Args:
        choose_at: the step whose action (0 or 1) is rewarded, with 1 for action 1, on the episode's last step; None
            rewards every step with 1, whatever is done.
        truncates: episodes end by truncation instead of termination.
    """

    def __init__(self, num_envs: int, length: int, choose_at: int | None, truncates: bool = False):
        super().__init__("toy/Clock", num_envs, "cpu", Observation((4,), torch.float32), Discrete((2,)))
        self.length, self.choose_at, self.truncates = length, choose_at, truncates
        self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))
        self.chosen = self._keep("chosen", torch.zeros(num_envs))

    def _begin(self) -> None:
        self.t.zero_()
        self.chosen.zero_()

    def _show(self, t: Tensor, chosen: Tensor) -> Tensor:
        return torch.stack([(t == 0).float(), (t == self.length - 1).float(), chosen, torch.ones_like(chosen)], 1)

    def _observe(self) -> Reset:
        return Reset(self._show(self.t, self.chosen))

    def _step(self, action: Tensor) -> Step:
        if self.choose_at is not None:
            self.chosen.copy_(torch.where(self.t == self.choose_at, action.float() * 2 - 1, self.chosen))
        last = self.t == self.length - 1
        reward = torch.ones_like(self.chosen) if self.choose_at is None else (last & (self.chosen > 0)).float()
        next_obs = self._show(self.t + 1, self.chosen)
        self.t.add_(1).masked_fill_(last, 0)
        self.chosen.masked_fill_(last, 0)
        no = torch.zeros_like(last)
        ends = (no, last) if self.truncates else (last, no)
        return Step(self._observe().obs, reward, *ends, next_obs)


class Masked(TensorEnv):
    """Two heads of 3 and 2 choices under a mask that changes each step; reward 1, an error for an illegal choice.

    With `late`, an episode of four steps begins one step late, as Gymnasium's NEXT_STEP mode does.
    """

    def __init__(self, num_envs: int, late: bool = False):
        super().__init__("toy/Masked", num_envs, "cpu", Observation((5,), torch.uint8), Discrete((3, 2), masked=True))
        self.late = self.may_skip = late
        self.mask = self._keep("mask", torch.ones(num_envs, 5, dtype=torch.bool))
        self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))

    def _begin(self) -> None:
        self.t.zero_()
        self._new_mask()

    def _new_mask(self) -> None:
        self.mask.copy_(torch.rand(self.mask.shape, generator=self.generator) < 0.5)
        for lo, hi in ((0, 3), (3, 5)):
            which = torch.randint(lo, hi, (self.num_envs, 1), generator=self.generator)
            self.mask.scatter_(1, which, True)

    def _observe(self) -> Reset:
        return Reset(self.mask.to(torch.uint8) * 255, self.mask.clone())

    def _step(self, action: Tensor) -> Step:
        legal = self.mask.gather(1, action + torch.tensor([0, 3])).all()
        assert legal, "an illegal action was taken"
        self._new_mask()
        skipped = (self.t == 4) if self.late else torch.zeros_like(self.t, dtype=torch.bool)
        ended = self.t == 3
        self.t.copy_((self.t + 1) % (5 if self.late else 4))
        obs, mask, _ = self._observe()
        reward = (~skipped).float()
        return Step(obs, reward, ended, torch.zeros_like(ended), obs, ~skipped if self.late else None, mask)


class Target(TensorEnv):
    """One-step episodes, a two-dimensional action; reward -|action - target|^2, the target being what is observed."""

    def __init__(self, num_envs: int):
        from sharpwave.envs import Continuous

        action = Continuous(2, (-10.0, -10.0), (10.0, 10.0))
        super().__init__("toy/Target", num_envs, "cpu", Observation((2,), torch.float32), action)
        self.target = self._keep("target", torch.zeros(num_envs, 2))

    def _begin(self) -> None:
        self.target.uniform_(-1, 1, generator=self.generator)

    def _observe(self) -> Reset:
        return Reset(self.target.clone())

    def _step(self, action: Tensor) -> Step:
        reward = -(action - self.target).square().sum(1)
        next_obs = self.target.clone()
        self._begin()
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        return Step(self._observe().obs, reward, ended, torch.zeros_like(ended), next_obs)


def in_turn(env):
    """`env` with each group's step taken as a whole before anything else happens: nothing overlaps."""
    for group in env.groups:
        taken = []

        def begin(action, group=group, taken=taken):
            taken.append(group.step(action.clone()))
            if action.is_cuda:
                torch.cuda.synchronize()

        group.step_async, group.step_wait = begin, taken.pop
    return env
