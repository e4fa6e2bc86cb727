"""The part of a PPO rollout that one group of environments has to itself."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpwave.envs.base import Step, VectorEnv, write_observations
from sharpwave.nn.actions import Sample
from sharpwave.run.graphs import Captured

if TYPE_CHECKING:
    from sharpwave.algos.ppo import PPO


class EnvGroup:
    """Environments that step together, in no graph: between `send` and `receive` the trainer acts for other groups.

    On a GPU acting is one captured graph, and so is the value where an episode was cut off.

    Args:
        trainer: whose policy acts. What belongs to these environments is views of its tensors, so that all groups
            together leave what one rollout of N environments does.
        env: the trainer's environment or one of its groups.
    """

    def __init__(self, trainer: "PPO", env: VectorEnv):
        n, first, device = env.num_envs, env.first_index, trainer.device
        self.trainer = trainer
        self.env = env
        self.rows = rows = slice(first, first + n)
        self.segments = trainer.segments.rows(rows)
        self.obs = trainer.obs[rows]
        self.state = trainer.state[:, rows]
        self.begins = trainer.begins[rows]
        self.mask = None if trainer.mask is None else trainer.mask[rows]
        self.next_obs = torch.zeros_like(self.obs)
        self.next_value = torch.zeros(n, device=device)
        self._reset: Tensor | None = self.begins
        self._sample: Sample
        self._value: Tensor
        # With puffer_compat the state is reset at t = 0 only, which one graph cannot hold.
        self.run_act = Captured(self._act, device, [trainer.generator], enabled=not trainer.config.puffer_compat)
        self.run_next_value = Captured(self._next_value, device)

    def send(self, t: int) -> None:
        """Act, and let the environments step."""
        trainer, s = self.trainer, self.segments
        self._reset = trainer._reset_flag(t, self.begins)
        self.run_act()
        self.env.step_async(trainer.policy.actions.to_env(self._sample.action))
        write_observations(self.obs, s.obs[:, t])
        if s.mask is not None and self.mask is not None:
            s.mask[:, t] = self.mask

    def receive(self, t: int) -> Step:
        """Wait for the environments, store what step t came to, and stand at what they show."""
        trainer, s = self.trainer, self.segments
        step, last = self.env.step_wait(), t == trainer.config.horizon - 1
        s.record(t, self._sample, self._value, step, trainer._reward(step, self.rows), self.begins)
        if last or (self.env.may_truncate and self.env.any_truncated is not False):
            if self.run_next_value.enabled:
                self.next_obs.copy_(step.next_obs)
                self.run_next_value()
                s.next_value[:, t] = self.next_value
            else:
                trainer._next_value(step, self.state, s.next_value[:, t], last)
        self.obs.copy_(step.obs)
        if self.mask is not None and step.action_mask is not None:
            self.mask.copy_(step.action_mask)
        return step

    def _act(self) -> None:
        """From `obs` and `state` to the sample and V(obs), in place where a graph goes on from it."""
        out, self._sample = self.trainer._act(self.obs, self.state, self._reset, self.mask, out_state=self.state)
        self._value = out.value

    def _next_value(self) -> None:
        """V(next_obs), after `_act` has read what came before it."""
        self.next_value.copy_(self.trainer._value(self.next_obs, self.state))
