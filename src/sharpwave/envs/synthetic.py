"""An environment of any width that costs next to nothing: for benchmarks of the trainer."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpwave.envs.base import Discrete, Observation, Reset, Step, write_observations
from sharpwave.envs.tensor import TensorEnv
from sharpwave.ops._backends import installed


class Synthetic(TensorEnv):
    """Observations are rows of a fixed random table; each row has one right action.

        reward = 1 where action = (row mod num_actions), else 0
        row'   = (row + 1 + action) mod rows, or a random one where the episode of `length` steps ends (terminated)

    Args:
        num_envs: N.
        device: any.
        observation_size: width of an observation, float32.
        num_actions: at least 2.
        length: steps of an episode, at least 1. Episodes begin staggered, so that about N / length end in each step.
        rows: of the table.

    The best mean return is `length`, chance is length / num_actions.
    """

    may_truncate = False

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        observation_size: int = 843,
        num_actions: int = 43,
        length: int = 100,
        rows: int = 1024,
    ):
        for name, value, least in (
            ("observation_size", observation_size, 1),
            ("num_actions", num_actions, 2),
            ("length", length, 1),
            ("rows", rows, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        observation = Observation((observation_size,), torch.float32)
        super().__init__("sharpwave/Synthetic", num_envs, device, observation, Discrete((num_actions,)))
        self.num_actions, self.length, self.rows = num_actions, length, rows
        table = torch.randn(rows, observation_size, generator=torch.Generator().manual_seed(0))
        self._table = table.to(self.device)
        self._row = self._keep("row", torch.zeros(num_envs, dtype=torch.int64))
        self._t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))
        self._drawn = torch.zeros_like(self._row)
        # Whole words of 16 bytes, for rows of bfloat16 as a trainer keeps them.
        self._rounded = F.pad(self._table, (0, -observation_size % 8)).bfloat16()
        self._triton = self.writes_rounded = self.device.type == "cuda" and installed("triton")

    def _begin(self) -> None:
        self._row.random_(0, self.rows, generator=self.generator)
        torch.remainder(torch.arange(self.num_envs, device=self.device), self.length, out=self._t)

    def _observe(self) -> Reset:
        return Reset(self._table.index_select(0, self._row))

    def _step(self, action: Tensor) -> Step:
        out = self._table.new_empty(self.num_envs, self._table.shape[1])
        return self._step_into(action, out, need_next_obs=True)

    def _step_into(self, action: Tensor, out: Tensor, need_next_obs: bool) -> Step:
        if out.dtype == torch.bfloat16 and not (self._triton and out.shape[1] == self._rounded.shape[1]):
            step = self._step(action)
            return step._replace(obs=write_observations(step.obs, out))
        self._drawn.random_(0, self.rows, generator=self.generator)
        if self._triton:
            return self._step_triton(action, out, need_next_obs)
        reward = (action == self._row % self.num_actions).to(torch.float32)
        terminated = self._t == self.length - 1
        self._t.add_(1).masked_fill_(terminated, 0)
        following = (self._row + 1 + action) % self.rows
        torch.where(terminated, self._drawn, following, out=self._row)
        torch.index_select(self._table, 0, self._row, out=out)
        next_obs = self._table.index_select(0, following) if need_next_obs else out
        return Step(out, reward, terminated, torch.zeros_like(terminated), next_obs)

    def _step_triton(self, action: Tensor, out: Tensor, need_next_obs: bool) -> Step:
        from sharpwave.envs._synthetic_triton import step

        obs = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        next_obs = self._table.new_empty(self.num_envs, self._table.shape[1]) if need_next_obs else out
        reward = torch.empty(self.num_envs, device=self.device)
        terminated, truncated = torch.empty(2, self.num_envs, dtype=torch.bool, device=self.device)
        step(
            action.contiguous(), self._row, self._t, self._drawn, self._table,
            self._rounded if out.dtype == torch.bfloat16 else self._table, self.num_actions, self.length,
            obs, next_obs if need_next_obs else None, reward, terminated, truncated,
        )  # fmt: skip
        if obs is not out:
            out.copy_(obs)
        return Step(out, reward, terminated, truncated, next_obs)
