"""Several vectors as one, so that one of them steps while a policy acts for another."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpwave.envs.base import Reset, Step, VectorEnv


class Grouped(VectorEnv):
    """G vectors of n environments as one of N = G n; environment i is number i mod n of group i // n.

    A rollout that takes the groups by turns keeps both sides busy: while the environments of one step, the policy acts
    for another.

        for group in env.groups:
            group.step_async(first action of the group)
        for _ in range(steps):
            for group in env.groups:
                step = group.step_wait()
                group.step_async(action at step.obs)

    As a whole it is used like any other vector. Transitions are those of the G vectors on their own, group g seeded
    with the g-th 64-bit word of NumPy's SeedSequence of the seed, without its lowest bit. Faults name the environment
    by its number among all N. Episodes are saved, and go on exactly where those of every group do.

    Args:
        groups: at least two vectors that nobody else steps, made alike; closed with this object.

    Raises:
        ValueError: less than two, vectors that are not alike, or such as leave nothing to run beside the policy,
            because the device steps them.

    Source: the double-buffered sampling of Petrenko et al. 2020 (Sample Factory, arXiv 2006.11751).
    """

    def __init__(self, groups: Sequence[VectorEnv]):
        if len(groups) < 2:
            raise ValueError(f"groups must hold at least two vectors; got {len(groups)}")
        first = groups[0]
        for group in groups:
            if type(group)._step_async is VectorEnv._step_async:
                raise ValueError(
                    f"{group.name} cannot step beside the policy, for {type(group).__name__} has no halves of a step: "
                    "use it without groups"
                )
            if _kind(group) != _kind(first):
                raise ValueError(f"groups must be alike; got {first} and {group}")
        super().__init__(first.name, len(groups) * first.num_envs, first.device, first.observation, first.action)
        self._groups = tuple(groups)
        self.may_skip, self.may_truncate = first.may_skip, first.may_truncate
        for g, group in enumerate(groups):
            group.first_index = g * first.num_envs

    @property
    def groups(self) -> tuple[VectorEnv, ...]:
        return self._groups

    @property
    def inexact_because(self) -> str | None:
        return self._groups[0].inexact_because

    def _reset(self, seed: int) -> Reset:
        seeds = np.random.SeedSequence(seed).generate_state(len(self._groups), np.uint64) >> np.uint64(1)
        return _joined([group.reset(int(word)) for group, word in zip(self._groups, seeds, strict=True)])

    def _step(self, action: Tensor) -> Step:
        self._step_async(action)
        return self._step_wait()

    def _step_async(self, action: Tensor) -> None:
        for group, part in zip(self._groups, action.chunk(len(self._groups)), strict=True):
            group.step_async(part)

    def _step_wait(self) -> Step:
        steps = [group.step_wait() for group in self._groups]
        cut = [group.any_truncated for group in self._groups]
        self.any_truncated = True if True in cut else None if None in cut else False
        columns: list[Any] = [_cat(column) for column in zip(*steps, strict=True)]
        return Step(*columns)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"groups": len(self._groups)}
        for g, group in enumerate(self._groups):
            state |= {f"group {g} {key}": value for key, value in group.state_dict().items()}
        # Whoever steps the groups by turns steps this object never.
        return state | {"count": self._groups[0]._count}

    def _load(self, state: Mapping[str, Any]) -> Reset:
        starts = []
        for g, group in enumerate(self._groups):
            prefix = f"group {g} "
            parts = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            starts.append(group.load_state_dict(parts))
        # Whoever is told that episodes begin takes it that all do.
        return _joined(starts) if all(start.continued for start in starts) else self._begin_anew()

    def _close(self) -> None:
        for group in self._groups:
            group.close()


def _kind(env: VectorEnv) -> tuple:
    return env.name, env.num_envs, env.device, env.observation, env.action, env.may_skip, env.may_truncate


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _joined(starts: Sequence[Reset]) -> Reset:
    obs = torch.cat([start.obs for start in starts])
    return Reset(obs, _cat([start.action_mask for start in starts]), all(start.continued for start in starts))
