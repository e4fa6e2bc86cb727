"""Small environments whose every transition can be told in advance."""

import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv


class Walk(gymnasium.Env):
    """Episodes of random length and kind of end; the observation tells the episode, the step and the last action."""

    observation_space = spaces.Box(-1, 1e6, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, longest: int = 5, faulty_at: int | None = None, fault: str = "raise"):
        self.longest, self.faulty_at, self.fault = longest, faulty_at, fault
        self.episode, self.steps_in_all = 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = int(self.np_random.integers(100)) * 100
        self.episode += 1
        self.t = 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.ends = int(self.np_random.integers(3))
        return self.observe(-1), self.info()

    def step(self, action):
        self.t += 1
        self.steps_in_all += 1
        over = self.t >= self.length
        reward = self.episode % 10 + self.t / 8 + int(action)
        obs = self.observe(action)
        if self.steps_in_all == self.faulty_at:
            if self.fault == "raise":
                raise OSError("the simulator has gone away")
            if self.fault == "hang":
                time.sleep(60)
            if self.fault == "reward":
                reward = float("nan")
            else:
                obs[1] = float(self.fault)
        return obs, reward, over and self.ends != 1, over and self.ends != 0, self.info()

    def observe(self, action) -> np.ndarray:
        return np.array([self.episode, self.t, action], dtype=np.float32)

    def info(self) -> dict:
        return {"action_mask": np.arange(3) != self.t % 3}


class Misfit(Walk):
    """A Walk whose space says another shape."""

    observation_space = spaces.Box(-1, 1e6, (4,), np.float32)


class Rewriting(Walk):
    """A Walk that writes every observation into the same array."""

    def __init__(self, longest: int = 5):
        super().__init__(longest)
        self.array = np.zeros(3, dtype=np.float32)

    def observe(self, action) -> np.ndarray:
        self.array[:] = super().observe(action)
        return self.array


class DictWalk(gymnasium.ObservationWrapper):
    """A Walk whose observation is a Dict of a Box and a Discrete."""

    def __init__(self, longest: int = 5):
        super().__init__(Walk(longest))
        self.observation_space = spaces.Dict({"where": Walk.observation_space, "parity": spaces.Discrete(2)})

    def observation(self, observation):
        return {"where": observation, "parity": int(observation[1]) % 2}


class Opaque(Walk):
    """A Walk that holds something that cannot be saved."""

    def __init__(self):
        super().__init__()
        self.handle = object()


class MaskedSteps(TensorEnv):
    """Two heads, of 2 and 3 choices; at step t choice t % 2 and choice t % 3 are the illegal ones. Three steps."""

    def __init__(self, num_envs: int, device="cpu"):
        super().__init__(
            "MaskedSteps", num_envs, device, Observation((1,), torch.float32), Discrete((2, 3), masked=True)
        )
        self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))

    def _begin(self):
        self.t.zero_()

    def _observe(self) -> Reset:
        first = torch.arange(2, device=self.device) != self.t[:, None] % 2
        second = torch.arange(3, device=self.device) != self.t[:, None] % 3
        return Reset(self.t[:, None].float(), torch.cat([first, second], dim=1))

    def _step(self, action: Tensor) -> Step:
        legal = self._observe().action_mask
        reward = legal.gather(1, action[:, :1]) & legal.gather(1, action[:, 1:] + 2)
        self.t.add_(1)
        next_obs = self._observe().obs
        ended = self.t == 3
        self.t.masked_fill_(ended, 0)
        obs, mask, _ = self._observe()
        return Step(obs, reward[:, 0].float(), ended, torch.zeros_like(ended), next_obs, action_mask=mask)


def rescaled(*, high: float = 100.0) -> gymnasium.Env:
    """A function that makes one environment."""
    return gymnasium.wrappers.RescaleAction(Reach(high), -1, 1)


class Reach(gymnasium.Env):
    """The reward is the action."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, high: float = 100.0, timeout: float = 0.0):
        self.action_space = spaces.Box(0, high, (1,), np.float32)
        self.timeout = timeout

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        return np.zeros(1, dtype=np.float32), float(action[0]), False, self.timeout > 0, {}
