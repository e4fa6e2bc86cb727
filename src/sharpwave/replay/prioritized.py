"""PrioritizedReplay: proportional prioritized experience replay."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpwave.ops._backends import Backend, integer
from sharpwave.ops.sumtree import tree_extrema
from sharpwave.replay import windows
from sharpwave.replay.checks import Beta, MaxPriorityOver, WeightNorm, draw_beta
from sharpwave.replay.core import Replay, Shape, taking_turns
from sharpwave.replay.kernels import reference as plain
from sharpwave.replay.nest import Batch
from sharpwave.replay.shards import gathering, join, tell_nothing
from sharpwave.replay.state import HELD, Layout
from sharpwave.replay.views import Outputs

if TYPE_CHECKING:
    from sharpwave.replay.shards import Group


class PrioritizedReplay(Replay):
    """Proportional prioritized replay (Schaul et al. 2016), on the device where the network is.

        P(i) = p_i^alpha / sum_k p_k^alpha          w_i = (N P(i))^-beta, divided by the largest
        p_i = min(|td_i| + eps, p_max)              a new item has the largest p so far (*)

    ```python
    import torch
    import sharpwave

    buffer = sharpwave.PrioritizedReplay(10_000, alpha=0.6, beta=0.4)
    buffer.add(obs=torch.randn(32, 4), action=torch.randint(2, (32,)), reward=torch.randn(32))
    batch = buffer.sample(16)
    td_error = batch.reward  # whatever your loss compares
    loss = (batch.weights * td_error**2).mean()
    buffer.update_priorities(batch.indices, td_error, batch.generations)
    ```

    Args:
        capacity: transitions kept, 1 to 2^31 - 1.
        device: where priorities and batches live.
        alpha: exponent of priorities, >= 0; 0 draws uniformly.
        beta: exponent of the importance weights, >= 0; or (first, last, draws), which goes from first to last over that
            many drawn items, counted on the device.
        eps, p_max: bounds of p. (*) The first items have p = 1, or the bound nearest to it.
        seed: of the draws.
        n_step: rewards summed before bootstrapping, when the item is drawn; more than 1 needs num_envs.
        gamma: discount of one step.
        num_envs: None keeps unrelated items, as they are given. A number keeps that many environments in time order,
            each in a ring of its own: next_obs is then found by index, n-step returns stop where episodes do, and every
            observation is stored once. An episode's end takes one slot more, for its true final observation.
        frame_stack: with num_envs: how many frames an observation shows; `add` gets the newest alone, batches hold
            (B, frame_stack, ...), and a stack repeats the episode's first frame where it begins.
        weight_norm: what the largest weight is taken over: the "batch", the "buffer" (by its smallest priority; updates
            then cost more), or None: not divided.
        max_priority_over: new items enter with the largest priority of "all_time", or of what the "buffer" holds.
        stratified: draw one item from each n-th of the total.
        storage: where transitions lie: None (on `device`), another device, "pinned" host memory, or a pathlib.Path: a
            new directory of memory-mapped files. Where it is not the device, sample() waits for the indices.
        fields: {name: (shape of one item, dtype)}, or None: taken from the first `add`.
        backend: "auto" follows the device; "reference" is plain PyTorch.

    Threads may share a buffer: their calls take turns. (A batch is the caller's, so give each thread its own `out`; on
    a GPU let them use one stream.)

    Deterministic: equal seeds and calls give equal draws, on every device. On a GPU nothing in add, sample and
    update_priorities waits, and a captured graph of them can be replayed while the buffer fills, wraps and overwrites.
    """

    kind = "PrioritizedReplay"

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-6,
        p_max: float = 1e6,
        seed: int = 0,
        n_step: int = 1,
        gamma: float = 0.99,
        num_envs: int | None = None,
        frame_stack: int = 1,
        weight_norm: WeightNorm | None = "batch",
        max_priority_over: MaxPriorityOver = "all_time",
        stratified: bool = False,
        storage: torch.device | str | os.PathLike | None = None,
        fields: Mapping[str, Any] | None = None,
        backend: Backend = "auto",
    ):
        capacity, n_step = integer("capacity", capacity, 1), integer("n_step", n_step, 1)
        frame_stack = integer("frame_stack", frame_stack, 1)
        num_envs = None if num_envs is None else integer("num_envs", num_envs, 1)
        if num_envs is None and (n_step > 1 or frame_stack > 1):
            raise ValueError("n_step and frame_stack above 1 need num_envs: only then are steps kept in time order")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1]; got {gamma}")
        layout = Layout(capacity, 0)
        if num_envs is not None:
            ring = -(-capacity // num_envs)
            least = n_step + frame_stack + 2
            if ring < least:
                raise ValueError(
                    f"capacity must be at least num_envs * {least} (n_step + frame_stack + 2 steps of each); got "
                    f"capacity={capacity}, num_envs={num_envs}"
                )
            layout = Layout(ring, num_envs, span=n_step, frames=frame_stack)
        self.gamma, self.n_step = float(gamma), n_step
        common: dict[str, Any] = dict(
            alpha=alpha,
            beta=beta,
            eps=eps,
            p_max=p_max,
            seed=seed,
            weight_norm=weight_norm,
            max_priority_over=max_priority_over,
            stratified=stratified,
        )
        own = dict(capacity=capacity, n_step=n_step, gamma=gamma, num_envs=num_envs, frame_stack=frame_stack)
        super().__init__(
            layout, device, storage=storage, fields=fields, backend=backend, options=own | common, **common
        )

    @taking_turns
    def sample(
        self, n: int, beta: float | Tensor | None = None, out: Batch | None = None, group: "Group | None" = None
    ) -> Batch:
        """Draw n items, with replacement, in proportion to p^alpha.

        Args:
            n: how many, >= 1.
            beta: for this draw; a float or a 0-d float32 tensor on the device (a GPU does not look at its value). None:
                the buffer's own.
            out: a batch of n that this buffer returned before: its tensors are overwritten, and nothing is allocated.
            group: a torch.distributed process group, each of whose ranks holds a shard of one buffer, and calls this
                with the same n and beta. Then `probabilities` are those of the union, and `weights` too: so that the
                average over the ranks of mean(weights * loss) estimates what one buffer's would, without bias. New
                items enter with the largest priority of all shards, as of the last draw. A rank that has nothing to
                draw raises, or on a GPU gets weights of 0; the others draw all the same. A function that takes a tensor
                to (R, ...), those of all ranks, does as well.

        Returns:
            A Batch of the fields, each (n, ...), and of
            indices, generations: (n,) int64, to give back to `update_priorities`;
            weights: (n,) float32, for the loss; probabilities: (n,) float32, P(i);
            discount: (n,) float32, gamma^m, or 0 where the episode terminated, if `terminated` is a field.
            With num_envs, reward is the n-step return over m <= n_step steps, next_obs the observation after them, and
            terminated and truncated tell of the last of them; the target is reward + discount * V(next_obs).

        Nothing to draw raises on a CPU. On a GPU, where that would have to wait, weights are 0, generations -2.

        Raises:
            ValueError: n < 1; beta < 0 or not finite; `out` not of this buffer; nothing to draw (CPU).
        """
        n, beta = integer("n", n, 1), draw_beta(beta, self.device)
        if group is not None:
            return self._sample_shard(n, beta, out, gathering(group))
        self._require_storage()
        return self._sample(n, beta, out)

    def _require_storage(self) -> None:
        if self.storage is None:
            raise ValueError("sample() from an empty buffer: add() transitions first")

    def _sample(self, n: int, beta: float | Tensor | None, out: Batch | None) -> Batch:
        if self._arrays is None:
            sample = self._sample_plain if self._triton is None else self._sample_triton
            return sample(n, beta, out)
        outputs = self._new_outputs(n) if out is None else self._own(out, n)
        self._sample_cpu(outputs, beta)
        return self._nest(outputs) if out is None else out

    def _sample_shard(
        self, n: int, beta: float | Tensor | None, out: Batch | None, gather: Callable[[Tensor], Tensor]
    ) -> Batch:
        s = self.state
        if not isinstance(beta, Tensor):
            beta = plain.current_beta(s) if beta is None else torch.full((), float(beta), device=self.device)
        try:
            self._require_storage()
            batch = self._sample(n, beta, out)
        except ValueError:
            tell_nothing(gather, self.device)
            raise
        p, smallest = batch.probabilities, None
        if self.weight_norm == "batch":
            smallest = torch.where(p > 0, p, torch.inf).amin()
        elif self.weight_norm == "buffer":
            smallest = tree_extrema(s.tree)[0] / self.total_priority  # not read where nothing is held
        union = join(gather, p, beta, self.total_priority, s.counters[HELD], s.max_priority[0], smallest)
        batch.weights.copy_(union.weights)
        p.copy_(union.probabilities)
        s.max_priority.copy_(union.max_priority)
        return batch

    # On a CPU

    def _plan_outputs(self) -> None:
        storage, layout = self.storage, self.state.layout
        assert storage is not None
        stacked = (layout.frames,) if layout.frames > 1 else ()
        self._has_discount = "terminated" in storage.fields
        # What the draw's kernel writes, then what rows are copied into.
        self._computed = ["reward", "terminated", "truncated"] if layout.envs else []
        plan: dict[str, Shape] = {}
        origins: list[tuple[str, str, int]] = []
        for path, field in storage.fields.items():
            observed = bool(layout.envs) and (path == "obs" or path.startswith("obs."))
            plan[path] = ((*stacked, *field.shape) if observed else field.shape, field.dtype)
            if path not in self._computed:
                origins.append((path, path, 1 if observed else 0))
            if observed:
                plan[f"next_{path}"] = plan[path]
                origins.append((f"next_{path}", path, 2))
        groups: dict[Shape, list[str]] = {((), torch.int64): ["indices", "generations"]}
        groups[(), torch.float32] = ["weights", "probabilities", "discount"] + (["reward"] if layout.envs else [])
        if layout.envs:
            groups[(), torch.bool] = ["terminated", "truncated"]
        for path, key in plan.items():
            if path not in self._computed:
                groups.setdefault(key, []).append(path)
        self._plan_memory(groups, origins)
        if self._arrays is not None and layout.envs:
            flags = [storage.arrays[name].view(np.uint8) for name in ("terminated", "truncated")]
            self._step_arrays = (storage.arrays["reward"], *flags)
        elif self._arrays is not None and self._has_discount:
            self._step_arrays = (storage.arrays["terminated"].view(np.uint8),)

    def _new_outputs(self, n: int) -> Outputs:
        outputs = super()._new_outputs(n)
        if not self._has_discount:
            del outputs.tensors["discount"]
        return outputs

    def _sample_cpu(self, outputs: Outputs, beta: float | Tensor | None) -> None:
        kernels, a, layout = self._cpu, self._arrays, self.state.layout
        ints, floats, *rest = self._draw_cpu(outputs, beta)
        assert a is not None
        if not layout.envs:
            if self._has_discount:
                kernels.discount(ints, self._step_arrays[0], np.float32(self.gamma), floats)
            kernels.gather(outputs.table, ints)
            return
        slots = np.empty((3, outputs.n, layout.frames), np.int64)
        kernels.window(
            ints,
            *self._step_arrays,
            a.step,
            np.float32(self.gamma),
            layout.span,
            layout.ring,
            layout.frames,
            floats,
            rest[0].view(np.uint8),
            slots,
        )
        kernels.gather_stacks(outputs.table, self._which, slots)

    # On a GPU

    def _sample_triton(self, n: int, beta: float | Tensor | None, out: Batch | None) -> Batch:
        kernels, s, storage = self._triton, self.state, self.storage
        assert storage is not None
        if n > kernels.MAX_PROGRAMS:
            return self._sample_plain(n, beta, out)
        norm, smallest = kernels.BATCH_NORM, None
        if self.weight_norm is None:
            norm = kernels.NO_NORM
        elif self.weight_norm == "buffer":
            norm, smallest = kernels.BUFFER_NORM, tree_extrema(s.tree)[0]
        if beta is not None and not isinstance(beta, Tensor):
            beta = torch.full((), float(beta), device=self.device)
        outputs = self._gpu_outputs(n) if out is None else self._own(out, n)
        fields = (storage.tensors, self._origins)
        kernels.sample(s, n, outputs.tensors, *fields, beta, norm, smallest, self.stratified, self.gamma)
        return self._nest(outputs) if out is None else out

    def _gpu_outputs(self, n: int) -> Outputs:
        tensors = {
            name: torch.empty((n, *shape), dtype=dtype, device=self.device)
            for (_, *shape), dtype, _, _, names in self._groups
            for name in names
            if name != "discount" or self._has_discount
        }
        return Outputs(self, n, tensors)

    # Anywhere else

    def _sample_plain(self, n: int, beta: float | Tensor | None, out: Batch | None) -> Batch:
        s, storage, layout = self.state, self.storage, self.state.layout
        assert storage is not None
        outputs = None if out is None else self._own(out, n)
        if beta is None:
            beta = plain.current_beta(s)
        elif not isinstance(beta, Tensor):
            beta = torch.full((), float(beta), device=self.device)
        smallest = tree_extrema(s.tree)[0] if self.weight_norm == "buffer" else None
        drawn = plain.draw(s, n, beta, self.weight_norm, smallest, self.stratified)
        values: dict[str, Tensor] = drawn._asdict()
        first = last = drawn.indices
        stacks = (first, first)
        if layout.envs:
            steps = windows.move(first[:, None], torch.arange(layout.span, device=self.device), layout.ring)
            terminated, truncated = self._rows("terminated", steps), self._rows("truncated", steps)
            reward, discount, length = windows.n_step_return(
                self._rows("reward", steps), terminated, truncated, self.gamma
            )
            last = windows.move(first, length - 1, layout.ring)
            column = length[:, None] - 1
            values |= {
                "discount": discount,
                "reward": reward,
                "terminated": terminated.gather(1, column)[:, 0],
                "truncated": truncated.gather(1, column)[:, 0],
            }
            following = windows.move(last, 1, layout.ring)
            stacks = (
                windows.stack_slots(first, s.step[first], layout.frames, layout.ring),
                windows.stack_slots(following, s.step[last] + 1, layout.frames, layout.ring),
            )
            if layout.frames == 1:
                stacks = (first, following)
        elif self._has_discount:
            values["discount"] = torch.where(self._rows("terminated", first), 0.0, self.gamma)
        for name, origin, which in self._origins:
            values[name] = self._rows(origin, first if which == 0 else stacks[which - 1])
        if outputs is None:
            return self._nest(Outputs(self, n, values))
        for name, value in values.items():
            outputs.tensors[name].copy_(value)
        assert out is not None
        return out
