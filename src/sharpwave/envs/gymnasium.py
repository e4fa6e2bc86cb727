"""Gymnasium's vector environments behind this package's contract."""

from collections.abc import Callable, Mapping
from traceback import walk_tb
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate
from torch import Tensor

from sharpwave.envs import _snapshot
from sharpwave.envs._spaces import action_of, flattening, layout, observation_of, returned
from sharpwave.envs._time_limit import time_limit
from sharpwave.envs._transfer import Transfer
from sharpwave.envs.base import Discrete, EnvFault, Reset, Step, VectorEnv
from sharpwave.envs.registry import unknown


def make_gymnasium(
    name: str,
    num_envs: int,
    device: torch.device | str = "cpu",
    *,
    vectorization_mode: str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: tuple = (),
    vector_wrappers: tuple = (),
    action_mask: str | None = None,
    check_finite: bool = True,
    timeout: float | None = None,
    **options: Any,
) -> "GymnasiumVector":
    """`num_envs` copies of a registered Gymnasium environment, by `gymnasium.make_vec`.

    Args:
        name: a registered id, e.g. "CartPole-v1", or "module:id", where importing the module registers it.
        num_envs: N.
        device: where tensors go.
        vectorization_mode, vector_kwargs, wrappers: as `gymnasium.make_vec` takes them. By default an environment's own
            vector class runs where it has one and nothing is wrapped, else `SyncVectorEnv`; "async" uses processes.
        vector_wrappers: called one after the other on the vector environment made.
        action_mask, check_finite, timeout: see `GymnasiumVector`.
        options: go to the environment.

    Raises:
        ValueError: no such environment (with the nearest names), or it does not take the options.
        ImportError: what the environment needs is not installed.
    """
    vector_kwargs = dict(vector_kwargs or {})
    if vectorization_mode is None and (wrappers or vector_kwargs):
        vectorization_mode = "sync"
    registered = gymnasium.registry.get(name.partition(":")[2] or name)
    own_class = registered is not None and registered.vector_entry_point is not None and vectorization_mode is None
    if not own_class and vectorization_mode != "vector_entry_point":
        # Reset by us: under SAME_STEP a vector environment holds on to the environment's own final observation, and
        # one that writes all its observations into the same array has overwritten it by then.
        vector_kwargs.setdefault("autoreset_mode", AutoresetMode.DISABLED)
        vectorization_mode = vectorization_mode or "sync"
    try:
        vector = gymnasium.make_vec(
            name,
            num_envs,
            vectorization_mode=vectorization_mode,
            vector_kwargs=vector_kwargs,
            wrappers=wrappers,
            **options,
        )
    except gymnasium.error.UnregisteredEnv:
        raise ValueError(unknown(name)) from None
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{name}: {error}") from error
    except gymnasium.error.Error as error:
        raise ValueError(unknown(name) if registered is None else f"{name}: {error}") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"{name} does not take these options: {error}") from error
    for wrap in vector_wrappers:
        vector = wrap(vector)
    return GymnasiumVector(
        vector, device, name=name, action_mask=action_mask, check_finite=check_finite, timeout=timeout
    )


def make_single(
    name: str,
    make: Callable[..., gymnasium.Env],
    num_envs: int,
    device: torch.device | str = "cpu",
    *,
    vectorization_mode: str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: tuple = (),
    vector_wrappers: tuple = (),
    action_mask: str | None = None,
    check_finite: bool = True,
    timeout: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> "GymnasiumVector":
    """`num_envs` copies of what `make(**options)` makes, a class or function of your own; else as `make_gymnasium`.

    Raises:
        ValueError: another `vectorization_mode` than "sync" and "async".
    """
    modes: dict[str, Any] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
    if (vectorization_mode or "sync") not in modes:
        raise ValueError(f"{name}: vectorization_mode must be sync or async; got {vectorization_mode!r}")

    def one() -> gymnasium.Env:
        env = make(**(options or {}))
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"it made a {type(env).__name__}; a gymnasium.Env is expected")
        for wrap in wrappers:
            env = wrap(env)
        return env

    vector = modes[vectorization_mode or "sync"](
        [one] * num_envs, **{"autoreset_mode": AutoresetMode.DISABLED, **(vector_kwargs or {})}
    )
    for wrap in vector_wrappers:
        vector = wrap(vector)
    return GymnasiumVector(
        vector, device, name=name, action_mask=action_mask, check_finite=check_finite, timeout=timeout
    )


SINGLE_OPTIONS = frozenset(make_single.__kwdefaults__ or ()) - {"options"}
"""Options of `make_single` itself; all others are the environment's."""


