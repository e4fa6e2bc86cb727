"""What surrounds a trainer: configuration, seeds, checkpoints, logs, display, evaluation and the loop."""

from sharpwave._lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
