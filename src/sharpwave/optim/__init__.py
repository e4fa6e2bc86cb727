"""Optimizers."""

from sharpwave.optim.muon import Muon, orthogonalize

__all__ = ["Muon", "orthogonalize"]
