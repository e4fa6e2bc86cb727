"""Prioritized replay for Stable-Baselines3: a `replay_buffer_class`, and a DQN that uses its weights.

```python
from sharpwave.replay.adapters.sb3 import PrioritizedDQN

model = PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_kwargs=dict(alpha=0.6, beta=(0.4, 1.0, 1_000_000)))
model.learn(50_000)
```

What the library lacks for prioritized replay: its algorithms neither weight the loss nor report TD errors, and no hook
lets a buffer do so. So `PrioritizedReplayBuffer` alone, given to any off-policy algorithm, draws by priorities that
stay what they were at first, which is a uniform draw; `PrioritizedDQN` overrides `train` with what is missing. It also
takes `n_steps`, on any version. The library's own memory-saving layout is for its own buffer class: asking for it here
raises; with `n_steps` above 1 every observation is stored once anyway.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from sharpwave.replay.checks import Beta
from sharpwave.replay.nest import Batch
from sharpwave.replay.prioritized import PrioritizedReplay

try:
    from gymnasium import spaces
    from stable_baselines3 import DQN
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ImportError as error:
    raise ImportError(
        "this adapter needs Stable-Baselines3: pip install 'sharpwave[sb3]' (or stable-baselines3>=2.4)"
    ) from error


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `replay_buffer_class` that draws by priority.

    Args:
        buffer_size, observation_space, action_space, device, n_envs: as Stable-Baselines3 gives them. Any observation
            space it supports, dictionaries included; any number of environments.
        optimize_memory_usage: must stay False.
        handle_timeout_termination: whether a time limit is bootstrapped from instead of taken as terminal.
        n_steps, gamma: rewards summed before bootstrapping, with this discount. Above 1, steps are kept in time order,
            and the newest is only drawn when the next one has come. Where the library began an episode without an end,
            as every `learn` does, the step before counts as truncated. Normalised rewards are clipped as a sum.
        alpha, beta, eps, seed, priority_device: of the `PrioritizedReplay` behind it, which is `self.replay`;
            transitions and priorities lie on `priority_device`.

    `last_batch` is what the latest `sample` drew, for `update_priorities`. Pickling keeps all of it.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-6,
        seed: int = 0,
        priority_device: torch.device | str = "cpu",
    ):
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage must be False: Stable-Baselines3 resets environments without an end"
            )
        # Not ReplayBuffer's own: it would allocate a second copy of everything.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.handle_timeout_termination = handle_timeout_termination
        self.optimize_memory_usage = False
        self.n_steps, self.gamma = n_steps, gamma
        order: dict[str, Any] = dict(n_step=n_steps, gamma=gamma, num_envs=n_envs) if n_steps > 1 else {}
        self.replay = PrioritizedReplay(
            buffer_size, priority_device, alpha=alpha, beta=beta, eps=eps, seed=seed, weight_norm="batch", **order
        )
        self.last_batch: Batch | None = None
        self._added = 0
        self._newest: dict[str, Any] | None = None

    def add(self, obs: Any, next_obs: Any, action: np.ndarray, reward: Any, done: Any, infos: list[dict]) -> None:
        timeout = np.array([info.get("TimeLimit.truncated", False) for info in infos], bool)
        if not self.handle_timeout_termination:
            timeout[:] = False
        done = np.asarray(done, bool)
        step = dict(
            obs=self._shaped(obs),
            next_obs=self._shaped(next_obs),
            action=action.reshape(self.n_envs, self.action_dim).astype(self._maybe_cast_dtype(self.action_space.dtype)),
            reward=np.asarray(reward, np.float32),
            terminated=done & ~timeout,
        )
        self._added += self.n_envs
        if self.n_steps == 1:
            self.replay.add(step)
            return
        newest, self._newest = self._newest, step | {"truncated": done & timeout}
        if newest is not None:
            goes_on = _same(newest["next_obs"], step["obs"], self.n_envs)
            newest["truncated"] |= ~(goes_on | newest["terminated"])
            self.replay.add(newest)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """A batch in Stable-Baselines3's own form; its weights and indices are in `last_batch`."""
        batch = self.last_batch = self.replay.sample(batch_size)
        kind = DictReplayBufferSamples if isinstance(batch.obs, Batch) else ReplayBufferSamples
        return kind(
            observations=self._normalized(batch.obs, env),
            actions=batch.action.to(self.device),
            next_observations=self._normalized(batch.next_obs, env),
            dones=batch.terminated.float()[:, None].to(self.device),
            rewards=self.to_torch(self._normalize_reward(batch.reward[:, None].cpu().numpy(), env)),
            **self._discounts(batch, kind),
        )

    def _discounts(self, batch: Batch, kind: Any) -> dict[str, torch.Tensor]:
        """gamma^m for the library's own algorithms, where its version has a place for it."""
        if self.n_steps == 1 or "discounts" not in kind._fields:
            return {}
        steps = torch.where(batch.terminated, self.gamma, batch.discount)  # it multiplies by 1 - dones
        return {"discounts": steps[:, None].to(self.device)}

    @property
    def weights(self) -> torch.Tensor:
        """Importance weights of the latest sample, (B,) on the algorithm's device."""
        if self.last_batch is None:
            raise ValueError("weights belong to a draw: call sample() first")
        return self.last_batch.weights.to(self.device)

    def update_priorities(self, td_error: torch.Tensor) -> None:
        """Priorities of the latest sample, from its signed TD errors, (B,)."""
        if self.last_batch is None:
            raise ValueError("priorities belong to a draw: call sample() first")
        batch = self.last_batch
        td_error = td_error.detach().reshape(-1).to(self.replay.device)
        self.replay.update_priorities(batch.indices, td_error, batch.generations)

    def size(self) -> int:
        return min(self._added, self.buffer_size)

    def reset(self) -> None:
        self.replay.clear()
        self._added, self.last_batch, self._newest = 0, None, None

    def __getstate__(self) -> dict[str, Any]:
        replay = self.replay
        state = {k: x for k, x in self.__dict__.items() if k != "replay"} | {"last_batch": None}
        return state | {
            "replay_options": replay._options,
            "replay_device": replay.device,
            "replay_state": replay.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {k: v for k, v in state.items() if not k.startswith("replay_")}
        self.replay = PrioritizedReplay(**state["replay_options"], device=state["replay_device"])
        self.replay.load_state_dict(state["replay_state"])

    def _shaped(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            assert isinstance(self.observation_space, spaces.Dict)
            shapes: Any = self.obs_shape
            return {
                k: np.asarray(x).reshape(self.n_envs, *shapes[k]).astype(self.observation_space[k].dtype)
                for k, x in obs.items()
            }
        return np.asarray(obs).reshape(self.n_envs, *self.obs_shape).astype(self.observation_space.dtype)

    def _normalized(self, obs: Any, env: Any) -> Any:
        if env is not None:
            obs = {k: x.cpu().numpy() for k, x in obs.items()} if isinstance(obs, Batch) else obs.cpu().numpy()
            obs = self._normalize_obs(obs, env)
        if isinstance(obs, dict):
            return {k: self._observation(x) for k, x in obs.items()}
        return self._observation(obs)

    def _observation(self, x: Any) -> torch.Tensor:
        return torch.as_tensor(x).to(self.device)


def _same(a: Any, b: Any, envs: int) -> np.ndarray:
    """Which environments' observations are equal, (envs,); NaN equals NaN."""
    if isinstance(a, dict):
        return np.logical_and.reduce([_same(a[k], b[k], envs) for k in a])
    return ((a == b) | (np.isnan(a) & np.isnan(b))).reshape(envs, -1).all(1)


class PrioritizedDQN(DQN):
    """DQN on prioritized replay: Stable-Baselines3's own, but for the loss's weights and the priorities written back.

    Takes DQN's arguments, `n_steps` on every version; `replay_buffer_kwargs` are those of `PrioritizedReplayBuffer`.
    """

    _summed = 1

    def __init__(self, policy: Any, env: Any, *args: Any, **kwargs: Any):
        kwargs.setdefault("replay_buffer_class", PrioritizedReplayBuffer)
        if not issubclass(kwargs["replay_buffer_class"], PrioritizedReplayBuffer):
            raise ValueError("replay_buffer_class must be a PrioritizedReplayBuffer (leave it out)")
        # Its own would go to its own buffer class.
        self._summed = kwargs.pop("n_steps", 1)
        super().__init__(policy, env, *args, **kwargs)

    def _setup_model(self) -> None:
        if self._summed > 1:
            self.replay_buffer_kwargs = self.replay_buffer_kwargs | dict(n_steps=self._summed, gamma=self.gamma)
        super()._setup_model()

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        buffer = self.replay_buffer
        assert isinstance(buffer, PrioritizedReplayBuffer)
        losses = []
        for _ in range(gradient_steps):
            batch = buffer.sample(batch_size, env=self._vec_normalize_env)
            with torch.no_grad():
                next_q = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
                discount = (1 - batch.dones) * self.gamma
                if buffer.n_steps > 1 and buffer.last_batch is not None:
                    discount = buffer.last_batch.discount[:, None].to(self.device)
                target = batch.rewards + discount * next_q
            q = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = (buffer.weights[:, None] * F.smooth_l1_loss(q, target, reduction="none")).mean()
            losses.append(loss.detach())
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priorities(target - q)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", torch.stack(losses).mean().item())
