"""Libraries that only some environments need, and how to get them."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Environments that come from one place.

    Attributes:
        name: what they are called.
        extra: of `pip install sharpwave[extra]`; None where nothing needs to be installed.
        installed: whether all they need is there. Nothing is imported to find out.
        version: of the library, where it is there.
        examples: names that `sharpwave.envs.make` takes.
    """

    name: str
    extra: str | None
    installed: bool
    version: str | None
    examples: tuple[str, ...]


# name, extra, modules, the distribution whose version is shown, examples
_FAMILIES: list[tuple[str, str | None, tuple[str, ...], str, tuple[str, ...]]] = [
    ("native", None, (), "sharpwave", ("sharpwave/CartPole", "sharpwave/Breakout", "sharpwave/CueRecall")),
    ("market bars from files", "bars", ("polars",), "polars", ("sharpwave/Bars",)),
    ("Gymnasium", None, ("gymnasium",), "gymnasium", ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1")),
    ("MuJoCo", "mujoco", ("mujoco",), "mujoco", ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")),
    ("Box2D", "box2d", ("Box2D",), "box2d", ("LunarLander-v3", "BipedalWalker-v3")),
    ("Atari", "atari", ("ale_py",), "ale-py", ("ALE/Pong-v5", "ALE/Breakout-v5")),
    ("MiniGrid", "minigrid", ("minigrid",), "minigrid", ("MiniGrid-MemoryS7-v0", "MiniGrid-DoorKey-5x5-v0")),
    ("PettingZoo", "pettingzoo", ("pettingzoo",), "pettingzoo", ("pettingzoo/classic/rps_v2",)),
    ("EnvPool", "envpool", ("envpool",), "envpool", ("envpool/CartPole-v1", "envpool/Pong-v5")),
    ("gymnax", "jax", ("jax", "gymnax", "six"), "gymnax", ("gymnax/CartPole-v1", "gymnax/Breakout-MinAtar")),
    ("Craftax", "jax", ("jax", "craftax"), "craftax", ("craftax/Craftax-Symbolic-v1",)),
]


def families() -> list[Family]:
    """Every family of environments, with whether it can be made here."""
    found = []
    for name, extra, modules, distribution, examples in _FAMILIES:
        installed = all(importlib.util.find_spec(module) is not None for module in modules)
        found.append(Family(name, extra, installed, _version(distribution) if installed else None, examples))
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def needs(extra: str) -> Generator[None]:
    """Around imports: what is missing is named with the extra that brings it.

    Raises:
        ImportError: in one line, with the command to run.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'sharpwave[{extra}]'") from error
