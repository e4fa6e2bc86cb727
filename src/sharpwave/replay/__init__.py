"""Prioritized replay."""

from sharpwave.replay.nest import Batch
from sharpwave.replay.prioritized import PrioritizedReplay
from sharpwave.replay.sequences import SequenceReplay
from sharpwave.replay.sumtree import SumTree

__all__ = ["Batch", "PrioritizedReplay", "SequenceReplay", "SumTree"]
