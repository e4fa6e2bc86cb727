"""Which kernels serve a buffer, and its memory as they take it."""

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.replay.state import State


class Arrays(NamedTuple):
    """NumPy views of the state, for the CPU's kernels."""

    leaves: np.ndarray
    nodes: np.ndarray
    offsets: np.ndarray
    shift: int
    status: np.ndarray
    generation: np.ndarray
    step: np.ndarray
    head: np.ndarray
    episode_step: np.ndarray
    counters: np.ndarray
    max_priority: np.ndarray
    beta: np.ndarray
    offset: np.ndarray
    seed: np.ndarray


class Outputs(NamedTuple):
    """The memory of one batch."""

    owner: object
    n: int
    tensors: dict[str, Tensor]
    blocks: list[np.ndarray] | None = None
    """On a CPU, what the tensors are rows of: one block of (entries, n, ...) a shape and dtype. The first two hold what
    the draw computes: indices, generations; weights, probabilities, discount."""
    table: np.ndarray | None = None
    """On a CPU, the fields' table for the kernel that copies rows."""


def cpu_kernels(state: State, backend: _backends.Backend) -> Any:
    if _backends.choose("sumtree", state.counters.device.type, backend) != "cpu":
        return None
    from sharpwave.replay.kernels import cpu

    return cpu


def triton_kernels(state: State, backend: _backends.Backend, where: object) -> Any:
    device = state.counters.device
    if _backends.choose("sumtree", device.type, backend) != "triton" or where != device:
        return None
    from sharpwave.replay.kernels import triton

    return triton


def views(s: State) -> Arrays:
    t = s.tree.arrays
    return Arrays(
        t.leaves,
        t.nodes,
        t.offsets,
        t.shift,
        t.status,
        *(
            x.numpy()
            for x in (
                s.generation,
                s.step,
                s.head,
                s.episode_step,
                s.counters,
                s.max_priority,
                s.beta,
                s.offset,
                s.seed.view(1),
            )
        ),
    )
