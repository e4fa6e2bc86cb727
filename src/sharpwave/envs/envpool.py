"""EnvPool's environments, stepped by its own threads in C++."""

import difflib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpwave.envs._spaces import action_of, flattening, layout, observation_of
from sharpwave.envs._transfer import Transfer
from sharpwave.envs.base import EnvFault, Reset, Step, VectorEnv
from sharpwave.envs.extras import needs

with needs("envpool"):
    import envpool


def make_envpool(
    name: str, num_envs: int, device: torch.device | str = "cpu", *, check_finite: bool = True, **options: Any
) -> "EnvPoolVector":
    """`num_envs` copies of an EnvPool task, e.g. "envpool/CartPole-v1" or "envpool/Pong-v5".

    Args:
        name: "envpool/" and a name in `envpool.list_all_envs()`.
        num_envs: N.
        device: where tensors go.
        check_finite: raise where a reward or a floating-point observation is NaN or infinite.
        options: of `envpool.make`, e.g. num_threads=4, max_episode_steps=200, and the task's own.

    Raises:
        ImportError: envpool is not installed. ValueError: unknown task, or an option it does not take.
    """
    task = name.partition("/")[2]
    known = envpool.list_all_envs()
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3)
        nearest = f"did you mean {' or '.join(repr('envpool/' + one) for one in near)}? " if near else ""
        raise ValueError(f"unknown environment {name!r}: {nearest}envpool.list_all_envs() lists all {len(known)}")
    return EnvPoolVector(task, num_envs, device, name=name, check_finite=check_finite, **options)


class EnvPoolVector(VectorEnv):
    """An EnvPool in which ended episodes are begun anew within the step, so that every step is a transition.

    Spaces are read as `GymnasiumVector` reads them; rewards become float32. EnvPool takes its seed when it is made, so
    that `reset` makes a new one. Episodes are not saved: after loading new ones begin.

    Args:
        task: EnvPool's name.
        num_envs: N; all are stepped together (EnvPool's synchronous mode).
        device: where tensors go.
        name, check_finite, options: see `make_envpool`.
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        name: str | None = None,
        check_finite: bool = True,
        **options: Any,
    ):
        self._task, self._options = task, options
        self.pool: Any = None
        try:
            self._make(num_envs, 0)
        except (TypeError, ValueError, KeyError, AssertionError) as error:
            raise ValueError(f"{name or task} cannot be made with options {options}: {error}") from error
        flat, self._flatten = flattening(self.pool.observation_space)
        self.layout = layout(self.pool.observation_space)
        action, self._to_gymnasium = action_of(self.pool.action_space, masked=False)
        super().__init__(name or task, num_envs, device, observation_of(flat), action)
        self._check = check_finite
        self._transfer = Transfer(self.device)

    def _make(self, num_envs: int, seed: int) -> None:
        self._close()
        self.pool = envpool.make(self._task, env_type="gymnasium", num_envs=num_envs, seed=seed, **self._options)

    def _reset(self, seed: int) -> Reset:
        self._make(self.num_envs, int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1)
        obs, _ = self.pool.reset()
        return Reset(*self._transfer.to_device(self._observed(obs)))

    def _step(self, action: Tensor) -> Step:
        self._step_async(action)
        return self._step_wait()

    def _step_async(self, action: Tensor) -> None:
        try:
            self.pool.send(self._to_gymnasium(self._transfer.fetch(action)()))
        except Exception as error:
            raise self._raised(error) from error

    def _step_wait(self) -> Step:
        try:
            obs, reward, terminated, truncated, _ = self.pool.recv()
            final = obs = self._observed(obs)
            ended = np.flatnonzero(terminated | truncated)
            if len(ended):
                # Told to, EnvPool begins an episode at once; left alone it would at the next step, ignoring its action.
                obs = final.copy()
                obs[ended] = self._observed(self.pool.reset(ended.astype(np.int32))[0])
        except EnvFault:
            raise
        except Exception as error:
            raise self._raised(error) from error
        if self._check and not np.isfinite(reward).all():
            raise self._fault(int(np.isfinite(reward).argmin()), "returned a NaN or infinite reward")
        self.any_truncated = bool(np.any(truncated))
        flags = (np.array(x, dtype=bool) for x in (terminated, truncated))
        return Step(*self._transfer.to_device(obs, np.array(reward, dtype=np.float32), *flags, final))

    def _observed(self, obs: Any) -> np.ndarray:
        if self._flatten is not None:
            rows = len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)
            picked = [{k: v[i] for k, v in obs.items()} if isinstance(obs, dict) else obs[i] for i in range(rows)]
            obs = np.stack([self._flatten(row) for row in picked])
        array = np.array(obs)
        if self._check and array.dtype.kind == "f" and not np.isfinite(array).all():
            index = int(np.isfinite(array).reshape(len(array), -1).all(1).argmin())
            raise self._fault(index, "returned a NaN or infinite observation")
        return array

    def _raised(self, error: Exception) -> EnvFault:
        return self._fault(None, f"raised {type(error).__name__}: {error}")

    def _close(self) -> None:
        if self.pool is not None:
            self.pool.close()
