"""CartPole as tensors, for a CPU or inside a captured graph on a GPU."""

import math

import numpy as np
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
        dtype: of the state, float32 or float64; observations are float32. Gymnasium's state is float64.

    Observation: (4,) float32, (x, x', theta, theta'). Action: Discrete((2,)).
    Deterministic for a seed, device and N: each step draws 4 N numbers, and uses those of the episodes that ended.
    Source: Barto, Sutton, Anderson 1983, with the equations of Florian 2007.
    """

    render_fps = 50

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
        self._physics = self._keep("physics", torch.zeros(num_envs, 4, dtype=dtype))
        self._steps = self._keep("steps", torch.zeros(num_envs, dtype=torch.int32))
        self._rate = torch.zeros_like(self._physics)
        self._first = torch.zeros_like(self._physics)

        def constant(*values, dtype=dtype):
            return torch.tensor(values, dtype=dtype, device=self.device)

        self._push = constant(-FORCE / TOTAL_MASS, FORCE / TOTAL_MASS)
        self._inertia = constant(LENGTH * 4 / 3 / GRAVITY)
        self._limit = constant(X_LIMIT, THETA_LIMIT)
        self._last_step = constant(max_episode_steps, dtype=torch.int32)
        # Views made once: on a CPU a small operation costs its launch, and indexing is one.
        self._position, self._velocity = self._physics[:, 0::2], self._physics[:, 1::2]
        self._theta, self._dtheta = self._physics[:, 2], self._physics[:, 3]
        self._d_position, self._ddx, self._ddtheta = self._rate[:, 0::2], self._rate[:, 1], self._rate[:, 3]

    def _begin(self) -> None:
        self._physics.uniform_(-START, START, generator=self.generator)
        self._steps.zero_()

    def _observe(self) -> Reset:
        return Reset(self._obs())

    def _obs(self) -> Tensor:
        return self._physics.to(torch.float32, copy=True)

    def render(self) -> np.ndarray:
        """A picture of environment 0, (200, 300, 3) uint8: 6 m of the track, the cart, the pole at its length."""
        x, _, theta, _ = self._physics[0].tolist()
        rows, columns = np.mgrid[:200, :300]
        across, up = (columns - 150) / 50, (150 - rows) / 50  # metres from the middle of the track; 50 pixels each
        shot = np.full((200, 300, 3), 255, dtype=np.uint8)
        shot[np.abs(up) < 0.02] = 160
        shot[(np.abs(across - x) < 0.25) & (np.abs(up - 0.2) < 0.2)] = (60, 60, 70)
        sin, cos = np.sin(theta), np.cos(theta)
        along, beside = (across - x) * sin + (up - 0.4) * cos, (across - x) * cos - (up - 0.4) * sin
        shot[(along > 0) & (along < 2 * LENGTH) & (np.abs(beside) < 0.05)] = (200, 130, 70)
        return shot

    def _step(self, action: Tensor) -> Step:
        sin, cos = self._theta.sin(), self._theta.cos()
        temp = self._push.index_select(0, action)
        temp.addcmul_(self._dtheta * self._dtheta, sin, value=MASS_POLE * LENGTH / TOTAL_MASS)
        # theta'', its numerator and denominator both divided by g.
        denominator = torch.addcmul(self._inertia, cos, cos, value=-LENGTH * MASS_POLE / TOTAL_MASS / GRAVITY)
        torch.div(sin.addcmul_(cos, temp, value=-1 / GRAVITY), denominator, out=self._ddtheta)
        torch.addcmul(temp, self._ddtheta, cos, value=-MASS_POLE * LENGTH / TOTAL_MASS, out=self._ddx)
        self._d_position.copy_(self._velocity)
        self._physics.add_(self._rate, alpha=TAU)

        terminated = (self._position.abs() > self._limit).any(1)
        truncated = self._steps.add_(1) >= self._last_step
        ended = terminated | truncated
        next_obs = self._obs()
        self._first.uniform_(-START, START, generator=self.generator)
        torch.where(ended.unsqueeze(1), self._first, self._physics, out=self._physics)
        self._steps.masked_fill_(ended, 0)
        return Step(self._obs(), torch.ones_like(sin, dtype=torch.float32), terminated, truncated, next_obs)
