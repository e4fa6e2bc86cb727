"""A prioritized sampler for torchrl's replay buffers, in the place of `torchrl.data.PrioritizedSampler`.

```python
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from sharpwave.replay.adapters.torchrl import PrioritizedSampler

buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(100_000),
    sampler=PrioritizedSampler(100_000, alpha=0.6, beta=0.4),
    priority_key="td_error",
    batch_size=256,
)
```

It needs none of torchrl's compiled extension. What torchrl's interface lacks: a draw carries no generations, so an
update of an item overwritten since it was drawn changes the new item's priority; keep draw and update together, as its
own sampler demands too. Priorities that are NaN or infinite keep the largest priority so far and are counted in
`sampler.tree.status`. The tree holds p^alpha from 2^-44 to 2^20: smaller ones count as 2^-44 (so an eps of 0 is fine);
larger ones, and negative p, raise on a CPU, and on a GPU are cut, or bad as NaN is, and counted.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpwave.ops._philox import as_signed
from sharpwave.ops.sumtree import (
    MAX_LEAF,
    sum_tree,
    tree_extrema,
    tree_rebuild,
    tree_sample,
    tree_update,
    tree_update_priorities,
)
from sharpwave.ops.sumtree.reference import INVALID, narrow
from sharpwave.replay.checks import beta_numbers, check_kinds, check_tensors

try:
    from torchrl.data.replay_buffers import samplers as torchrl_samplers
except ImportError as error:
    raise ImportError("this adapter needs torchrl: pip install 'sharpwave[torchrl]' (or torchrl>=0.11)") from error


class PrioritizedSampler(torchrl_samplers.PrioritizedSampler):
    """Draws with P(i) = p_i^alpha / sum_k p_k^alpha and weights (P(i) / min_k P(k))^-beta, as torchrl's own.

    Args:
        max_capacity, alpha, beta, eps: as there; beta may be assigned at any time, and alpha too, up to 4.
        reduction, max_priority_within_buffer: as there.
        device: of the tree; "cuda" works without torchrl's CUDA extension.
        seed: of the draws.

    A draw's info has "priority_weight" and "index", as torchrl expects.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
    ):
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64 (sums are exact in both); got {dtype}")
        self.seed = as_signed(seed)
        _bounds(alpha, eps)
        super().__init__(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, device or "cpu")

    def _init(self) -> None:
        device = self.device
        self.tree = sum_tree(self._max_capacity, device, extrema=True)
        self._largest = torch.zeros(1, device=device)
        self._offset = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self._device or torch.device("cpu")

    def _maybe_init_from_storage(self, storage: Any) -> None:
        """The tree stays where it was made."""

    @property
    def default_priority(self) -> Tensor:
        """The largest priority so far (or in the buffer), 1 at first; alpha is not applied."""
        largest = self._largest[0]
        if self._max_priority_within_buffer and self._alpha > 0:
            leaf = tree_extrema(self.tree)[1]
            largest = torch.where(leaf > 0, leaf.pow(1 / self._alpha) - self._eps, 0)
        return torch.where(largest > 0, largest, 1.0)

    def sample(self, storage: Any, batch_size: int) -> Any:
        """(index, info), as torchrl's buffers take it."""
        if len(storage) == 0:
            raise RuntimeError("cannot sample from an empty storage: extend the buffer first")
        drawn = tree_sample(self.tree, batch_size, self.seed, self._offset)
        weight = (drawn.values / tree_extrema(self.tree)[0]).pow(-self._beta)
        index: Any = drawn.indices
        if storage.ndim > 1:
            index = torch.unravel_index(index, storage.shape)
        return index, {"priority_weight": weight}

    def add(self, index: int | Tensor) -> None:
        self.extend(index)

    def extend(self, index: int | Tensor | tuple) -> None:
        index = torch.as_tensor(index).reshape(-1).to(self.device)
        leaf = (self.default_priority + self._eps).pow(self._alpha).float()
        tree_update(self.tree, index, leaf.expand(index.numel()).contiguous(), invalid="clamp")

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Set priorities p >= 0 of items; of equal indices the last wins. Index -1 is left out, as torchrl asks.

        Raises:
            ValueError: a negative priority, or one whose p^alpha is above 2^20 (CPU).
        """
        index = torch.as_tensor(index, dtype=torch.int64, device=self.device)
        if index.ndim > 1:
            if storage is None:
                raise RuntimeError("update_priority needs storage=... where the storage has more than one dimension")
            index = _ravel(index, storage.shape)
        index = index.reshape(-1)
        priority = narrow(torch.as_tensor(priority, device=self.device).detach()).reshape(-1)
        if priority.numel() not in (1, index.numel()):
            raise RuntimeError(f"priority must hold 1 or {index.numel()} numbers; got {priority.numel()}")
        priority = priority.expand(index.numel())
        keep = index >= 0
        self._set(index[keep], priority[keep].contiguous())

    def _set(self, index: Tensor, priority: Tensor) -> None:
        if index.numel():
            eps, p_max = _bounds(self._alpha, self._eps)
            large = (priority > p_max) & priority.isfinite()
            if priority.is_cpu and ((priority < 0) | large).any():
                raise ValueError(
                    f"priority must be in [0, {p_max:.4g}] with alpha={self._alpha} (the tree holds p^alpha up to "
                    f"2^20): scale it down; got {priority.min().item():.4g} to {priority.max().item():.4g}"
                )
            self.tree.status[INVALID] += large.sum()
            priority = torch.where(priority < 0, torch.nan, priority)
            # torchrl keeps the largest p, this op the largest p + eps.
            bound = self._largest + eps
            tree_update_priorities(self.tree, index, priority, bound, alpha=self._alpha, eps=eps, p_max=p_max)
            self._largest.copy_((bound - eps).clamp(min=0))

    def _retransform_priority_trees(self, old_alpha: float, new_alpha: float) -> None:
        try:
            _bounds(new_alpha, self._eps)
        except ValueError:
            self._alpha = old_alpha
            raise
        leaves = self.tree.leaves
        if old_alpha > 0:
            new = leaves.double().pow(new_alpha / old_alpha).clamp(2.0**-44, MAX_LEAF)
            leaves.copy_(torch.where(leaves > 0, new, 0))
            tree_rebuild(self.tree)

    def state_dict(self) -> dict[str, Any]:
        return {
            "leaves": self.tree.leaves.clone(),
            "largest": self._largest.clone(),
            "offset": self._offset.clone(),
            "seed": self.seed,
            "alpha": float(self._alpha),
            "beta": float(self._beta),
            "eps": float(self._eps),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`, copying it.

        Raises:
            ValueError: it is of another capacity, or damaged. The sampler is as it was.
        """
        numbers = dict.fromkeys(("alpha", "beta", "eps"), (int, float))
        check_kinds(state_dict, {"leaves": Tensor, "largest": Tensor, "offset": Tensor, "seed": int} | numbers)
        leaves = state_dict["leaves"]
        if leaves.shape != self.tree.leaves.shape:
            raise ValueError(f"the state holds {leaves.numel()} priorities; this sampler {self._max_capacity}")
        check_tensors(
            state_dict,
            {
                "leaves": (self.tree.leaves, MAX_LEAF),
                "largest": (self._largest, torch.finfo(torch.float32).max),
                "offset": (self._offset, 2**48 - 1),
            },
        )
        _bounds(state_dict["alpha"], state_dict["eps"])
        beta_numbers(state_dict["beta"])
        self.tree.leaves.copy_(leaves)
        tree_rebuild(self.tree)
        self._largest.copy_(state_dict["largest"])
        self._offset.copy_(state_dict["offset"])
        self.seed = state_dict["seed"]
        self._alpha, self._beta, self._eps = (state_dict[k] for k in ("alpha", "beta", "eps"))

    def dumps(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(exist_ok=True)
        state = self.state_dict()
        tensors = {k: x.cpu().contiguous() for k, x in state.items() if isinstance(x, Tensor)}
        save_file(tensors, path / "sampler.safetensors")
        (path / "sampler.json").write_text(json.dumps({k: x for k, x in state.items() if k not in tensors}))

    def loads(self, path: str | Path) -> None:
        from safetensors.torch import load_file

        path = Path(path)
        numbers = json.loads((path / "sampler.json").read_text())
        self.load_state_dict(load_file(path / "sampler.safetensors") | numbers)


def _bounds(alpha: float, eps: float) -> tuple[float, float]:
    """What eps and the largest priority must be for every p^alpha to fit into the tree."""
    if not (0 <= alpha <= 4 and 0 <= eps < 1):
        raise ValueError(f"alpha must be in [0, 4] and eps in [0, 1); got alpha={alpha}, eps={eps}")
    # A little within the bounds, since powers are rounded; by logarithms, since they overflow.
    least = max(-100.0, -43.99 / alpha) if alpha else -100.0
    most = min(126.0, 19.999 / alpha) if alpha else 126.0
    return max(float(eps), 2.0**least), 2.0**most


def _ravel(index: Tensor, shape: torch.Size) -> Tensor:
    flat = index[:, 0]
    for k in range(1, index.shape[1]):
        flat = flat * shape[k] + index[:, k]
    return flat
