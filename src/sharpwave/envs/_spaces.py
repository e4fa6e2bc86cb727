"""Gymnasium's spaces as this package's, and actions back into what those spaces hold."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from sharpwave.envs.base import Continuous, Discrete, Observation

ToGymnasium = Callable[[np.ndarray], np.ndarray]


def flattening(space: gymnasium.Space) -> tuple[spaces.Box, Callable[[Any], np.ndarray] | None]:
    """The Box that observations of `space` are given in, and the function that turns one of them into its vector.

    A Box is taken as it is (the function is None); any other space of a fixed size is flattened as Gymnasium does it:
    Discrete becomes one-hot, the parts of a Dict or Tuple lie side by side, and dtypes are promoted.

    Raises:
        ValueError: a space without a fixed size (Sequence, Graph, Text, ...).
    """
    if isinstance(space, spaces.Box):
        return space, None
    flat = spaces.flatten_space(space) if space.is_np_flattenable else None
    if not isinstance(flat, spaces.Box):
        raise ValueError(f"observation space {space} has no fixed flat size: wrap the environment to choose its parts")
    return flat, lambda obs: np.asarray(spaces.flatten(space, obs))


def observation_of(space: spaces.Box) -> Observation:
    """Shape and dtype of a Box's entries; ValueError for a dtype that tensors do not have."""
    try:
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    except TypeError:
        raise ValueError(f"observation dtype {space.dtype} has no tensor counterpart: wrap the environment") from None
    return Observation(tuple(space.shape), dtype)


def returned(what: str, given: Any, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """What a step returned besides observations, as an array of its own: rewards, float32, or flags, bool.

    Raises:
        ValueError: another shape, no real numbers, or flags other than 0 and 1, NaN among them.
    """
    array = np.asarray(given)
    kind = array.dtype.kind
    if array.shape != shape or kind not in "biuf":
        raise ValueError(f"{what} must be real numbers of shape {shape}; got {array.dtype} of shape {array.shape}")
    if dtype is bool and kind != "b" and not ((array == 0) | (array == 1)).all():
        raise ValueError(f"{what} must be true or false, or 1 or 0; got {given}")
    return array.astype(dtype)


def action_of(space: gymnasium.Space, masked: bool) -> tuple[Discrete | Continuous, ToGymnasium]:
    """The action space, and the function that turns a batch of its actions, NumPy, into a fresh batch of `space`'s.

    Discrete(n, start) is one head of n choices, MultiDiscrete one head an entry, MultiBinary one head of two choices a
    bit, and a Box of floats is continuous, clipped to its bounds. Entries of many-dimensional spaces count in C order.

    Raises:
        ValueError: any other space.
    """
    dtype = space.dtype
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Discrete((int(space.n),), masked), lambda a: np.add(a, start, dtype=dtype)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        shape, start = space.shape, getattr(space, "start", 0)
        nvec = space.nvec.flatten() if isinstance(space, spaces.MultiDiscrete) else [2] * int(np.prod(shape))
        # A single head drops its axis, so the shape comes from the space.
        return Discrete(tuple(int(n) for n in nvec), masked), lambda a: (a.reshape(-1, *shape) + start).astype(dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(dtype, np.floating):
        if masked:
            raise ValueError("action_mask is for discrete actions; this action space is continuous")
        shape, low, high = space.shape, space.low, space.high
        bounds = [tuple(float(x) for x in bound.flatten()) for bound in (low, high)]
        action = Continuous(int(np.prod(shape)), *bounds)
        return action, lambda a: np.clip(a.reshape(-1, *shape), low, high).astype(dtype)
    raise ValueError(
        f"action space {space} is not supported: Discrete, MultiDiscrete, MultiBinary and Box of floats are; wrap the "
        "environment in a gymnasium.ActionWrapper that offers one of these"
    )
