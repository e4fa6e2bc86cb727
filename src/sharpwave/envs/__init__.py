"""Vectors of environments with batched tensors: one contract, native environments, and adapters."""

import torch

from sharpwave.envs.base import Continuous, Discrete, EnvFault, Observation, Reset, Step, VectorEnv
from sharpwave.envs.cartpole import CartPole
from sharpwave.envs.tensor import TensorEnv

__all__ = [
    "CartPole",
    "Continuous",
    "Discrete",
    "EnvFault",
    "Observation",
    "Reset",
    "Step",
    "TensorEnv",
    "VectorEnv",
    "make",
]


def make(name: str, num_envs: int, device: torch.device | str = "cpu", **options) -> VectorEnv:
    """The environment called `name`, N times."""
    if name != "sharpwave/CartPole":
        raise ValueError(f"unknown environment {name!r}")
    return CartPole(num_envs, device, **options)
