"""SequenceReplay: prioritized windows of consecutive steps, for recurrent networks."""

import os
from collections.abc import Mapping
from typing import Any

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
from sharpwave.replay.state import Layout
from sharpwave.replay.views import Outputs


class SequenceReplay(Replay):
    """Prioritized replay of windows of `length` consecutive steps of one episode, after `burn_in` more.

        p = min(eta max_t |td_t| + (1 - eta) mean_t |td_t| + eps, p_max),  t over the length (burn-in left out)

    ```python
    import torch
    import sharpwave

    buffer = sharpwave.SequenceReplay(10_000, num_envs=2, length=8, burn_in=2)
    obs = torch.zeros(2, 4)
    for t in range(50):
        ends = torch.full((2,), t % 25 == 24)
        buffer.add(obs=obs, next_obs=obs + 1, action=torch.zeros(2), reward=torch.ones(2), state=torch.zeros(2, 16),
                   terminated=ends, truncated=torch.zeros(2, dtype=torch.bool))
        obs = torch.where(ends[:, None], 0.0, obs + 1)
    batch = buffer.sample(4)  # batch.obs is (4, 10, 4), batch.state[:, 0] the recurrent state before it
    td_error = torch.randn(4, 8)  # one for each step after the burn-in
    buffer.update_priorities(batch.indices, td_error, batch.generations)
    ```

    Args:
        capacity: steps kept, of all environments together.
        device: where priorities and batches live.
        num_envs: environments that each `add` gets one step of.
        length: steps to train on, >= 1.
        burn_in: steps before them, to warm a recurrent state up, >= 0.
        period: a window may start at every `period`-th step of an episode, >= 1. R2D2's windows overlap by half.
        pad: False: a window never reaches past its episode's end, and episodes shorter than a window are not drawn.
            True: windows may be cut short by an end; what follows it is 0 (False), and `batch.mask` tells.
        eta: weight of the largest TD error in a sequence's priority, in [0, 1].
        alpha, beta, eps, p_max, seed, weight_norm, max_priority_over, stratified, storage, fields, backend: as in
            PrioritizedReplay.

    A window lies in one environment and one episode, and never crosses the write head, at the ring's seam too. Each
    step's recurrent state is a field like any other. Deterministic, and for several threads, as PrioritizedReplay.

    Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (R2D2).
    """

    kind = "SequenceReplay"

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        num_envs: int,
        length: int,
        burn_in: int = 0,
        period: int = 1,
        pad: bool = False,
        eta: float = 0.9,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-6,
        p_max: float = 1e6,
        seed: int = 0,
        weight_norm: WeightNorm | None = "batch",
        max_priority_over: MaxPriorityOver = "all_time",
        stratified: bool = False,
        storage: torch.device | str | os.PathLike | None = None,
        fields: Mapping[str, Any] | None = None,
        backend: Backend = "auto",
    ):
        capacity, num_envs = integer("capacity", capacity, 1), integer("num_envs", num_envs, 1)
        length, burn_in = integer("length", length, 1), integer("burn_in", burn_in, 0)
        period = integer("period", period, 1)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be in [0, 1]; got {eta}")
        self.length, self.burn_in, self.eta = length, burn_in, float(eta)
        span = burn_in + length
        ring = -(-capacity // num_envs)
        if ring < span + 3:
            raise ValueError(
                f"capacity must be at least num_envs * {span + 3} (burn_in + length + 3 steps of each); got "
                f"capacity={capacity}, num_envs={num_envs}"
            )
        layout = Layout(ring, num_envs, span=span, short=bool(pad), period=period)
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
        own = dict(num_envs=num_envs, length=length, burn_in=burn_in, period=period, pad=pad, eta=eta)
        options = dict(capacity=capacity) | own | common
        super().__init__(layout, device, storage=storage, fields=fields, backend=backend, options=options, **common)

    @taking_turns
    def sample(self, n: int, beta: float | Tensor | None = None, out: Batch | None = None) -> Batch:
        """Draw n windows, with replacement, in proportion to p^alpha.

        Args:
            n, beta, out: as in `PrioritizedReplay.sample`.

        Returns:
            A Batch of the fields, each (n, burn_in + length, ...), of mask (n, burn_in + length) bool (true where the
            step belongs to the window's episode), next_obs (n, ...), the observation after the window's last step
            (those after the others are the next rows of obs), and of indices, generations, weights, probabilities as in
            `PrioritizedReplay.sample`.

        Raises:
            ValueError: n < 1; beta < 0 or not finite; `out` not of this buffer; no window to draw (CPU).
        """
        if self.storage is None:
            raise ValueError("sample() from an empty buffer: add() steps first")
        n, beta = integer("n", n, 1), draw_beta(beta, self.device)
        if self._arrays is not None and self.storage.device.type == "cpu":
            outputs = self._new_outputs(n) if out is None else self._own(out, n)
            self._sample_cpu(outputs, beta)
            return self._nest(outputs) if out is None else out
        return self._sample_plain(n, beta, out)

    def _sample_cpu(self, outputs: Outputs, beta: float | Tensor | None) -> None:
        kernels, layout, n = self._cpu, self.state.layout, outputs.n
        ints, *_ = self._draw_cpu(outputs, beta)
        lengths, last = np.empty((2, n), np.int64)
        mask = outputs.tensors["mask"].numpy().view(np.uint8)
        kernels.sequence(ints, *self._ends, layout.ring, mask, lengths, last)
        rows = (outputs.table, self._which, ints, lengths, last)
        kernels.gather_sequences(*rows, layout.span, layout.ring, layout.short)

    def _sample_plain(self, n: int, beta: float | Tensor | None, out: Batch | None) -> Batch:
        s, layout, storage = self.state, self.state.layout, self.storage
        assert storage is not None
        outputs = None if out is None else self._own(out, n)
        if beta is None:
            beta = plain.current_beta(s)
        elif not isinstance(beta, Tensor):
            beta = torch.full((), float(beta), device=self.device)
        smallest = tree_extrema(s.tree)[0] if self.weight_norm == "buffer" else None
        drawn = plain.draw(s, n, beta, self.weight_norm, smallest, self.stratified)
        values: dict[str, Tensor] = drawn._asdict()
        slots = windows.move(drawn.indices[:, None], torch.arange(layout.span, device=self.device), layout.ring)
        goes_on = ~(self._rows("terminated", slots) | self._rows("truncated", slots))
        mask = torch.ones_like(goes_on)
        mask[:, 1:] = goes_on[:, :-1].cumprod(1).bool()
        last = windows.move(drawn.indices, mask.sum(1), layout.ring)
        for path in storage.fields:
            values[path] = self._rows(path, slots, mask if layout.short else None)
            if path == "obs" or path.startswith("obs."):
                values[f"next_{path}"] = self._rows(path, last)
        values["mask"] = mask
        if outputs is None:
            return self._nest(Outputs(self, n, values))
        for name, value in values.items():
            outputs.tensors[name].copy_(value)
        assert out is not None
        return out

    @taking_turns
    def update_priorities(
        self, indices: Tensor, td_error: Tensor, generation: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Set windows' priorities from their steps' TD errors.

        Args:
            indices, generation: as in `PrioritizedReplay.update_priorities`.
            td_error: (n, length) of the steps after the burn-in, (n, burn_in + length) of all (the burn-in is left
                out), or (n,): already one a window.
            mask: (n, length) bool, steps that count: `batch.mask[:, burn_in:]` for padded windows.

        Raises: as `PrioritizedReplay.update_priorities`.
        """
        td_error = torch.as_tensor(td_error)
        if td_error.ndim == 2:
            if td_error.shape[1] == self.length + self.burn_in:
                td_error = td_error[:, self.burn_in :]
            if td_error.shape[1] != self.length or (mask is not None and mask.shape != td_error.shape):
                raise ValueError(
                    f"td_error must be (n, {self.length}) with a mask like it, or (n,); got {tuple(td_error.shape)} "
                    f"and {None if mask is None else tuple(mask.shape)}"
                )
            td_error = windows.sequence_td(td_error.detach(), self.eta, mask)
        super().update_priorities(indices, td_error, generation)

    def _plan_outputs(self) -> None:
        storage, span = self.storage, self.state.layout.span
        assert storage is not None
        groups: dict[Shape, list[str]] = {((), torch.int64): ["indices", "generations"]}
        groups[(), torch.float32] = ["weights", "probabilities"]
        groups[(span,), torch.bool] = ["mask"]
        origins = []
        for path, field in storage.fields.items():
            groups.setdefault(((span, *field.shape), field.dtype), []).append(path)
            origins.append((path, path, 0))
            if path == "obs" or path.startswith("obs."):
                groups.setdefault((field.shape, field.dtype), []).append(f"next_{path}")
                origins.append((f"next_{path}", path, 1))
        self._plan_memory(groups, origins)
        if storage.arrays:
            self._ends = [storage.arrays[name].view(np.uint8) for name in ("terminated", "truncated")]