class GymnasiumVector(VectorEnv):
    """A `gymnasium.vector.VectorEnv` with tensors in and out.

    All three autoreset modes give the same transitions, those of stepping each environment alone:

    - DISABLED: ended episodes are reset by `reset(options={"reset_mask": ...})` within the step.
    - SAME_STEP: the true final observation comes from `infos["final_obs"]`. It is the environment's own array: an
      environment that writes every observation into one array has overwritten it; use DISABLED for such.
    - NEXT_STEP: `SyncVectorEnv`, and `AsyncVectorEnv` with shared memory, are reset as under DISABLED. Others, such as
      CartPole's own vector class, can begin an episode only one step after the last one's end, ignoring that step's
      action: it is marked in `Step.valid`, and then `obs` after an end is the final observation once more.

    Observations: a Box keeps its shape and dtype. Any other space of a fixed size (Dict, Tuple, Discrete,
    MultiDiscrete, MultiBinary) is flattened by `gymnasium.spaces.flatten`; parts of different dtypes become float32,
    bytes divided by 255, and `layout` says what lies where. Rewards become float32.

    Actions: Discrete is one head, from 0 whatever its `start`; MultiDiscrete one head an entry; MultiBinary one head of
    two choices a bit; a Box of floats is continuous, flat, and clipped to its bounds. Other spaces are refused.

    Args:
        vector: the environments; closed with this object.
        device: where tensors go. Environments run on the host, so that a step waits for the actions.
        name: for messages; by default the id in `vector.spec`.
        autoreset_mode: only for a vector environment whose `metadata` does not tell.
        action_mask: name of the entry of `info` that holds the legal actions, (sum(nvec),) 0 or 1 for each environment,
            for what the environment does next; environments without the entry may do anything. None: no masks.
        check_finite: raise where a reward or a floating-point observation is NaN or infinite.
        timeout: seconds that a step or reset of all environments may take, as far as `time_limit` can interrupt them;
            None waits for ever.

    Seeds: environment i of `SyncVectorEnv` and `AsyncVectorEnv` gets `environment_seeds(seed, N)[i]`; other vector
    environments get one seed for all. The same seed gives the same episodes, as far as the environments themselves do.

    Between `step_async` and `step_wait` the processes of an `AsyncVectorEnv` step, and those of a vector environment
    whose class says `steps_beside` and has these two methods itself. Others step within `step_wait`, and so does an
    `AsyncVectorEnv` in a vector wrapper, whose methods would be passed over.

    Exact resume: environments are saved as plain data (numbers, strings, arrays, containers of them, and random
    generators) found in the attributes of the vector environment, the environments in it and their wrappers. Where
    anything else there might carry state, `exact_resume` is False, `inexact_because` says what, and loading begins new
    episodes. State outside of these objects (module variables, NumPy's global generator) is not seen.
    """

    def __init__(
        self,
        vector: gymnasium.vector.VectorEnv,
        device: torch.device | str = "cpu",
        *,
        name: str | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        action_mask: str | None = None,
        check_finite: bool = True,
        timeout: float | None = None,
    ):
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, or None; got {timeout}")
        if not isinstance(vector, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"vector must be a gymnasium.vector.VectorEnv; got a {type(vector).__name__}: put single environments "
                "into a SyncVectorEnv"
            )
        base = vector.unwrapped
        is_standard = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        mode = autoreset_mode or (base.autoreset_mode if is_standard else vector.metadata.get("autoreset_mode"))
        if mode is None:
            raise ValueError(f"{vector} does not say how it resets: give autoreset_mode, a gymnasium AutoresetMode")
        self.autoreset_mode = AutoresetMode(mode)
        by_mask = vector is base and (isinstance(base, SyncVectorEnv) or getattr(base, "shared_memory", False))
        is_late = self.autoreset_mode is AutoresetMode.NEXT_STEP
        self._resets = self.autoreset_mode is AutoresetMode.DISABLED or (is_late and is_standard and by_mask)
        self.may_skip = is_late and not self._resets
        # Whether the arrays a step returns are its own and not written again, so that tensors may share them.
        self._fresh = vector is base and (base.copy if is_standard else type(base) is CartPoleVectorEnv)
        self._takes_seeds = getattr(vector, "takes_seeds", is_standard)
        self._steps_beside = getattr(type(vector), "steps_beside", type(vector).step is AsyncVectorEnv.step)

        self.vector = vector
        name = name or (vector.spec.id if vector.spec is not None else str(vector))
        action, self._to_gymnasium = action_of(vector.single_action_space, masked=action_mask is not None)
        flat, self._flatten = flattening(vector.single_observation_space)
        super().__init__(name, vector.num_envs, device, observation_of(flat), action)
        self.layout = layout(vector.single_observation_space)
        self._transfer = Transfer(self.device)
        self._dtype = flat.dtype
        self._rows = (self.num_envs,)
        self._shape = (self.num_envs, *self.observation.shape)
        self._mask_key = action_mask
        self._timeout = timeout
        self._hung = False  # A process does not answer: it is not waited for.
        self._check_rewards = check_finite
        self._check_observations = check_finite and self.observation.dtype.is_floating_point
        self._pending = np.zeros(self.num_envs, dtype=bool)  # begin their next episode in the coming step
        self._now: Reset | None = None  # what was returned last, for state_dict

    def _reset(self, seed: int) -> Reset:
        self._pending = np.zeros(self.num_envs, dtype=bool)
        seeds = environment_seeds(seed, self.num_envs)
        try:
            with time_limit(self._timeout):
                obs, info = self.vector.reset(seed=seeds if self._takes_seeds else seeds[0])  # ty: ignore[invalid-argument-type]
        except Exception as error:
            raise self._raised(error) from error
        # An environment may draw from its spaces; and what a snapshot holds should follow from the seed alone.
        for space in (self.vector.action_space, self.vector.observation_space):
            space.seed(int(seeds[0]))
        for space in (self.vector.single_action_space, self.vector.single_observation_space):
            space.seed(int(seeds[0]))
        self._now = Reset(*self._transfer.to_device(self._observed(obs), self._mask(info)))
        return self._now

    def _step(self, action: Tensor) -> Step:
        self._step_async(action)
        return self._step_wait()

    def _step_async(self, action: Tensor) -> None:
        self._fetched = self._transfer.fetch(action)
        if not self._steps_beside:
            return
        try:
            batch = self._to_gymnasium(self._fetched())
            with time_limit(self._timeout):
                self.vector.step_async(batch)  # ty: ignore[missing-attribute]
        except Exception as error:
            raise self._raised(error) from error

    def _step_wait(self) -> Step:
        try:
            if self._steps_beside:
                with time_limit(self._timeout):
                    obs, reward, terminated, truncated, info = self.vector.step_wait()  # ty: ignore[missing-attribute]
            else:
                batch = self._to_gymnasium(self._fetched())
                with time_limit(self._timeout):
                    obs, reward, terminated, truncated, info = self.vector.step(batch)
            reward = returned("reward", reward, self._rows, np.float32)
            terminated = returned("terminated", terminated, self._rows, bool)
            truncated = returned("truncated", truncated, self._rows, bool)
            ended = terminated | truncated
            any_ended = bool(ended.any())
            next_obs = obs = self._observed(obs)
            infos = (info,)
            if any_ended and self._resets:
                with time_limit(self._timeout):
                    first, first_info = self.vector.reset(options={"reset_mask": ended})
                obs, infos = self._observed(first), (info, first_info)
        except EnvFault:
            raise
        except Exception as error:
            raise self._raised(error) from error
        if any_ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            next_obs = self._with_final(obs, info, ended)
        if self._check_rewards:
            self._require_finite("reward", reward)
        valid = None
        if self.may_skip:
            valid, self._pending = ~self._pending, ended

        self.any_truncated = bool(truncated.any())
        obs, reward, terminated, truncated, next_obs, valid, mask = self._transfer.to_device(
            obs, reward, terminated, truncated, next_obs, valid, self._mask(*infos)
        )
        self._now = Reset(obs, mask)
        return Step(obs, reward, terminated, truncated, next_obs, valid, mask)

    def _observed(self, obs: Any) -> np.ndarray:
        """A batch of observations as an array that no one else writes into."""
        if self._flatten is not None:
            obs = np.stack([self._flatten(row) for row in iterate(self.vector.observation_space, obs)])
        array = (np.ascontiguousarray if self._fresh else np.array)(obs, dtype=self._dtype)
        if array.shape != self._shape:
            raise ValueError(f"observations must have shape {self._shape}, as the space says; got {array.shape}")
        if self._check_observations:
            self._require_finite("observation", array)
        return array

    def _with_final(self, obs: np.ndarray, info: dict[str, Any], ended: np.ndarray) -> np.ndarray:
        if "final_obs" not in info:
            raise RuntimeError(f"{self.name}: an episode ended under SAME_STEP, and infos has no 'final_obs'")
        flatten = self._flatten or np.asarray
        next_obs = obs.copy()
        next_obs[ended] = np.stack([flatten(row) for row in info["final_obs"][ended]])
        if self._check_observations:
            self._require_finite("observation", next_obs)
        return next_obs

    def _mask(self, *infos: dict[str, Any]) -> np.ndarray | None:
        """Legal choices at the coming observation; a later info, that of the reset, overrules an earlier one."""
        if self._mask_key is None:
            return None
        assert isinstance(self.action, Discrete)
        mask = np.ones((self.num_envs, sum(self.action.nvec)), dtype=bool)
        found = False
        for info in infos:
            rows = info.get(self._mask_key)
            if rows is None:
                continue
            found = True
            given = info.get(f"_{self._mask_key}", np.ones(self.num_envs, dtype=bool))
            legal = [np.asarray(row).reshape(-1) for row in rows[given]]
            if any(row.size != mask.shape[1] for row in legal):
                raise ValueError(
                    f"{self.name}: {self._mask_key!r} must hold {mask.shape[1]} entries an environment, one a choice; "
                    f"it holds {legal[0].size}"
                )
            mask[given] = np.stack(legal).astype(bool)
        if not found and self._count == 0:
            raise ValueError(f"{self.name}: its info has no {self._mask_key!r} to take as action_mask")
        return mask

    def _require_finite(self, what: str, array: np.ndarray) -> None:
        finite = np.isfinite(array)
        if not finite.all():
            index = int(finite.reshape(self.num_envs, -1).all(1).argmin())
            raise self._fault(index, f"returned a NaN or infinite {what}")

    def _raised(self, error: Exception) -> EnvFault:
        base = self.vector.unwrapped
        index = None
        if isinstance(base, AsyncVectorEnv):
            # A process that failed has had its pipe taken away; one that hangs is the one that was waited for.
            pipes = [None]
            if isinstance(error, TimeoutError):
                self._hung = True
                pipes = [
                    frame.f_locals["pipe"] for frame, _ in walk_tb(error.__traceback__) if "pipe" in frame.f_locals
                ]
            index = next((i for i, pipe in enumerate(base.parent_pipes) if pipe in pipes), None)
        elif isinstance(base, SyncVectorEnv):
            frame = error.__traceback__
            while frame is not None and index is None:
                running = frame.tb_frame.f_locals.get("self")
                index = next((i for i, env in enumerate(base.envs) if env is running), None)
                frame = frame.tb_next
        what = f"raised {type(error).__name__}: {error}"
        if isinstance(base, SyncVectorEnv) and "wrong shape" in str(error):
            # NumPy's words, of all observations in one array: it tells neither which one nor the shapes.
            space = base.single_observation_space.shape
            for i, obs in enumerate(getattr(base, "_env_obs", ())):
                if space is not None and obs is not None and np.shape(obs) != space:
                    index = i
                    what = f"returned an observation of shape {np.shape(obs)}, where its space has {space},"
                    break
        return self._fault(index, what)

    @property
    def inexact_because(self) -> str | None:
        """What keeps the episodes from being saved, e.g. "SyncVectorEnv.envs[0].env.world is a Box2D.b2World"."""
        try:
            _snapshot.take(self.vector)
        except _snapshot.NotPlainError as error:
            return str(error)
        return None

    def _state(self) -> dict[str, Any]:
        assert self._now is not None
        try:
            tree, arrays = _snapshot.take(self.vector)
        except _snapshot.NotPlainError:
            return {"exact": False}
        state: dict[str, Any] = {
            "exact": True,
            "gymnasium": gymnasium.__version__,
            "autoreset_mode": self.autoreset_mode.value,
            "tree": tree,
            "arrays": arrays,
            "obs": self._now.obs.clone(),
            "pending": torch.from_numpy(self._pending.copy()),
        }
        if self._now.action_mask is not None:
            state["action_mask"] = self._now.action_mask.clone()
        return state

    def _load(self, state: Mapping[str, Any]) -> Reset:
        here = {"gymnasium": gymnasium.__version__, "autoreset_mode": self.autoreset_mode.value}
        if not state["exact"] or any(state[key] != value for key, value in here.items()):
            return self._begin_anew()
        try:
            _snapshot.restore(self.vector, state["tree"], state["arrays"])
        except _snapshot.MismatchError:
            return self._begin_anew()  # Made with other options: its episodes cannot go on, but training can.
        self._pending = state["pending"].cpu().numpy().copy()
        mask = state.get("action_mask")
        mask = None if mask is None else mask.to(self.device, copy=True)
        self._now = Reset(state["obs"].to(self.device, copy=True), mask, continued=True)
        return self._now

    def _close(self) -> None:
        if self._is_stepping and self._steps_beside:
            try:
                with time_limit(self._timeout):
                    self.vector.step_wait()  # ty: ignore[missing-attribute]
            except Exception as error:
                self._raised(error)  # notes which of them hang
        if self._hung:
            self.vector.close(terminate=True)
        else:
            self.vector.close()


def environment_seeds(seed: int, num_envs: int) -> list[int]:
    """Seeds in [0, 2^31) for each of `num_envs` environments, from NumPy's SeedSequence.

    Unlike seed + i these do not make environment 1 of run 0 the same as environment 0 of run 1.
    """
    return [int(x) for x in np.random.SeedSequence(seed).generate_state(num_envs, np.uint32) >> np.uint32(1)]
