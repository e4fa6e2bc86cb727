"""SumTree: the sum tree with its random stream and its settings, as an object."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops.sumtree import (
    MAX_LEAF,
    TreeDraw,
    sum_tree,
    tree_extrema,
    tree_rebuild,
    tree_sample,
    tree_total,
    tree_update,
    tree_update_priorities,
)
from sharpwave.ops.sumtree.reference import EMPTY, INVALID, OUT_OF_RANGE, STALE
from sharpwave.replay.checks import check_kinds, check_tensors


class SumTree:
    """Non-negative float32 values of which any can be set, and drawn in proportion to its size, in near constant time.

    A thin object over the ops of `sharpwave.ops.sumtree`, which say how it works and what it promises: sums are exact
    and never drift, draws are the same on every device for equal values and seed, a value of 0 is never drawn. Threads
    must take turns.

        tree = SumTree(1_000_000, device="cuda", seed=0)
        tree.update(indices, priorities)
        indices, values, total = tree.sample(256)

    Args:
        capacity: number of values, all 0 at first; 1 to 2^31 - 1.
        device: where they live; draws and updates happen there, and never wait for the host.
        extrema: also keep the smallest positive and the largest value (`min`, `max`).
        seed: of the stream of draws. An int.
        invalid: what becomes of a NaN, infinite, negative or too large (> 2^20) value given to `update`: "refuse"
            leaves the old value, "clamp" stores 0 or 2^20. `counts` says how many came.
        fanout, backend: speed, never results.
    """

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        extrema: bool = False,
        seed: int = 0,
        invalid: Literal["refuse", "clamp"] = "refuse",
        fanout: int | None = None,
        backend: _backends.Backend = "auto",
    ) -> None:
        if invalid not in ("refuse", "clamp"):
            raise ValueError(f"invalid must be 'refuse' or 'clamp'; got {invalid!r}")
        self.tree = sum_tree(capacity, device, extrema=extrema, fanout=fanout)
        _backends.load("sumtree", self.device, backend)
        self.seed = seed
        self.offset = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._invalid: Literal["refuse", "clamp"] = invalid
        self._backend: _backends.Backend = backend
        # What the host knows without asking the device: a tree that nobody has written is empty.
        self._written = False

    @property
    def capacity(self) -> int:
        return self.tree.capacity

    @property
    def device(self) -> torch.device:
        return self.tree.storage.device

    def __len__(self) -> int:
        return self.capacity

    def __repr__(self) -> str:
        return f"SumTree(capacity={self.capacity}, device={str(self.device)!r}, seed={self.seed})"

    def update(self, indices: Tensor, values: Tensor) -> None:
        """Set values; of equal indices the last wins. See `tree_update`."""
        tree_update(self.tree, indices, values, invalid=self._invalid, backend=self._backend)
        self._written = True

    def update_priorities(self, indices: Tensor, td_error: Tensor, max_priority: Tensor, **settings: Any) -> None:
        """Set values from TD errors. See `tree_update_priorities` for the settings."""
        tree_update_priorities(self.tree, indices, td_error, max_priority, backend=self._backend, **settings)
        self._written = True

    def sample(self, n: int, *, stratified: bool = False) -> TreeDraw:
        """Draw n indices with replacement: (indices, values, total). See `tree_sample`.

        Raises:
            ValueError: nothing was ever written; or, on a CPU, the total is 0. On a GPU a total of 0 is flagged
                instead, and `check` raises.
        """
        if not self._written:
            raise ValueError("nothing to draw from: no value was set yet; call update first")
        return tree_sample(self.tree, n, self.seed, self.offset, stratified=stratified, backend=self._backend)

    @property
    def total(self) -> Tensor:
        """Sum of all values, 0-d float64 on the device."""
        return tree_total(self.tree)

    @property
    def min(self) -> Tensor:
        """Smallest positive value (inf if none), 0-d on the device; needs extrema=True."""
        return tree_extrema(self.tree)[0]

    @property
    def max(self) -> Tensor:
        """Largest value, 0-d on the device; needs extrema=True."""
        return tree_extrema(self.tree)[1]

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest values and their indices, in descending order; reads every value."""
        if not 1 <= k <= self.capacity:
            raise ValueError(f"k must be in [1, {self.capacity}]; got {k}")
        return torch.topk(self.tree.leaves, k)

    def __getitem__(self, indices: Tensor | int) -> Tensor:
        """A copy of the values at `indices`."""
        return self.tree.leaves[indices].clone()

    def numpy(self) -> np.ndarray:
        """All values, read-only: a view on a CPU, a copy (which waits for the device) elsewhere."""
        values = self.tree.leaves.cpu().numpy().view()
        values.flags.writeable = False
        return values

    @property
    def counts(self) -> dict[str, int]:
        """What went wrong so far: invalid values, indices out of range, draws from an empty tree, stale updates.

        Reading it waits for the device.
        """
        status = self.tree.status.tolist()
        return {
            "invalid": status[INVALID],
            "out_of_range": status[OUT_OF_RANGE],
            "empty_draws": status[EMPTY],
            "stale": status[STALE],
        }

    def check(self) -> None:
        """Raise what a device could only count: draws from an empty tree, indices out of range. Waits for it."""
        counts = self.counts
        if counts["out_of_range"]:
            raise IndexError(
                f"{counts['out_of_range']} indices given to update were outside [0, {self.capacity}) and were ignored"
            )
        if counts["empty_draws"]:
            raise ValueError(
                f"{counts['empty_draws']} draws were made while every value was 0; they returned index 0 with value 0"
            )

    def clear(self) -> None:
        """Back to the state after construction: all values 0, the stream at its start, nothing counted."""
        for tensor in (self.tree.storage, self.tree.nodes, self.tree.status, self.offset):
            tensor.zero_()
        if self.tree.extrema is not None:
            self.tree.extrema[:, 0], self.tree.extrema[:, 1] = torch.inf, 0
        self._written = False

    def state_dict(self) -> dict[str, Any]:
        """What determines all further draws, copied: values, seed and position in the stream."""
        return {
            "values": self.tree.leaves.clone(),
            "seed": self.seed,
            "offset": self.offset.clone(),
            "status": self.tree.status.clone(),
            "written": self._written,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, of any device or fan-out; nothing of it is aliased.

        Raises:
            ValueError: the capacity differs, or the state is damaged. The tree is as it was.
        """
        if not isinstance(state, Mapping) or (
            missing := {"values", "seed", "offset", "status", "written"} - state.keys()
        ):
            given = type(state).__name__ if not isinstance(state, Mapping) else f"one without {sorted(missing)}"
            raise ValueError(f"state must be what a SumTree's state_dict() returned; got {given}")
        check_kinds(state, {"values": Tensor, "seed": Integral})
        values, seed = state["values"], state["seed"]
        if values.shape != (self.capacity,):
            raise ValueError(f"the state holds {values.numel()} values; this tree has capacity {self.capacity}")
        check_tensors(
            state,
            {
                "values": (self.tree.leaves, MAX_LEAF),
                "status": (self.tree.status, 2**63 - 1),
                "offset": (self.offset, 2**48 - 1),
            },
        )
        self.tree.leaves.copy_(values)
        tree_rebuild(self.tree, backend=self._backend)
        self.tree.status.copy_(state["status"])
        self.offset.copy_(state["offset"])
        self.seed = seed
        self._written = bool(state["written"])
