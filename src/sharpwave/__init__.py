"""Prioritized replay and recurrent reinforcement learning that never leave the accelerator."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpwave.replay import PrioritizedReplay, SequenceReplay, SumTree

__version__ = "0.1.0"
__all__ = ["PrioritizedReplay", "SequenceReplay", "SumTree"]


def __getattr__(name: str) -> Any:
    # PyTorch and Numba load when a buffer is first asked for, so that importing the package costs nothing.
    if name in __all__:
        from sharpwave import replay

        return getattr(replay, name)
    raise AttributeError(f"module 'sharpwave' has no attribute {name!r}")
