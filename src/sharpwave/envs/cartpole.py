"""CartPole as tensors, for a CPU or inside a captured graph on a GPU."""

import math

import torch
from torch import Tensor

from sharpwave.envs.base import Discrete, Observation, Reset, Step
from sharpwave.envs.tensor import TensorEnv

GRAVITY = 9.8
MASS_CART = 1.0
MASS_POLE = 0.1
TOTAL_MASS = MASS_CART + MASS_POLE
LENGTH = 0.5  # of half the pole, metres
FORCE = 10.0
TAU = 0.02  # seconds a step
X_LIMIT = 2.4
THETA_LIMIT = 12 * 2 * math.pi / 360
START = 0.05


class CartPole(TensorEnv):
    """Balance a pole on a cart: the dynamics, thresholds, rewards and time limit of Gymnasium's CartPole-v1.

        temp    = (F + m l theta'^2 sin theta) / M,   F = +10 for action 1, -10 for action 0
        theta'' = (g sin theta - temp cos theta) / (l (4/3 - m cos^2 theta / M))
        x''     = temp - m l theta'' cos theta / M
        (x, x', theta, theta') += 0.02 (x', x'', theta', theta'')        (explicit Euler)

    The reward is 1 a step, the step that falls included. `terminated` where |x| > 2.4 or |theta| > 12 degrees after the
    step; `truncated` after `max_episode_steps`. Episodes begin at four uniform numbers in [-0.05, 0.05).

    Args:
        num_envs: N.
        device: any.
        max_episode_steps: at least 1.
        dtype: of the state, float32 or float64; observations are float32. Gymnasium's is float64.

    Observation: (4,) float32, (x, x', theta, theta'). Action: Discrete((2,)).
    Deterministic for a seed, device and N. A draw of 4 N numbers a step, used where an episode ended.
    Source: Barto, Sutton, Anderson 1983, as corrected by Florian 2007.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 500,
        dtype: torch.dtype = torch.float32,
    ):
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1; got {max_episode_steps}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        super().__init__("sharpwave/CartPole", num_envs, device, Observation((4,), torch.float32), Discrete((2,)))
        self.max_episode_steps = max_episode_steps
        # [4, N]: one row a variable, so that each operation below reads contiguous rows.
        self._state_4n = self._keep("state", torch.zeros(4, num_envs, dtype=dtype))
        self._steps = self._keep("steps", torch.zeros(num_envs, dtype=torch.int32))
        self._first_4n = torch.empty_like(self._state_4n)
        self._rate_4n = torch.empty_like(self._state_4n)
        self._limits = torch.tensor([[X_LIMIT], [THETA_LIMIT]], dtype=dtype, device=self.device)

    def _begin(self) -> None:
        self._state_4n.uniform_(-START, START, generator=self.generator)
        self._steps.zero_()

    def _observe(self) -> Reset:
        return Reset(self._obs())

    def _obs(self) -> Tensor:
        return self._state_4n.t().to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _step(self, action: Tensor) -> Step:
        # Small operations cost their launch, not their arithmetic: constants are folded and results land in place.
        state, rate = self._state_4n, self._rate_4n
        theta, dtheta = state[2], state[3]
        sin, cos = theta.sin(), theta.cos()
        temp = action.to(state.dtype).mul_(2 * FORCE / TOTAL_MASS).sub_(FORCE / TOTAL_MASS)
        temp.addcmul_(dtheta.square(), sin, value=MASS_POLE * LENGTH / TOTAL_MASS)
        denominator = cos.square().mul_(-LENGTH * MASS_POLE / TOTAL_MASS).add_(LENGTH * 4 / 3)
        numerator = sin.mul_(GRAVITY).addcmul_(cos, temp, value=-1)
        ddtheta = torch.div(numerator, denominator, out=rate[3])
        torch.addcmul(temp, ddtheta, cos, value=-MASS_POLE * LENGTH / TOTAL_MASS, out=rate[1])
        rate[0::2].copy_(state[1::2])
        state.add_(rate, alpha=TAU)

        terminated = (state[0::2].abs() > self._limits).any(0)
        truncated = self._steps.add_(1) >= self.max_episode_steps
        ended = terminated | truncated
        next_obs = self._obs()
        torch.where(ended, self._first_4n.uniform_(-START, START, generator=self.generator), state, out=state)
        self._steps.masked_fill_(ended, 0)
        reward = torch.ones(self.num_envs, device=self.device)
        return Step(self._obs(), reward, terminated, truncated, next_obs)
