"""Prioritized replay and recurrent reinforcement learning that never leave the accelerator."""

__version__ = "0.1.0"
