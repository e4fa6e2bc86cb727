"""From a name to an environment."""

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sharpwave.envs.bars import Bars
from sharpwave.envs.base import VectorEnv
from sharpwave.envs.breakout import Breakout
from sharpwave.envs.cartpole import CartPole
from sharpwave.envs.cue_recall import CueRecall
from sharpwave.envs.synthetic import Synthetic

Factory = Callable[..., Any]

_factories: dict[str, Factory] = {
    "sharpwave/Bars": Bars,
    "sharpwave/Breakout": Breakout,
    "sharpwave/CartPole": CartPole,
    "sharpwave/CueRecall": CueRecall,
    "sharpwave/Synthetic": Synthetic,
}

# What a name's first word, up to "/", "-" or the like, says about who makes it; Gymnasium makes all others.
_prefixes = {
    "ALE": "sharpwave.envs.atari:make_atari",
    "craftax": "sharpwave.envs.jax:make_craftax",
    "envpool": "sharpwave.envs.envpool:make_envpool",
    "gymnax": "sharpwave.envs.jax:make_gymnax",
    "mpe2": "sharpwave.envs.pettingzoo:make_pettingzoo",
    "pettingzoo": "sharpwave.envs.pettingzoo:make_pettingzoo",
    "BabyAI": "sharpwave.envs.minigrid:make_minigrid",
    "MiniGrid": "sharpwave.envs.minigrid:make_minigrid",
}


def register(name: str, factory: Factory) -> None:
    """Let `make` find an environment under a name of your own.

    Args:
        name: any string that is not taken.
        factory: called as `factory(num_envs, device, **options)`, returns a `VectorEnv`, e.g. a subclass itself; or a
            subclass of `gymnasium.Env`, called as `factory(**options)` for each environment; or a subclass of
            `pettingzoo.ParallelEnv`, called so for each copy; or a function `factory(num_envs, device, **options)` that
            returns a `gymnasium.vector.VectorEnv`, or `factory(**options)` that returns a `gymnasium.Env`.

    Raises:
        ValueError: the name is taken.
        TypeError: the factory is not callable.
    """
    if name in _factories:
        raise ValueError(f"environment name {name!r} is taken by {_factories[name]}: choose another")
    if not callable(factory):
        raise TypeError(f"factory must be a class or function that makes an environment; got {factory!r}")
    _factories[name] = factory


def names() -> list[str]:
    """All names `make` knows: the native environments, those registered here, and Gymnasium's."""
    import gymnasium

    return [*sorted(_factories), *sorted(gymnasium.registry)]


