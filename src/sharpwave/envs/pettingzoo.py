"""PettingZoo's parallel environments, every agent an environment of one vector."""

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from sharpwave.envs._spaces import action_of, flattening, layout, observation_of, returned
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
    the copy begins anew, its rows are not `valid`: they repeat its last observation, and what an environment that keeps
    the agent returns for it is not read. An agent that leaves without an end is a fault.

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
        self.layout = layout(space["observation"] if self._masked else space)  # ty: ignore[not-subscriptable]
        ours, self._to_gymnasium = action_of(action, self._masked)
        super().__init__(name, num_envs, device, observation_of(flat), ours)
        self.copies = [first, *(build() for _ in range(num_envs // count - 1))]
        self._check = check_finite
        self._transfer = Transfer(self.device)
        self._obs = np.zeros((num_envs, *self.observation.shape), dtype=flat.dtype)
        self._over = np.zeros(num_envs, dtype=bool)  # agents whose episode has ended before their copy's
        width = sum(ours.nvec) if isinstance(ours, Discrete) else 0
        self._mask = np.ones((num_envs, width), dtype=bool) if self._masked else None

    def _reset(self, seed: int) -> Reset:
        for copy, copy_seed in enumerate(environment_seeds(seed, len(self.copies))):
            self._begin_copy(copy, copy_seed)
        return Reset(*self._transfer.to_device(self._obs.copy(), None if self._mask is None else self._mask.copy()))

    def _step(self, action: Tensor) -> Step:
        self._step_async(action)
        return self._step_wait()

    def _step_async(self, action: Tensor) -> None:
        self._fetched = self._transfer.fetch(action)

    def _step_wait(self) -> Step:
        actions = self._to_gymnasium(self._fetched())
        n = self.num_envs
        over = []  # copies to begin anew
        reward = np.zeros(n, dtype=np.float32)
        terminated, truncated, valid = (np.zeros(n, dtype=bool) for _ in range(3))
        for m, env in enumerate(self.copies):
            acting = self._present(m)
            try:
                found = env.step({agent: actions[row] for agent, row in acting.items()})
            except Exception as error:
                raise self._raised(error, m) from error
            present = self._present(m)
            for agent, row in (acting | present).items():
                if self._over[row]:
                    continue
                with self._reading(row):
                    if agent in acting:
                        earned, *ends = (part[agent] for part in found[1:4])
                        reward[row] = returned("reward", earned, (), np.float32)
                        terminated[row], truncated[row] = (returned("an end", end, (), bool) for end in ends)
                    if agent in found[0] or not terminated[row]:  # nothing is read of what follows on a terminal state
                        self._take(row, found[0][agent])
                if agent not in acting:
                    continue  # it joins, and acts from the next step on
                valid[row] = True
                self._over[row] = terminated[row] or truncated[row]
                if agent not in present and not self._over[row]:
                    raise self._odd(row, "left `agents` neither terminated nor truncated")
            if all(self._over[row] for row in present.values()):
                over.append(m)
        if self._check and not np.isfinite(reward).all():
            raise self._not_finite("reward", int(np.isfinite(reward).argmin()))
        next_obs = obs = self._obs.copy()
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
        first = copy * len(self.agents)
        self._over[first : first + len(self.agents)] = False
        present = self._present(copy)
        if not present:
            raise self._odd(first, "and all others are missing from `agents` as an episode begins")
        for agent, row in present.items():
            with self._reading(row):
                self._take(row, obs[agent])

    def _present(self, copy: int) -> dict[Any, int]:
        """The agents that a copy has now, and their rows."""
        present = self.copies[copy].agents
        return {agent: row for row, agent in enumerate(self.agents, copy * len(self.agents)) if agent in present}

    def _take(self, row: int, given: Any) -> None:
        """Write an agent's observation into its row."""
        if self._mask is not None:
            self._mask[row] = returned("action_mask", given["action_mask"], self._mask.shape[1:], bool)
            given = given["observation"]
        array = np.asarray(given if self._flatten is None else self._flatten(given))
        if array.shape != self._obs.shape[1:] or not np.can_cast(array.dtype, self._obs.dtype, "same_kind"):
            raise ValueError(
                f"an observation must be {self._obs.dtype} of shape {self._obs.shape[1:]}, as the space says; got "
                f"{array.dtype} of shape {array.shape}"
            )
        self._obs[row] = array
        if self._check and self.observation.dtype.is_floating_point and not np.isfinite(self._obs[row]).all():
            raise self._not_finite("observation", row)

    @contextmanager
    def _reading(self, row: int) -> Generator[None]:
        """What is wrong with something returned for one agent is a fault of that agent."""
        try:
            yield
        except EnvFault:
            raise
        except Exception as error:
            reason = f"no entry {error}" if isinstance(error, KeyError) else error
            raise self._odd(row, f"returned what cannot be read ({reason})") from error

    def _not_finite(self, what: str, row: int) -> EnvFault:
        return self._odd(row, f"returned a NaN or infinite {what}")

    def _raised(self, error: Exception, copy: int) -> EnvFault:
        row = copy * len(self.agents)
        return self._fault(row, f"(copy {copy}) raised {type(error).__name__}: {error}")

    def _odd(self, row: int, what: str) -> EnvFault:
        return self._fault(row, f"({self._who(row)}) {what}")

    def _who(self, row: int) -> str:
        copy, agent = divmod(row, len(self.agents))
        return f"agent {self.agents[agent]!r} of copy {copy}"

    def _close(self) -> None:
        for env in self.copies:
            env.close()
