"""Networks: the MinGRU and the recurrent policy around it."""

from sharpwave.nn.actions import CategoricalActions, GaussianActions, action_distribution
from sharpwave.nn.encoders import make_encoder
from sharpwave.nn.mingru import MinGRU
from sharpwave.nn.normalize import ObservationNormalizer, RewardNormalizer
from sharpwave.nn.policy import Policy, PolicyOutput

__all__ = [
    "CategoricalActions",
    "GaussianActions",
    "MinGRU",
    "ObservationNormalizer",
    "Policy",
    "PolicyOutput",
    "RewardNormalizer",
    "action_distribution",
    "make_encoder",
]
