"""What a rollout leaves behind, and what the updates compute from it alone."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.envs.base import Discrete, Step, VectorEnv
from sharpwave.nn import Policy
from sharpwave.nn.actions import Sample
from sharpwave.ops._backends import installed
from sharpwave.ops.advantage import advantage_and_priority
from sharpwave.ops.gather import gather_fields


@dataclass
class Segments:
    """N segments of T steps, and the recurrent state each began with."""

    obs: Tensor
    """(N, T, *observation), the environment's own dtype; or (N, T, D) as `Policy.kept` says."""
    action: Tensor
    """(N, T, heads) int64, or (N, T, dim) float32."""
    logprob: Tensor
    """(N, T) float32, when the action was drawn."""
    value: Tensor
    """(N, T) float32, V(obs_t): the rollout's, then the latest written back."""
    next_value: Tensor
    """(N, T) float32, V of the true next observation, where `puff_advantage` reads it."""
    reward: Tensor
    """(N, T) float32, what the action at t earned."""
    terminated: Tensor
    """(N, T) bool."""
    truncated: Tensor
    """(N, T) bool."""
    reset: Tensor
    """(N, T) bool: obs_t is the first of an episode."""
    ratio: Tensor
    """(N, T) float32, pi(a|s) / pi_old(a|s): 1, then the latest written back."""
    state: Tensor
    """(layers, N, H) before obs_0."""
    valid: Tensor | None
    """(N, T) bool where the environment may skip steps, else None."""
    mask: Tensor | None
    """(N, T, sum(nvec)) bool where actions are masked, else None."""

    @staticmethod
    def empty(env: VectorEnv, policy: Policy, horizon: int, dtype: torch.dtype) -> "Segments":
        """Buffers for rollouts of `env`, which `policy` reads in `dtype`."""
        n, t, device = env.num_envs, horizon, env.device

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(n, t, *shape, dtype=dtype, device=device)

        kept = policy.kept(env.observation, device, dtype)
        masked = isinstance(env.action, Discrete) and env.action.masked
        return Segments(
            obs=new(*kept.shape, dtype=kept.dtype),
            action=new(policy.actions.columns, dtype=policy.actions.dtype),
            logprob=new(),
            value=new(),
            next_value=new(),
            reward=new(),
            terminated=new(dtype=torch.bool),
            truncated=new(dtype=torch.bool),
            reset=new(dtype=torch.bool),
            ratio=new(),
            state=policy.initial_state(n),
            valid=new(dtype=torch.bool) if env.may_skip else None,
            mask=new(policy.actions.width, dtype=torch.bool) if masked else None,
        )

    def rows(self, rows: slice) -> "Segments":
        """Those of some environments, as views."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        cut: dict[str, Any] = {name: None if x is None else x[rows] for name, x in own.items()}
        return Segments(**cut | {"state": self.state[:, rows]})

    def record(self, t: int, sample: Sample, value: Tensor, step: Step, reward: Tensor, begins: Tensor) -> None:
        """Store step t but for its observation and mask: the draw, V(obs_t), its end, and the `reward` to train on.

        begins: (N,) bool, whether obs_t is the first of an episode; then set to whether obs_{t+1} is.
        """
        into = (self.action, self.logprob, self.value, self.reward, self.terminated, self.truncated, self.reset)
        if self.value.is_cuda and installed("triton"):
            from sharpwave.algos._record_triton import record

            record(*sample, value, reward, step.terminated, step.truncated, step.valid, begins, into, self.valid, t)
            return
        fresh = (sample.action, sample.logprob, value, reward, step.terminated, step.truncated, begins)
        for column, x in zip(into, fresh, strict=True):
            column[:, t] = x
        if self.valid is not None and step.valid is not None:
            self.valid[:, t] = step.valid
        begins.copy_(step.begins)

    def batch(self, draws: int, policy: Policy, dtype: torch.dtype) -> "Minibatch":
        """Room for `draws` segments, as the policy reads them best in `dtype`."""

        def room(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(draws, *x.shape[1:])

        return Minibatch(
            obs=policy.gather(self.obs, torch.zeros(draws, dtype=torch.int64, device=self.obs.device), dtype),
            action=self.action.new_zeros(draws, *self.action.shape[1:]),
            logprob=self.logprob.new_zeros(draws, *self.logprob.shape[1:]),
            value=self.value.new_zeros(draws, *self.value.shape[1:]),
            advantage=self.value.new_zeros(draws, *self.value.shape[1:]),
            reset=self.reset.new_zeros(draws, *self.reset.shape[1:]),
            state=self.state.new_zeros(self.state.shape[0], draws, self.state.shape[2]),
            valid=room(self.valid),
            mask=room(self.mask),
        )

    def gather_observations(self, index: Tensor, policy: Policy, batch: "Minibatch") -> None:
        """Copy the observations of the segments at `index`, (M,) int64, into `batch`."""
        if batch.obs.dtype == self.obs.dtype and batch.obs.shape[1:] == self.obs.shape[1:]:
            gather_fields([self.obs], index, [batch.obs])
        else:
            policy.gather(self.obs, index, batch.obs.dtype, out=batch.obs)

    def gather(self, index: Tensor, advantage: Tensor, batch: "Minibatch") -> None:
        """Copy everything else of them, and their advantages."""
        pairs = [
            (self.action, batch.action),
            (self.logprob, batch.logprob),
            (self.value, batch.value),
            (advantage, batch.advantage),
            (self.reset, batch.reset),
            (self.valid, batch.valid),
            (self.mask, batch.mask),
            *zip(self.state, batch.state, strict=True),
        ]
        present = [(source, out) for source, out in pairs if source is not None and out is not None]
        gather_fields([source for source, _ in present], index, [out for _, out in present])


class Minibatch(NamedTuple):
    """What an update reads of M segments: fields as in `Segments`, observations as the policy reads them best."""

    obs: Tensor
    action: Tensor
    logprob: Tensor
    value: Tensor
    advantage: Tensor
    reset: Tensor
    state: Tensor
    valid: Tensor | None
    mask: Tensor | None


def segment_advantage(
    segments: Segments, config: PPOConfig, rows: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(N, T) advantages under the latest values and ratios, 0 where a step is not valid; and (N,) raw priorities.

    rows: (M,) int64, the segments whose values or ratios have changed since `out`, which is written, was computed.
    """
    s, end = segments, segments.value.shape[1]
    terminated, truncated, next_value = s.terminated, s.truncated, s.next_value
    valid = s.valid
    if config.puffer_compat:
        end -= 1
        terminated = terminated | truncated
        truncated = torch.zeros_like(truncated)
        next_value = torch.cat([s.value[:, 1:], s.value[:, -1:]], 1)
        valid = None if valid is None else valid[:, :end]
    inputs = (x[:, :end] for x in (s.value, next_value, s.reward, terminated, truncated, s.ratio))
    advantage, priority = advantage_and_priority(
        *inputs, valid=valid, gamma=config.gamma, lam=config.gae_lambda, alpha=config.alpha,
        rho_clip=config.rho_clip, c_clip=config.c_clip,
        rows=None if config.puffer_compat else rows, out=None if config.puffer_compat else out,
    )  # fmt: skip
    if not config.puffer_compat:
        return advantage, priority
    advantage = torch.nn.functional.pad(advantage, (0, 1))
    if out is not None:
        for kept, fresh in zip(out, (advantage, priority), strict=True):
            kept.copy_(fresh)
    return advantage, priority
