"""What every prioritized buffer does: keep transitions, take in new ones, and change priorities."""

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._philox import as_signed
from sharpwave.ops.sumtree import (
    MAX_LEAF,
    check_settings,
    reference,
    tree_extrema,
    tree_rebuild,
    tree_total,
    tree_update_priorities,
)
from sharpwave.replay import keeping
from sharpwave.replay.checks import (
    Beta,
    MaxPriorityOver,
    WeightNorm,
    beta_numbers,
    check_declared_steps,
    check_step_fields,
    check_update,
    check_valid,
    declared,
    storage_place,
)
from sharpwave.replay.kernels import reference as plain
from sharpwave.replay.nest import Batch, as_tensor, find, flatten, merge, put
from sharpwave.replay.state import AGE, DRAWN, HELD, NOTHING, Layout, State, new_state
from sharpwave.replay.storage import NUMPY, Field, Storage, as_array, infer_fields, movable
from sharpwave.replay.views import Outputs, cpu_kernels, triton_kernels, views

Shape = tuple[tuple[int, ...], torch.dtype]
"""Of one item of a batch's entry, and its dtype."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def taking_turns(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A method that other threads' calls wait for: an item is several writes, which nobody may see half done."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Replay:
    """Storage, state and priorities; subclasses say what a draw is. The arguments are described there."""

    kind = ""
    _is_flat = False

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str,
        *,
        alpha: float,
        beta: Beta,
        eps: float,
        p_max: float,
        seed: int,
        weight_norm: WeightNorm | None,
        max_priority_over: MaxPriorityOver,
        stratified: bool,
        storage: torch.device | str | os.PathLike | None,
        fields: Mapping[str, Any] | None,
        backend: _backends.Backend,
        options: dict[str, Any],
    ):
        if weight_norm not in ("batch", "buffer", None):
            raise ValueError(f"weight_norm must be 'batch', 'buffer' or None; got {weight_norm!r}")
        if max_priority_over not in ("all_time", "buffer"):
            raise ValueError(f"max_priority_over must be 'all_time' or 'buffer'; got {max_priority_over!r}")
        check_settings(alpha, eps, p_max)
        self.eps, self.p_max = float(eps), float(p_max)
        # With no priority to go by, p is 1, or the nearest that its bounds allow.
        self._first = min(max(1.0, self.eps), self.p_max)
        self._lock = threading.RLock()
        self.device = _backends.present(device)
        self.weight_norm: WeightNorm | None = weight_norm
        self.max_priority_over = max_priority_over
        self.stratified = bool(stratified)
        self._alpha = float(alpha)
        self._options = options
        self._where = storage_place(storage, self.device)
        extrema = "buffer" in (weight_norm, max_priority_over)
        self.state: State = new_state(layout, self.device, extrema, self._first)
        self.state.seed.fill_(as_signed(seed))
        self.state.beta.copy_(torch.tensor(beta_numbers(beta)))
        self.storage: Storage | None = None
        self._cpu = cpu_kernels(self.state, backend)
        # The CPU's kernels copy rows by address; from another device they come the plain way.
        on_host = not isinstance(self._where, torch.device) or self._where.type == "cpu"
        self._arrays = views(self.state) if self._cpu and on_host else None
        self._triton = triton_kernels(self.state, backend, self._where)
        self._touched = np.zeros(layout.envs * (layout.frames + 1 + layout.span), np.int64)
        if fields is not None:
            self._make_storage(declared(fields))

    # What is held

    @property
    def capacity(self) -> int:
        """Slots: transitions that fit; in time order, less one for each episode that has ended among them."""
        return self.state.layout.slots

    def __len__(self) -> int:
        """How many items can be drawn now. On a GPU reading it waits."""
        return int(self.state.counters[HELD])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, device={str(self.device)!r}, alpha={self._alpha})"

    @property
    def alpha(self) -> float:
        """Exponent of the priorities. Setting it raises every priority held to the new exponent; from alpha = 0, which
        keeps no priorities, all start equal. Only p^alpha is kept, in float32: from a tiny alpha p comes back with a
        relative error of 6e-8 / alpha, within eps and p_max."""
        return self._alpha

    @alpha.setter
    @taking_turns
    def alpha(self, alpha: float) -> None:
        check_settings(alpha, self.eps, self.p_max)
        leaves = self.state.tree.leaves
        if self._alpha > 0:
            new = leaves.double().pow(alpha / self._alpha).clamp(self.eps**alpha, min(self.p_max**alpha, MAX_LEAF))
        else:
            new = torch.full_like(leaves, self._first**alpha)
        leaves.copy_(torch.where(leaves > 0, new, 0))
        tree_rebuild(self.state.tree)
        self._alpha = float(alpha)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} is neither pickled nor copied: use save() and load(), or state_dict()"
        )

    @property
    def beta(self) -> Tensor:
        """The exponent of the importance weights now, 0-d on the device. Assign a float or (first, last, draws)."""
        return plain.current_beta(self.state)

    @beta.setter
    def beta(self, beta: Beta) -> None:
        self.state.beta.copy_(torch.tensor(beta_numbers(beta)))

    @property
    def total_priority(self) -> Tensor:
        """Sum of all p_i^alpha, 0-d float64 on the device."""
        return tree_total(self.state.tree)

    @property
    def max_priority(self) -> Tensor:
        """The priority (alpha not applied) that new items enter with, 0-d float32 on the device."""
        if self.max_priority_over == "all_time":
            return self.state.max_priority[0]
        largest = tree_extrema(self.state.tree)[1]
        return torch.where(largest > 0, largest.pow(1 / self._alpha) if self._alpha > 0 else largest, self._first)

    @taking_turns
    def priorities(self, indices: Tensor) -> Tensor:
        """p_i^alpha of the given items, (n,) float32.

        Raises:
            IndexError: an index out of range (CPU; on a GPU its priority is 0).
            TypeError: indices are not int64.
        """
        indices, slots = torch.as_tensor(indices), self.capacity
        if indices.dtype != torch.int64:
            raise TypeError(f"indices must be int64; got {indices.dtype}: pass batch.indices as it is")
        inside = (indices >= 0) & (indices < slots)
        if self.device.type == "cpu" and not inside.all():
            raise reference.index_error(indices[~inside], slots)
        return torch.where(inside, self.state.tree.leaves[indices.clamp(0, slots - 1)], 0)

    # Taking in

    def extend(self, batch: Mapping[str, Any] | None = None, *, valid: Any = None, **fields: Any) -> Tensor:
        """`add`, under the name other libraries give it."""
        return self.add(batch, valid=valid, **fields)

    @taking_turns
    def add(self, batch: Mapping[str, Any] | None = None, *, valid: Any = None, **fields: Any) -> Tensor:
        """Store transitions, which enter with the largest priority so far (at first 1, within eps and p_max).

        Args:
            batch, fields: one mapping, or keyword arguments, of tensors or arrays (batch, ...), nested as you like; a
                TensorDict too. `reward` (stored as float32), `terminated` and `truncated` (as bool) are (batch,); on a
                CPU a finite reward that float32 cannot hold is refused, and an end that is neither 0 nor 1.
                Without environments: any fields; a batch larger than the capacity keeps its last items.
                With `num_envs`: one step of every environment, or (steps, num_envs, ...) of several, with obs,
                next_obs, reward, terminated and truncated; next_obs is what this step led to, at an episode's end
                its true final observation, never the next episode's first.
            valid: with `num_envs`: (num_envs,) or (steps, num_envs) bool, false for environments that took no step of
                their own, because their vector class began an episode instead (`Step.valid`). Nothing of these is
                kept. None: all took one. (Without `num_envs` it is a field as any other.)

        Returns:
            The items' indices, int64: (batch,), or (capacity,) of the last items of a larger batch, or (num_envs,), or
            (steps, num_envs); -1 where not valid.

        The oldest items make room; their indices go to new items, under a new generation. Nothing waits for the device.

        Raises:
            KeyError, ValueError, TypeError: fields missing or new, wrong shapes or dtypes. The buffer is as it was,
            several steps at once included.
        """
        envs = self.state.layout.envs
        if valid is not None and not envs:
            fields["valid"] = valid
        flat = flatten(fields) if batch is None else merge(flatten(batch), flatten(fields))
        if envs:
            return self._add_steps(flat, check_valid(valid, flat, envs))
        if self.storage is None:
            fields_ = infer_fields(flat)
            Storage(0, fields_, torch.device("meta")).check(flat)
            self._make_storage(fields_)
        assert self.storage is not None
        tensors = self.storage.check(flat)
        n, ring = next(iter(tensors.values())).shape[0], self.state.layout.ring
        if n == 0:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if n > ring:
            tensors, n = {k: t[-ring:] for k, t in tensors.items()}, ring
        if self._triton is not None:
            return self._add_triton(n, tensors, {})
        if self._arrays is None:
            slots = plain.add_items(self.state, n, self._new_leaf())
            self._write(tensors, slots)
            return slots
        # Everything that can fail comes before the state changes.
        rows = [(array, as_array(tensors[name])) for name, array in self.storage.arrays.items()]
        a = self._arrays
        first = self._cpu.add_items(
            a.leaves, a.nodes, a.offsets, a.shift, a.generation, a.head, a.counters, ring, n, self._new_leaf_number()
        )
        for array, new in rows:
            end = min(n, ring - first)
            array[first : first + end] = new[:end]
            if end < n:
                array[: n - end] = new[end:]
        slots = np.arange(first, first + n)
        slots[ring - first :] -= ring
        self._refresh_extrema(slots)
        return torch.from_numpy(slots)

    def _add_steps(self, flat: dict[str, Any], valid: Tensor | None) -> Tensor:
        envs = self.state.layout.envs
        check_step_fields(flat)
        reward = flat["reward"] = as_tensor(flat["reward"], "reward")
        # One step, or a block of them, which is checked whole before any of it is stored.
        lead = (len(reward), envs) if reward.ndim == 2 else (envs,)
        stored = {k: x for k, x in flat.items() if k != "next_obs" and not k.startswith("next_obs.")}
        ahead = {k: x for k, x in flat.items() if k not in stored}
        if self.storage is None:
            fields = infer_fields(stored, lead)
            probe = Storage(0, fields, torch.device("meta"))
            probe.check(stored, lead)
            probe.check(ahead, lead, {k: fields[k.removeprefix("next_")] for k in ahead})
            self._make_storage(fields)
        assert self.storage is not None
        now = self.storage.check(stored, lead)
        following = self.storage.check(ahead, lead, {k: self.storage.fields[k.removeprefix("next_")] for k in ahead})
        ahead = {k.removeprefix("next_"): x for k, x in following.items()}
        if len(lead) == 1:
            return self._add_step(now, ahead, valid)
        slots = []
        for t in range(lead[0]):
            rows = ({k: x[t] for k, x in part.items()} for part in (now, ahead))
            slots.append(self._add_step(*rows, None if valid is None else valid[t]))
        return torch.stack(slots) if slots else torch.empty(lead, dtype=torch.int64, device=self.device)

    def _add_step(self, now: dict[str, Tensor], ahead: dict[str, Tensor], valid: Tensor | None) -> Tensor:
        if self._triton is not None:
            return self._add_triton(self.state.layout.envs, now, ahead, valid)
        ended = now["terminated"] | now["truncated"]
        if valid is not None:
            valid = valid.to(self.device)
        if self._arrays is None:
            slots, next_slots = plain.add_step(self.state, ended.to(self.device), self._new_leaf(), valid)
        else:
            slots, next_slots = self._add_step_cpu(ended.cpu().numpy(), valid)
        self._write(now, slots, valid)
        self._write(ahead, next_slots, valid)
        return slots if valid is None else torch.where(valid, slots, -1)

    def _add_triton(
        self, n: int, given: dict[str, Tensor], ahead: dict[str, Tensor], valid: Tensor | None = None
    ) -> Tensor:
        assert self.storage is not None
        leaf = None if self.max_priority_over == "all_time" else self._new_leaf()
        given, ahead = ({k: x.to(self.device, non_blocking=True) for k, x in rows.items()} for rows in (given, ahead))
        if valid is not None:
            valid = valid.to(self.device, non_blocking=True)
        return self._triton.add(self.state, n, given, ahead, self.storage.tensors, leaf, self._alpha, valid)

    def _add_step_cpu(self, ended: np.ndarray, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        a, layout = self._arrays, self.state.layout
        assert a is not None
        slots, next_slots = np.empty((2, layout.envs), np.int64)
        count = self._cpu.add_step(
            a.leaves,
            a.nodes,
            a.offsets,
            a.shift,
            a.generation,
            a.step,
            a.head,
            a.episode_step,
            a.counters,
            a.status,
            ended,
            np.ones(layout.envs, bool) if valid is None else valid.numpy(),
            layout.ring,
            layout.span,
            layout.short,
            layout.period,
            layout.frames,
            self._new_leaf_number(),
            slots,
            next_slots,
            self._touched,
        )
        self._refresh_extrema(self._touched[:count])
        return torch.from_numpy(slots), torch.from_numpy(next_slots)

    # Priorities

    @taking_turns
    def update_priorities(self, indices: Tensor, td_error: Tensor, generation: Tensor | None = None) -> None:
        """Set priorities from TD errors: p = min(|td| + eps, p_max), stored as p^alpha.

        Args:
            indices: (n,) int64, `batch.indices`. Of equal indices the last wins.
            td_error: (n,), any floating dtype, signed. Never the weighted loss: priorities do not depend on beta.
            generation: (n,) int64, `batch.generations`: an item overwritten since it was drawn keeps its priority, and
                is counted. None updates whatever lies at the indices now, if it can be drawn.

        NaN and infinite TD errors give the largest priority so far, and are counted. See `stats`. A finite one beyond
        float32's range gives p_max.

        Raises:
            IndexError: an index out of range (CPU; a GPU ignores and counts it).
            ValueError, TypeError: wrong shapes, devices or dtypes.
        """
        indices, td_error = torch.as_tensor(indices), torch.as_tensor(td_error)
        generation = None if generation is None else torch.as_tensor(generation)
        s = self.state
        if self._arrays is None or indices.device != self.device or td_error.device != self.device:
            td_error = td_error.detach()
            if generation is None and indices.dtype == torch.int64 and indices.device == self.device:
                generation = plain.known_generation(s, indices)
            tree_update_priorities(
                s.tree,
                indices,
                td_error,
                s.max_priority,
                alpha=self._alpha,
                eps=self.eps,
                p_max=self.p_max,
                generation=generation,
                generations=s.generation,
            )
            return
        check_update(indices, td_error, generation)
        if td_error.dtype != torch.float32:
            td_error = reference.narrow(td_error)
        a = self._arrays
        where = indices.numpy()
        kept = np.empty(where.shape[0], np.int64)
        count = self._cpu.update(
            a.leaves,
            a.nodes,
            a.offsets,
            a.shift,
            s.layout.slots,
            a.status,
            a.generation,
            where,
            td_error.detach().numpy(),
            a.max_priority,
            where if generation is None else generation.numpy(),
            generation is not None,
            np.float32(self._alpha),
            np.float32(self.eps),
            np.float32(self.p_max),
            kept,
        )
        if count < 0:
            raise reference.index_error(indices[(indices < 0) | (indices >= s.layout.slots)], s.layout.slots)
        self._refresh_extrema(kept[:count])

    @taking_turns
    def stats(self) -> dict[str, Any]:
        """What a log line shows. Reading it waits for the device.

        Returns:
            held: items that can be drawn. drawn, mean_age: draws so far, and how many items had been added since each
            drawn one, on average. stale: updates dropped because the item was overwritten. bad_td_errors: NaN or
            infinite ones. out_of_range: indices ignored (GPU). empty: draws from an empty buffer (GPU).
            max_priority, total_priority, beta: floats. histogram: (counts, edges) of the priorities p_i^alpha held, in
            ten steps a decade; smaller ones count in the first.
        """
        s = self.state
        counters, status = s.counters.tolist(), s.tree.status.tolist()
        leaves = s.tree.leaves[s.tree.leaves > 0].double().log10()
        edges = torch.arange(-133, 62, device=self.device, dtype=torch.float64) / 10  # from 2^-44 to 2^20
        leaves = leaves.clamp(min=edges[0])
        counts = torch.histc(leaves.cpu(), len(edges) - 1, float(edges[0]), float(edges[-1])) if len(leaves) else None
        return {
            "held": counters[HELD],
            "drawn": counters[DRAWN],
            "mean_age": counters[AGE] / max(counters[DRAWN], 1),
            "stale": status[reference.STALE],
            "bad_td_errors": status[reference.INVALID],
            "out_of_range": status[reference.OUT_OF_RANGE],
            "empty": status[reference.EMPTY],
            "max_priority": float(self.max_priority),
            "total_priority": float(self.total_priority),
            "beta": float(self.beta),
            "histogram": (
                torch.zeros(len(edges) - 1).long() if counts is None else counts.long(),
                10.0 ** edges.cpu(),
            ),
        }

    # Keeping

    @taking_turns
    def clear(self) -> None:
        """Forget every item and priority, and start the random stream again: the same seed and additions give the same
        draws. Numbers of generations go on, so updates for forgotten items are still recognised."""
        s = self.state
        s.tree.leaves.zero_()
        tree_rebuild(s.tree)
        s.generation.fill_(NOTHING)
        s.max_priority.fill_(self._first)
        for tensor in (s.step, s.head, s.episode_step, s.offset, s.tree.status, s.counters[HELD]):
            tensor.zero_()
        s.counters[DRAWN:].zero_()

    @taking_turns
    def state_dict(self) -> dict[str, Any]:
        """Everything, as a nest of fresh tensors and numbers; the same draws follow wherever it is loaded."""
        return keeping.state_dict(self)

    @taking_turns
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, copying it.

        Raises:
            ValueError: it is of another kind, layout, settings or fields, or damaged. The buffer is as it was. (alpha,
            beta and seed are taken over.)
        """
        keeping.load_state_dict(self, state)

    @taking_turns
    def save(self, path: str | os.PathLike) -> None:
        """Write the buffer to a new directory `path` (safetensors and JSON), whole or not at all.

        Raises:
            CheckpointError: `path` exists, or the disk refuses.
        """
        keeping.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        device: torch.device | str | None = None,
        storage: torch.device | str | os.PathLike | None = None,
        backend: _backends.Backend = "auto",
    ):
        """A buffer that continues a saved one: the same draws, bit for bit.

        Args:
            path: what `save` wrote.
            device, storage: where it lives now; the device it was saved from, and the same device, by default.
            backend: as in the constructor. Weights of different backends may differ in the last place.

        Raises:
            CheckpointError: missing, truncated, altered, of another version or another kind.
        """
        return keeping.load(cls, path, device, storage, backend)

    # Parts

    def _make_storage(self, fields: dict[str, Field]) -> None:
        if self.state.layout.envs:
            check_declared_steps(fields)
        self.storage = Storage(self.state.layout.slots, fields, self._where)
        self._plan_outputs()

    def _plan_outputs(self) -> None:
        raise NotImplementedError

    def _plan_memory(self, groups: dict[Shape, list[str]], origins: list[tuple[str, str, int]]) -> None:
        """What a batch's memory is made of.

        Args:
            groups: entries by shape of an item and dtype; indices and generations first, then weights, probabilities.
            origins: (entry, field, kind of rows) of what is copied from the storage.
        """
        storage = self.storage
        assert storage is not None
        self._origins = origins
        self._groups = [((len(names), *shape), dtype, *NUMPY[dtype], names) for (shape, dtype), names in groups.items()]
        self._is_flat = not any("." in name for names in groups.values() for name in names)
        on_cpu = [origin for _, origin, _ in origins if storage.device.type == "cpu"]
        table = [[storage.tensors[origin].data_ptr(), storage.row_bytes[origin], 0] for origin in on_cpu]
        self._row_table = np.array(table, np.int64).reshape(-1, 3)
        self._which = np.array([which for _, _, which in origins], np.int64)

    def _new_outputs(self, n: int) -> Outputs:
        # NumPy's empty and views with PyTorch's from_numpy take half the time of PyTorch's own empty and unbind.
        tensors: dict[str, Tensor] = {}
        blocks = []
        for (count, *shape), dtype, like, same, names in self._groups:
            block = np.empty((count, n, *shape), like)
            blocks.append(block)
            for name, row in zip(names, block, strict=True):
                tensors[name] = torch.from_numpy(row) if same else torch.from_numpy(row).view(dtype)
        table = self._row_table.copy()
        table[:, 2] = [tensors[name].data_ptr() for name, _, _ in self._origins]
        return Outputs(self, n, tensors, blocks, table)

    def _draw_cpu(self, outputs: Outputs, beta: float | Tensor | None) -> list[np.ndarray]:
        """Indices, generations, weights and probabilities; returns the batch's blocks."""
        kernels, a = self._cpu, self._arrays
        assert a is not None
        assert outputs.blocks is not None
        norm, smallest = kernels.BATCH_NORM, np.float32(0)
        if self.weight_norm is None:
            norm = kernels.NO_NORM
        elif self.weight_norm == "buffer":
            norm, smallest = kernels.BUFFER_NORM, np.float32(tree_extrema(self.state.tree)[0].item())
        drawn = kernels.draw(
            a.leaves,
            a.nodes,
            a.offsets,
            a.shift,
            a.generation,
            a.counters,
            a.seed,
            a.offset,
            self.stratified,
            a.beta,
            beta is None,
            0.0 if beta is None else float(beta),
            norm,
            smallest,
            *outputs.blocks[:2],
        )
        if not drawn:
            raise ValueError("nothing to draw from: no item held has its whole window yet; add() more")
        return outputs.blocks

    def _write(self, tensors: dict[str, Tensor], slots: Tensor, valid: Tensor | None = None) -> None:
        """Rows into their slots, but for those not valid."""
        storage = self.storage
        assert storage is not None
        if storage.arrays:
            keep = slice(None) if valid is None else valid.cpu().numpy()
            where = slots.cpu().numpy()[keep]
            for name, tensor in tensors.items():
                storage.arrays[name][where] = as_array(tensor)[keep]
            return
        slots = slots.to(storage.device)
        for name, tensor in tensors.items():
            rows = tensor.to(storage.device, non_blocking=True)
            if valid is not None:  # the others write over themselves: no shape depends on how many there are
                took = valid.to(storage.device).view(-1, *[1] * (rows.ndim - 1))
                rows = torch.where(took, movable(rows), movable(storage.tensors[name])[slots])
            movable(storage.tensors[name]).index_copy_(0, slots, movable(rows))

    def _rows(self, field: str, slots: Tensor, keep: Tensor | None = None) -> Tensor:
        """Rows of a field, on the buffer's device, wherever it is stored; zeros where `keep`, like slots, is false."""
        storage = self.storage
        assert storage is not None
        stored = storage.tensors[field]
        rows = movable(stored).index_select(0, slots.reshape(-1).to(storage.device))
        # Towards a CPU the copy must have ended before anyone reads it.
        rows = rows.to(self.device, non_blocking=self.device.type != "cpu")
        if keep is not None:
            rows = torch.where(keep.view(-1, *[1] * (rows.ndim - 1)), rows, False if rows.dtype == torch.bool else 0)
        return rows.view(stored.dtype).view(*slots.shape, *stored.shape[1:])

    def _new_leaf(self) -> Tensor:
        if self.max_priority_over == "all_time":
            return self.state.max_priority[0].pow(self._alpha)
        largest = tree_extrema(self.state.tree)[1]
        return torch.where(largest > 0, largest, self._first**self._alpha)

    def _new_leaf_number(self) -> np.float32:
        if self._arrays is not None and self.max_priority_over == "all_time":
            return self._arrays.max_priority[0] ** np.float32(self._alpha)
        return np.float32(self._new_leaf().item())

    def _refresh_extrema(self, indices: np.ndarray) -> None:
        t = self.state.tree.arrays
        if t.has_extrema:
            _backends.load("sumtree", self.device).refresh_extrema(
                t.leaves, t.extrema, t.offsets, t.shift, indices, True
            )

    def _nest(self, outputs: Outputs) -> Batch:
        batch = Batch(outputs.tensors) if self._is_flat else Batch()
        if not self._is_flat:
            for path, tensor in outputs.tensors.items():
                put(batch, path, tensor)
        batch._outputs = outputs
        return batch

    def _own(self, out: Batch, n: int) -> Outputs:
        outputs = getattr(out, "_outputs", None)
        if not isinstance(outputs, Outputs) or outputs.owner is not self or outputs.n != n:
            raise ValueError(f"out must be a batch of {n} that this buffer's sample() has returned")
        for path, tensor in outputs.tensors.items():
            if (out.get(path) if self._is_flat else find(out, path)) is not tensor:
                raise ValueError(
                    f"out.{path} is not the tensor that sample() returned there, and would not be overwritten: keep "
                    "what you compute from a batch elsewhere, or leave out= away"
                )
        return outputs
