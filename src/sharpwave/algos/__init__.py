"""Trainers: each reads from top to bottom like the algorithm's box in a paper."""

from sharpwave._lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
