"""Vectors of environments with batched tensors: one contract, native environments, and adapters.

env = sharpwave.envs.make("CartPole-v1", num_envs=64)
obs, action_mask, _ = env.reset(seed=0)
step = env.step(action)
"""

from sharpwave.envs.bars import Bars
from sharpwave.envs.base import Continuous, Discrete, EnvFault, Observation, Reset, Step, VectorEnv
from sharpwave.envs.breakout import Breakout
from sharpwave.envs.cartpole import CartPole
from sharpwave.envs.cue_recall import CueRecall
from sharpwave.envs.extras import Family, families
from sharpwave.envs.grouped import Grouped
from sharpwave.envs.registry import make, names, register
from sharpwave.envs.stats import EpisodeStats, EpisodeSummary
from sharpwave.envs.synthetic import Synthetic
from sharpwave.envs.tensor import TensorEnv

__all__ = [
    "Bars",
    "Breakout",
    "CartPole",
    "Continuous",
    "CueRecall",
    "Discrete",
    "EnvFault",
    "EpisodeStats",
    "EpisodeSummary",
    "Family",
    "Grouped",
    "Observation",
    "Reset",
    "Step",
    "Synthetic",
    "TensorEnv",
    "VectorEnv",
    "families",
    "make",
    "names",
    "register",
]
