"""PettingZoo's parallel environments, every agent an environment of one vector."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from sharpwave.envs._spaces import action_of, flattening, observation_of
from sharpwave.envs._transfer import Transfer
from sharpwave.envs.base import Discrete, EnvFault, Reset, Step, VectorEnv
from sharpwave.envs.extras import needs
from sharpwave.envs.gymnasium import environment_seeds

with needs("pettingzoo"):
    from pettingzoo import ParallelEnv


def make_pettingzoo(
    name: str, num_envs: int, device: torch.device | str = "cpu", *, check_finite: bool = True, **options: Any
) -> "PettingZooVector":
    """Copies of a parallel environment with `num_envs` agents in all.

    Args:
        name: the module that has `parallel_env`, e.g. "pettingzoo/sisl/pursuit_v5" or "mpe2/simple_spread_v3".
        num_envs: N, a multiple of the number of agents of one copy.
        device: where tensors go.
        check_finite: see `PettingZooVector`.
        options: go to `parallel_env`.

    Raises:
        ImportError: what the environment needs is not installed.
        ValueError: no such module, N does not fit, or the environment does not take the options.
    """
    module = name.replace("/", ".")
    package, _, rest = module.partition(".")
    try:
        build = importlib.import_module(module).parallel_env
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module.startswith(missing) and missing != package:
            raise ValueError(f"unknown environment {name!r}: there is no module {module}") from error
        # Each family of PettingZoo's needs libraries of its own.
        needed = package if missing == package else f"{package}[{rest.partition('.')[0]}]"
        raise ImportError(f"{error}: pip install '{needed}'") from error
    try:
        return PettingZooVector(lambda: build(**options), num_envs, device, name=name, check_finite=check_finite)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"{name} does not take these options: {error}") from error


class PettingZooVector(VectorEnv):
    """Copies of a `pettingzoo.ParallelEnv`; row m A + a of each tensor is agent a of A of copy m.

    Agents share one policy, so that their spaces must be equal; what tells them apart belongs into the observation. An
    agent's episode ends when the environment says so of that agent. From then until all agents of its copy are done and
    the copy begins anew, its rows are not `valid`: they repeat its last observation and take no action.

    Spaces are read as `GymnasiumVector` reads them. An observation that is a Dict with the keys "observation" and
    "action_mask" gives the masks of discrete actions.

    Args:
        build: makes one copy.
        num_envs: N = copies x agents.
        device: where tensors go; environments run on the host, one after the other.
        name: for messages.
        check_finite: raise where a reward or a floating-point observation is NaN or infinite.

    Copy m is seeded with `environment_seeds(seed, M)[m]`. Episodes are not saved: after loading new ones begin.
    """

    may_skip = True

    def __init__(
        self,
        build: Callable[[], ParallelEnv],
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        name: str | None = None,
        check_finite: bool = True,
    ):
        first = build()
        self.agents: Sequence[Any] = tuple(first.possible_agents)
        name = name or str(first)
        count = len(self.agents)
        if num_envs % count:
            raise ValueError(
                f"{name} has {count} agents, so that num_envs must be a multiple of {count}; got {num_envs}: use "
                f"{max(1, num_envs // count) * count}"
            )
        space, action = first.observation_space(self.agents[0]), first.action_space(self.agents[0])
        for agent in self.agents:
            if first.observation_space(agent) != space or first.action_space(agent) != action:
                raise ValueError(
                    f"{name}: agents must have the same spaces; {agent!r} has {first.observation_space(agent)} and "
                    f"{first.action_space(agent)}, {self.agents[0]!r} has {space} and {action}"
                )
        keys = set(space.spaces) if isinstance(space, spaces.Dict) else set()
        self._masked = keys == {"observation", "action_mask"}
        flat, self._flatten = flattening(space["observation"] if self._masked else space)  # ty: ignore[not-subscriptable]
        ours, self._to_gymnasium = action_of(action, self._masked)
        super().__init__(name, num_envs, device, observation_of(flat), ours)
        self.copies = [first, *(build() for _ in range(num_envs // count - 1))]
        self._check = check_finite
        self._transfer = Transfer(self.device)
        self._obs = np.zeros((num_envs, *self.observation.shape), dtype=flat.dtype)
        width = sum(ours.nvec) if isinstance(ours, Discrete) else 0
        self._mask = np.ones((num_envs, width), dtype=bool) if self._masked else None

    def _reset(self, seed: int) -> Reset:
        for copy, copy_seed in enumerate(environment_seeds(seed, len(self.copies))):
            self._begin_copy(copy, copy_seed)
        return Reset(*self._transfer.to_device(self._obs.copy(), None if self._mask is None else self._mask.copy()))

    def _step(self, action: Tensor) -> Step:
        actions = self._to_gymnasium(self._transfer.to_host(action))
        n, count = self.num_envs, len(self.agents)
        reward = np.zeros(n, dtype=np.float32)
        terminated, truncated, valid = (np.zeros(n, dtype=bool) for _ in range(3))
        for m, env in enumerate(self.copies):
            acting = {agent: m * count + i for i, agent in enumerate(self.agents) if agent in env.agents}
            try:
                found = env.step({agent: actions[row] for agent, row in acting.items()})
            except Exception as error:
                raise self._raised(error, m) from error
            self._take(m, found[0])
            for agent, row in acting.items():
                valid[row] = True
                reward[row], terminated[row], truncated[row] = (part[agent] for part in found[1:4])
        if self._check and not np.isfinite(reward).all():
            raise self._not_finite("reward", int(np.isfinite(reward).argmin()))
        next_obs = obs = self._obs.copy()
        over = [m for m, env in enumerate(self.copies) if not env.agents]
        if over:
            for m in over:
                self._begin_copy(m, None)
            obs = self._obs.copy()
        self.any_truncated = bool(truncated.any())
        mask = None if self._mask is None else self._mask.copy()
        return Step(*self._transfer.to_device(obs, reward, terminated, truncated, next_obs, valid, mask))

    def _begin_copy(self, copy: int, seed: int | None) -> None:
        try:
            obs, _ = self.copies[copy].reset(seed=seed)
        except Exception as error:
            raise self._raised(error, copy) from error
        self._take(copy, obs)

    def _take(self, copy: int, observations: dict[Any, Any]) -> None:
        """Write the observations of one copy's agents into their rows."""
        for i, agent in enumerate(self.agents):
            if agent not in observations:
                continue
            row, given = copy * len(self.agents) + i, observations[agent]
            if self._mask is not None:
                self._mask[row] = given["action_mask"]
                given = given["observation"]
            self._obs[row] = given if self._flatten is None else self._flatten(given)
            if self._check and self.observation.dtype.is_floating_point and not np.isfinite(self._obs[row]).all():
                raise self._not_finite("observation", row)

    def _not_finite(self, what: str, row: int) -> EnvFault:
        return EnvFault(self.name, row, self._count, f"({self._who(row)}) returned a NaN or infinite {what}")

    def _raised(self, error: Exception, copy: int) -> EnvFault:
        row = copy * len(self.agents)
        return EnvFault(self.name, row, self._count, f"(copy {copy}) raised {type(error).__name__}: {error}")

    def _who(self, row: int) -> str:
        copy, agent = divmod(row, len(self.agents))
        return f"agent {self.agents[agent]!r} of copy {copy}"

    def _close(self) -> None:
        for env in self.copies:
            env.close()
