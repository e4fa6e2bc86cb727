"""The contract between environments and trainers: N environments behind one `step`, tensors in and out.

Every environment is a vector of `num_envs` copies with batched tensors on one device. A copy whose episode ends begins
the next one by itself, and the step that ended it returns the true final observation beside the next episode's first.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sharpwave.ops.gather import gather_rows


@dataclass(frozen=True)
class Discrete:
    """One integer action for each head; head i takes values in [0, nvec[i]).

    Args:
        nvec: number of choices of each head; one entry is a plain discrete action.
        masked: results carry `action_mask`, (N, sum(nvec)) bool, true where a choice is legal, heads side by side.

    Raises:
        ValueError: no head, or a head without a choice.
    """

    nvec: tuple[int, ...]
    masked: bool = False

    def __post_init__(self):
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"nvec must hold at least one head of at least one choice; got {self.nvec}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one environment's action: () for one head, (heads,) for several."""
        return () if len(self.nvec) == 1 else (len(self.nvec),)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64


@dataclass(frozen=True)
class Continuous:
    """A vector of `dim` real numbers. Policies act in unbounded space; the environment clips to [low, high].

    Args:
        dim: at least 1.
        low, high: `dim` bounds each, infinite where there is none.

    Raises:
        ValueError: lengths differ from `dim`, or a lower bound is above its upper bound.
    """

    dim: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self):
        if self.dim < 1 or len(self.low) != self.dim or len(self.high) != self.dim:
            raise ValueError(
                f"low and high must hold dim = {self.dim} >= 1 bounds; got {len(self.low)}, {len(self.high)}"
            )
        if not all(low <= high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low must not be above high in any dimension; got low {self.low}, high {self.high}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


@dataclass(frozen=True)
class Observation:
    """Shape and dtype of one environment's observation, the environment's own: uint8 stays uint8."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of entries, i.e. the width of the flattened observation."""
        return math.prod(self.shape)


class Reset(NamedTuple):
    """Where the environments stand after `reset` or `load_state_dict`."""

    obs: Tensor
    """(N, *observation.shape): what the policy acts on next."""
    action_mask: Tensor | None = None
    """(N, sum(nvec)) bool: the legal choices at `obs`; None unless `action.masked`."""
    continued: bool = False
    """True after `load_state_dict` where the saved episodes go on; false where every episode begins at `obs`."""


class Step(NamedTuple):
    """What one step returned. No later step writes into these tensors (a replayed CUDA graph does: it owns them)."""

    obs: Tensor
    """(N, *observation.shape): what the policy acts on next; after an end, the first one of the next episode."""
    reward: Tensor
    """(N,) float32: what this action earned."""
    terminated: Tensor
    """(N,) bool: the episode ended in a terminal state, whose value is 0."""
    truncated: Tensor
    """(N,) bool: the episode was cut off, and its value goes on at `next_obs`. Both may be true."""
    next_obs: Tensor
    """(N, *observation.shape): this transition's true next observation, an ended episode's last. It may be `obs`
    itself where no episode ended, so copy before you write into either."""
    valid: Tensor | None = None
    """(N,) bool: false where no transition took place, for the environment only began its next episode and ignored the
    action; leave these out of training. Reward is 0 and no flag is set there. None: all are valid."""
    action_mask: Tensor | None = None
    """(N, sum(nvec)) bool: the legal choices at `obs`; None unless `action.masked`."""

    @property
    def begins(self) -> Tensor:
        """(N,) bool: zero the recurrent state here before it reads `obs`, for it must not cross into another episode.

        True where this step ended an episode, and also where it was not valid: environments that begin their next
        episode one step late show the final observation once more, as `obs`, before the first one.
        """
        ended = self.terminated | self.truncated
        return ended if self.valid is None else ended | ~self.valid


class EnvFault(RuntimeError):
    """An environment raised, or returned NaN, infinity or what has another shape or kind than it says.

    Attributes:
        index: which of the N environments, or None where that cannot be told.
        step: steps taken since `reset`, this one included; 0 for `reset` itself.
    """

    def __init__(self, name: str, index: int | None, step: int, what: str):
        who = "one of its environments" if index is None else f"environment {index}"
        super().__init__(f"{name}: {who} {what} at {f'step {step}' if step else 'reset'}")
        self.index = index
        self.step = step


def write_observations(obs: Tensor, out: Tensor) -> Tensor:
    """Copy (N, *shape) into `out`, which `VectorEnv.step` describes, and return it."""
    if out.dtype == obs.dtype:
        return out.copy_(obs)
    return gather_rows(obs.reshape(obs.shape[0], -1), dtype=out.dtype, multiple=out.shape[1], out=out)


class VectorEnv(ABC):
    """N environments of one kind, stepped together.

    A subclass sets the attributes by `super().__init__` and writes `_reset`, `_step`, and, where its episodes can be
    saved, `inexact_because`, `_state` and `_load`; the public methods check what they are given and call these. One
    that can step beside its caller also writes `_step_async` and `_step_wait`.

    Attributes:
        name: what `sharpwave.envs.make` takes, for messages and logs.
        num_envs: N.
        device: where every tensor given and returned lives.
        observation, action: the spaces.
        capturable: `step` neither synchronises nor branches on values, so that it may be captured in a CUDA graph.
        may_skip: `Step.valid` is given at every step; otherwise it is always None.
        may_truncate: `Step.truncated` can be true; false saves a trainer the value of `next_obs`.
        any_truncated: whether the last step cut an episode off, where the host knows without waiting for the device;
            None where it does not.
        first_index: the number of its first environment: not 0 where it is a group of a larger vector.
        writes_rounded: `_step_into` itself takes rows of bfloat16 as `out`.
        generators: what `step` draws from, to be registered with a CUDA graph that captures it.
        layout: where the parts of a flattened Dict, Tuple or Discrete lie in an observation; empty for all others.
    """

    capturable: bool = False
    may_skip: bool = False
    may_truncate: bool = True
    any_truncated: bool | None = None
    first_index: int = 0
    writes_rounded: bool = False
    generators: tuple[torch.Generator, ...] = ()
    layout: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str,
        observation: Observation,
        action: Discrete | Continuous,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1; got {num_envs}")
        self.name = name
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.observation = observation
        self.action = action
        self._action_shape = torch.Size((num_envs, *action.shape))
        self._is_closed = False
        self._is_ready = False
        self._is_stepping = False
        self._seed = 0
        self._count = 0  # calls of step since reset

    def reset(self, seed: int) -> Reset:
        """Begin N new episodes. The same seed gives the same episodes for the same actions.

        Args:
            seed: in [0, 2^63). Every environment draws from a stream of its own, or its own part of one stream.

        Raises:
            ValueError: the seed is out of range.
            RuntimeError: the environment was closed.
            EnvFault: an environment failed.
        """
        self._require_settled("reset")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63); got {seed}")
        self._seed, self._count = seed, 0
        result = self._reset(seed)
        self._is_ready = True
        return result

    def step(self, action: Tensor, out: Tensor | None = None, *, need_next_obs: bool = True) -> Step:
        """Take one action in each environment.

        Args:
            action: (N,) int64 for one discrete head, (N, heads) int64 for several, (N, dim) float32 for continuous
                actions, on any device the environment can read (best: its own). Discrete values must be in range;
                continuous ones are clipped to the bounds.
            out: (N, *observation.shape) on the environment's device, with any strides: `Step.obs` is written there and
                is `out`, so that a rollout need not copy what it observes. For float32 observations also (N, D)
                bfloat16, D >= observation.size, each row contiguous: they are flattened and rounded, with zeros beside.
            need_next_obs: false where the caller will not read `Step.next_obs`; with `out` it may then be anything.

        Raises:
            ValueError, TypeError: wrong shape or dtype.
            RuntimeError: before `reset`, or after `close`.
            EnvFault: an environment failed.
        """
        self._check_action(action, "step")
        rounded = False
        if out is not None:
            rounded = self._check_out(out)
        self._count += 1
        if out is None:
            return self._step(action)
        if rounded and not self.writes_rounded:
            return VectorEnv._step_into(self, action, out, need_next_obs)
        return self._step_into(action, out, need_next_obs)

    def step_async(self, action: Tensor) -> None:
        """Begin a step that `step_wait` ends: the same step as `step` takes, in two halves.

        In between, environments with processes or threads of their own step, while the caller does something else;
        with others the action is on its way from a GPU to the host. Nothing but `step_wait` and `close` may be called
        until then, and `action` not be written.

        Args and errors: as `step`.
        """
        self._check_action(action, "step_async")
        self._count += 1
        self._is_stepping = True
        self._step_async(action)

    def step_wait(self) -> Step:
        """What the step that `step_async` began has returned. Waits for it.

        Raises:
            RuntimeError: no step was begun, or the environment was closed.
            EnvFault: an environment failed.
        """
        self._require_open()
        if not self._is_stepping:
            raise RuntimeError(f"{self.name}: step_wait before step_async: no step has begun")
        self._is_stepping = False
        return self._step_wait()

    @property
    def groups(self) -> tuple["VectorEnv", ...]:
        """The vectors that may step by turns: those a `sharpwave.envs.Grouped` is made of, else this one alone."""
        return (self,)

    @property
    def inexact_because(self) -> str | None:
        """Why saved episodes cannot be continued, for the user to read; None where they can, bit for bit."""
        return f"{type(self).__name__} does not save its episodes"

    @property
    def exact_resume(self) -> bool:
        """Whether `load_state_dict` continues the episodes that `state_dict` saves now, bit for bit."""
        return self.inexact_because is None

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: a flat dict of tensors and JSON-able values.

        Each value is a tensor (a copy, on the CPU or the environment's device), to be saved e.g. as safetensors, or
        passes through JSON unchanged. Nothing in it needs unpickling.

        Raises:
            RuntimeError: before `reset`, or after `close`.
        """
        self._require_ready("state_dict")
        return {"name": self.name, "num_envs": self.num_envs, "seed": self._seed, "count": self._count, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Reset:
        """Go on from a state that `state_dict` gave, in an environment made with the same arguments.

        Where `exact_resume` held when the state was taken, the episodes continue bit for bit and the result says
        `continued`; elsewhere new episodes begin, from a seed that follows from the saved one. Tensors are copied.

        Raises:
            ValueError: the state is another environment's, or of another `num_envs` or number of groups.
            RuntimeError: after `close`.
        """
        self._require_settled("load_state_dict")
        for key, value in {"name": self.name, "num_envs": self.num_envs, "groups": len(self.groups)}.items():
            saved = state.get(key, 1 if key == "groups" else None)
            if saved != value:
                raise ValueError(
                    f"the state's {key} is {saved!r}, this environment's is {value!r}: make the environment "
                    "that it was saved from"
                )
        self._seed, self._count = state["seed"], state["count"]
        result = self._load(state)
        self._is_ready = True
        return result

    def close(self) -> None:
        """Release processes and windows. Closing twice is allowed; anything else afterwards raises RuntimeError."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @abstractmethod
    def _reset(self, seed: int) -> Reset: ...

    @abstractmethod
    def _step(self, action: Tensor) -> Step: ...

    def _step_async(self, action: Tensor) -> None:
        """The first half of `_step`. Overridden only where it leaves something to run beside the caller."""
        self._action = action

    def _step_wait(self) -> Step:
        return self._step(self._action)

    def _step_into(self, action: Tensor, out: Tensor, need_next_obs: bool) -> Step:
        """`_step` with the observation in `out`; for environments that can write there what they compute."""
        del need_next_obs
        step = self._step(action)
        return step._replace(obs=write_observations(step.obs, out))

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: Mapping[str, Any]) -> Reset:
        return self._begin_anew()

    def _begin_anew(self) -> Reset:
        """New episodes: neither the first ones once more nor, after another interruption, the same new ones."""
        words = np.random.SeedSequence((self._seed, self._count)).generate_state(1, np.uint64)
        return self.reset(int(words[0]) >> 1)

    def _close(self) -> None:
        return

    def _fault(self, index: int | None, what: str) -> EnvFault:
        """The error to raise where environment `index` of this vector, or one that cannot be told, did `what`."""
        return EnvFault(self.name, None if index is None else self.first_index + index, self._count, what)

    def _check_action(self, action: Tensor, what: str) -> None:
        if self._is_closed or not self._is_ready or self._is_stepping:
            self._require_ready(what)
        if action.shape != self._action_shape:
            raise ValueError(
                f"action must have shape {tuple(self._action_shape)} for {self.action}; got {tuple(action.shape)}"
            )
        if action.dtype != self.action.dtype:
            raise TypeError(f"action must be {self.action.dtype} for {self.action}; got {action.dtype}")

    def _check_out(self, out: Tensor) -> bool:
        """Whether it is for rounded rows."""
        shape = (self.num_envs, *self.observation.shape)
        if out.shape == shape and out.dtype == self.observation.dtype:
            return False
        if (self.observation.dtype, out.dtype) == (torch.float32, torch.bfloat16) and out.ndim == 2:
            if out.shape[0] == self.num_envs and out.shape[1] >= self.observation.size and out.stride(1) == 1:
                return True
        elif out.dtype != self.observation.dtype:
            raise TypeError(f"out must be {self.observation.dtype}, or flat rows of bfloat16; got {out.dtype}")
        raise ValueError(f"out must have shape {shape}; got {tuple(out.shape)}, strides {out.stride()}")

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.name} is closed: make a new one with sharpwave.envs.make")

    def _require_settled(self, what: str) -> None:
        self._require_open()
        if self._is_stepping:
            raise RuntimeError(f"{self.name}: {what} while a step has begun: call step_wait first")

    def _require_ready(self, what: str) -> None:
        self._require_settled(what)
        if not self._is_ready:
            raise RuntimeError(f"{self.name}: {what} before reset: call reset(seed) first")

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, num_envs={self.num_envs}, device={str(self.device)!r})"