def make(name: str, num_envs: int, device: torch.device | str = "cpu", **options: Any) -> VectorEnv:
    """`num_envs` copies of the environment called `name`, ready for `reset(seed)`.

    Args:
        name: one of
            - a native environment, e.g. "sharpwave/CartPole" (`names` lists them), or a name given to `register`;
            - "module:attribute", e.g. "my_module:MyEnv", of what `register` takes as a factory; the module is looked
              for in the working directory, too;
            - a Gymnasium id, e.g. "CartPole-v1", or "module:id";
            - another library's, with a prefix that says which: "ALE/Pong-v5" (`families` lists them).
        num_envs: N, at least 1.
        device: where the tensors are. Native environments compute there; Gymnasium's run on the host.
        options: the environment's own; for Gymnasium's, and your own `gymnasium.Env`, also those of
            `sharpwave.envs.gymnasium.make_gymnasium`, such as `vectorization_mode="async"` and `timeout=60`.

    Raises:
        ValueError: unknown name (with the nearest ones), an option the environment does not take, num_envs < 1.
        ImportError: what the environment needs is not installed.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1; got {num_envs}")
    factory = _factories.get(name) or _attribute(name)
    if factory is not None:
        return _build(name, factory, num_envs, device, options)

    if name.startswith("sharpwave/"):
        raise ValueError(unknown(name))

    module, _, function = _maker(name).partition(":")
    return getattr(importlib.import_module(module), function)(name, num_envs, device, **options)


def steps_on_device(name: str) -> bool:
    """Whether the environments called `name` are stepped by the device they are made for, as far as the name tells.

    True for native ones, JAX's, and classes of your own that are a `VectorEnv`; all others are taken to need the host.

    Raises:
        ValueError: "module:attribute" of what is not there.
    """
    factory = _factories.get(name) or _attribute(name)
    if factory is not None:
        return isinstance(factory, type) and issubclass(factory, VectorEnv)
    return _maker(name).startswith("sharpwave.envs.jax:")


def _maker(name: str) -> str:
    """Where the function is that makes what is not registered."""
    word = re.match(r"\w*", name)
    return _prefixes.get(word[0] if word else "", "sharpwave.envs.gymnasium:make_gymnasium")


def unknown(name: str) -> str:
    """The message for a name that nothing is registered under."""
    by_lower = {known.lower(): known for known in names()}
    near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    nearest = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    listed = "`sharpwave envs --all`, in Python sharpwave.envs.names(), lists all that are registered"
    return f"unknown environment {name!r}: {nearest}{listed}"


def _attribute(name: str) -> Factory | None:
    """What "module:attribute" names; None where the name is not of that form or names a Gymnasium id."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        # A command's import path does not hold the folder it was called from. Last, so that nothing is shadowed.
        sys.path.append(os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            sys.path.pop()
            raise ValueError(f"environment {name!r}: there is no module {module_name!r} here or installed") from None
    factory = getattr(module, attribute, None)
    if factory is None and attribute.isidentifier():
        raise ValueError(f"environment {name!r}: module {module_name!r} has no attribute {attribute!r}")
    return factory


def _build(
    name: str, factory: Factory, num_envs: int, device: torch.device | str, options: dict[str, Any]
) -> VectorEnv:
    import gymnasium

    parallel = getattr(sys.modules.get("pettingzoo"), "ParallelEnv", ())
    if isinstance(factory, type) and issubclass(factory, parallel):
        from sharpwave.envs.pettingzoo import PettingZooVector

        factory = partial(PettingZooVector, partial(factory, **options), name=name)
        options = {}
    if _is_single(factory, num_envs, device, options):
        return _build_single(name, factory, num_envs, device, options)
    _require_options(name, factory, num_envs, device, **options)
    made = factory(num_envs, device, **options)
    if isinstance(made, gymnasium.vector.VectorEnv):
        from sharpwave.envs.gymnasium import GymnasiumVector

        return GymnasiumVector(made, device, name=name)
    if not isinstance(made, VectorEnv):
        advice = "; one that makes a gymnasium.Env takes its options by keyword alone: def make(*, size=8)"
        raise TypeError(
            f"{name} made a {type(made).__name__}; a sharpwave or Gymnasium VectorEnv is expected of a function that "
            f"takes num_envs and device{advice if isinstance(made, gymnasium.Env) else ''}"
        )
    return made


def _is_single(factory: Factory, num_envs: int, device: torch.device | str, options: dict[str, Any]) -> bool:
    """Whether the factory makes one `gymnasium.Env`: such a class, or a function that has no place for `num_envs`."""
    import gymnasium

    if isinstance(factory, type):
        return issubclass(factory, gymnasium.Env)
    try:
        inspect.signature(factory).bind(num_envs, device, **options)
    except TypeError:
        parameters = inspect.signature(factory).parameters.values()
        return not any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return False


def _build_single(
    name: str, factory: Factory, num_envs: int, device: torch.device | str, options: dict[str, Any]
) -> VectorEnv:
    from sharpwave.envs.gymnasium import SINGLE_OPTIONS, make_single

    # A class that names such an option itself is given it.
    ours = SINGLE_OPTIONS - inspect.signature(factory).parameters.keys()
    given = {key: value for key, value in options.items() if key not in ours}
    _require_options(name, factory, **given)
    return make_single(
        name, factory, num_envs, device, options=given, **{k: v for k, v in options.items() if k in ours}
    )


def _require_options(name: str, factory: Factory, *given: Any, **options: Any) -> None:
    try:
        inspect.signature(factory).bind(*given, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take these options: {error}") from None
