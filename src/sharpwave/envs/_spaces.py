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
    Discrete becomes one-hot, the parts of a Dict or Tuple lie side by side. Parts of different dtypes become float32,
    float64 if one of them is, where floats or bytes are among them; and then bytes are divided by 255, as those of an
    observation that is nothing else are by the network.

    Raises:
        ValueError: a space without a fixed size (Sequence, Graph, Text, ...).
    """
    if isinstance(space, spaces.Box):
        return space, None
    flat = spaces.flatten_space(space) if space.is_np_flattenable else None
    if not isinstance(flat, spaces.Box):
        raise ValueError(f"observation space {space} has no fixed flat size: wrap the environment to choose its parts")
    dtype = _common_dtype(space)
    if dtype is None:
        return flat, lambda obs: np.asarray(spaces.flatten(space, obs))
    scales = np.concatenate([np.full(spaces.flatdim(part), _scale(part), dtype) for _, part in _parts(space)])
    box = spaces.Box((flat.low * scales).astype(dtype), (flat.high * scales).astype(dtype), flat.shape, dtype)
    return box, lambda obs: np.asarray(spaces.flatten(space, obs), dtype) * scales


def layout(space: gymnasium.Space) -> tuple[str, ...]:
    """Where the parts of a flattened observation lie, e.g. ("goal: 0-2, one-hot", "image: 3-50, divided by 255").

    Empty where the space is a Box, which is not flattened.
    """
    if isinstance(space, spaces.Box):
        return ()
    is_scaled, start, found = _common_dtype(space) is not None, 0, []
    for name, part in _parts(space):
        stop = start + spaces.flatdim(part)
        how = ", one-hot" if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) else ""
        how = ", divided by 255" if is_scaled and _scale(part) != 1 else how
        found.append(f"{name or 'all'}: {start}-{stop - 1}{how}" if stop > start else f"{name}: nothing")
        start = stop
    return tuple(found)


def _parts(space: gymnasium.Space, name: str = "") -> list[tuple[str, gymnasium.Space]]:
    """What a Dict or Tuple holds, however deep, by "key.index", in the order of the flattened vector."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(name, space)]
    below = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return [part for key, inner in below for part in _parts(inner, f"{name}.{key}" if name else str(key))]


def _common_dtype(space: gymnasium.Space) -> np.dtype | None:
    """The floats that parts of different dtypes become; None where they stay what they are."""
    found = {np.dtype(part.dtype) for _, part in _parts(space)}
    floats = [dtype for dtype in found if dtype.kind == "f"]
    if len(found) == 1 or not (floats or np.dtype(np.uint8) in found):
        return None
    return np.result_type(np.float32, *floats)


def _scale(part: gymnasium.Space) -> float:
    return 1 / 255 if isinstance(part, spaces.Box) and part.dtype == np.uint8 else 1.0


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
