"""Prioritized replay."""

from sharpwave.replay.sumtree import SumTree

__all__ = ["SumTree"]
