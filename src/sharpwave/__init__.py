"""Prioritized replay and recurrent reinforcement learning that never leave the accelerator."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpwave import algos, envs, nn, ops, optim, replay, run
    from sharpwave.replay import PrioritizedReplay, SequenceReplay, SumTree

__version__ = "0.1.0"
_BUFFERS = ("PrioritizedReplay", "SequenceReplay", "SumTree")
_MODULES = ("algos", "envs", "nn", "ops", "optim", "replay", "run")
__all__ = [
    "PrioritizedReplay",
    "SequenceReplay",
    "SumTree",
    "algos",
    "envs",
    "nn",
    "ops",
    "optim",
    "replay",
    "run",
]


def __getattr__(name: str) -> Any:
    # PyTorch and Numba load when something is first asked for, so that importing the package costs nothing.
    if name in _MODULES:
        return importlib.import_module(f"sharpwave.{name}")
    if name in _BUFFERS:
        return getattr(importlib.import_module("sharpwave.replay"), name)
    raise AttributeError(f"module 'sharpwave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
