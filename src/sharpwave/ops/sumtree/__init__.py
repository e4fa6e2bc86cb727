"""The wide sum tree: set any leaf, and draw in proportion to the leaves, in time that hardly depends on their number.

Sums are exact. A leaf counts as the integer floor(2^44 leaf) (at least 1 if the leaf is positive), sums are integers,
and a draw is an integer below the total, chosen by 64 random bits. So

- a sum depends on the leaves alone, never on the history or order of updates: nothing drifts;
- any fan-out gives the same sums and draws, so a CPU may use 16 and a GPU 32, and every backend returns the same
  indices for equal leaves, seed and offset, bit for bit;
- a draw cannot reach a leaf of 0, an unwritten slot or the padding, at any random number: mass is compared, never
  rounded.

Leaves from 2^-20 to 2^20 (about 1e-6 to 1e6, the range of clamped priorities) count with their exact float32 value,
smaller ones to the nearest unit of 2^-44 = 5.7e-14 below; 2^20 is the largest leaf. With 2^31 - 1 leaves of 2^20 the
total is below 2^51, or 2^95 units: two int64 words a node.
"""

import functools
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops.cdf import check_offset, split_seed
from sharpwave.ops.sumtree import reference
from sharpwave.ops.sumtree.reference import MAX_LEAF

__all__ = [
    "MAX_LEAF",
    "Tree",
    "TreeDraw",
    "sum_tree",
    "tree_extrema",
    "tree_rebuild",
    "tree_sample",
    "tree_total",
    "tree_update",
    "tree_update_priorities",
]


@dataclass(frozen=True)
class Tree:
    """State of a sum tree: tensors that the tree ops change in place."""

    storage: Tensor
    """(capacity, padded with zeros,) float32."""
    nodes: Tensor
    """(nodes, 2) int64: each node's sum as digits worth 2^-12 and 2^-44, top level first."""
    extrema: Tensor | None
    """(nodes, 2) float32: each node's smallest positive and largest leaf; None if not kept."""
    status: Tensor
    """(4,) int64: how many invalid values, indices out of range, draws from an empty tree, stale updates so far."""
    capacity: int
    fanout: int
    arrays: Any = field(default=None, repr=False)
    """On a CPU, the NumPy views that its kernels take."""

    @property
    def leaves(self) -> Tensor:
        """(capacity,) float32, a view: to look at, or to overwrite before `tree_rebuild`."""
        return self.storage[: self.capacity]

    def __reduce__(self):
        # The views are of these tensors' memory: a copy needs views of its own.
        return _tree, (self.storage, self.nodes, self.extrema, self.status, self.capacity, self.fanout)


class TreeDraw(NamedTuple):
    """Drawn indices (n,) int64, their leaves (n,) float32, and the tree's total, 0-d float64: P_k = value_k / total."""

    indices: Tensor
    values: Tensor
    total: Tensor


def sum_tree(
    capacity: int, device: torch.device | str = "cpu", *, extrema: bool = False, fanout: int | None = None
) -> Tree:
    """A tree of `capacity` zero leaves.

    Args:
        capacity: number of leaves, 1 to 2^31 - 1; any number.
        device: where it lives.
        extrema: keep each node's smallest positive and largest leaf too (for `tree_extrema`), at some cost an update.
        fanout: children a node, a power of two from 2 to 1024; changes speed, never a result. Default: 16 on a CPU,
            32 elsewhere.

    Raises:
        ValueError: an argument out of range.
        RuntimeError: a GPU is asked for, and PyTorch sees none.
    """
    device = _backends.present(device)
    capacity = _backends.integer("capacity", capacity, 1)
    if capacity >= 2**31:
        raise ValueError(f"capacity must be in [1, 2^31); got {capacity}")
    if fanout is None:
        fanout = 16 if device.type == "cpu" else 32
    if fanout not in (2**k for k in range(1, 11)):
        raise ValueError(f"fanout must be a power of two from 2 to 1024; got {fanout}")
    size = reference.level_offsets(capacity, fanout)[-1]
    low_high = None
    if extrema:
        low_high = _zeros((size, 2), torch.float32, device)
        low_high[:, 0] = torch.inf
    storage = _zeros((reference.padded_leaves(capacity, fanout),), torch.float32, device)
    nodes = _zeros((size, 2), torch.int64, device)
    status = _zeros((4,), torch.int64, device)
    return _tree(storage, nodes, low_high, status, capacity, fanout)


def _tree(storage: Tensor, nodes: Tensor, extrema: Tensor | None, status: Tensor, capacity: int, fanout: int) -> Tree:
    state = (storage, nodes, extrema, status, capacity, fanout)
    on_cpu = _backends.choose("sumtree", storage.device.type) == "cpu"
    return Tree(*state, _cpu_kernels().arrays(*state) if on_cpu else None)


def tree_update(
    tree: Tree,
    indices: Tensor,
    values: Tensor,
    *,
    invalid: Literal["refuse", "clamp"] = "refuse",
    backend: _backends.Backend = "auto",
) -> None:
    """Set leaves: leaf[indices_k] = values_k, for k = 0, 1, ... in this order, and keep every sum.

    Args:
        tree: changed in place.
        indices: (n,) int64, n >= 0, in [0, capacity). Of equal indices the last wins.
        values: (n,) floating, stored as float32; in [0, 2^20].
        invalid: what becomes of a NaN, infinite, negative or too large value. "refuse": it is as if that item were not
            there. "clamp": NaN and negative values store 0, too large ones 2^20. Both are counted in tree.status.

    Deterministic: the same bits on every backend and run.

    An index out of range raises on a CPU before anything changes; on a GPU its item is ignored and counted.
    One launch for up to 8192 items on a GPU (and one more a level for extrema); no allocation, no wait: safe in a
    captured graph.

    Raises:
        IndexError: an index out of range (CPU).
        ValueError: wrong shapes, devices or options.
        TypeError: wrong dtypes.
    """
    if invalid not in ("refuse", "clamp"):
        raise ValueError(f"invalid must be 'refuse' or 'clamp'; got {invalid!r}")
    _check_items(tree, indices, values, "values")
    clamp = invalid == "clamp"
    if _direct(tree, backend, indices, values):
        kernels = _cpu_kernels()
        kernels.update_arrays(tree.arrays, indices.numpy(), kernels.float32_array(values), clamp)
        return
    state = (tree.storage, tree.nodes, tree.extrema, tree.status)
    _update_op(*state, indices, values, tree.capacity, tree.fanout, clamp, backend)


def tree_update_priorities(
    tree: Tree,
    indices: Tensor,
    td_error: Tensor,
    max_priority: Tensor,
    *,
    alpha: float,
    eps: float = 1e-6,
    p_max: float = 1e6,
    generation: Tensor | None = None,
    generations: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> None:
    """Set leaves from TD errors: proportional priorities, raised to alpha once, in the same launch as `tree_update`.

        p_k = min(|td_error_k| + eps, p_max);   leaf[indices_k] = p_k^alpha;   max_priority = max(max_priority, p_k)

    A NaN or infinite TD error gives p_k = the new max_priority, and is counted in tree.status. A finite float64 one
    beyond float32's range counts as its largest number.

    Args:
        tree: changed in place.
        indices: (n,) int64 in [0, capacity), n >= 0; of equal indices the last wins.
        td_error: (n,), of any floating dtype, signed; read as it is, computed in float32.
        max_priority: float32 tensor of one element on the tree's device, the largest p ever (not raised to alpha);
            updated in place. At least 0: a negative or NaN one raises on a CPU; on a GPU, where that would have to
            wait, it may stay what it is.
        alpha: >= 0. 0 makes every leaf 1.
        eps: a normal float32 number > 0; eps^alpha at least 2^-44.
        p_max: >= eps, finite in float32; p_max^alpha at most 2^20.
        generation, generations: (n,) and (capacity,), int64, both or neither. An item is stale, which means dropped
            and counted in tree.status, if its generation_k differs from generations[indices_k] or is negative, or if
            its leaf is 0: what cannot be drawn was not drawn.

    Deterministic; leaves of different backends may differ in the last places, by the power function.

    Raises:
        IndexError: an index out of range (CPU; a GPU ignores and counts the item).
        ValueError: wrong shapes, devices or numbers.
        TypeError: wrong dtypes.

    Source: Schaul et al. 2016 (arXiv 1511.05952), eq. 1 and section 3.3.
    """
    _check_items(tree, indices, td_error, "td_error")
    check_settings(alpha, eps, p_max)
    if max_priority.numel() != 1 or max_priority.dtype != torch.float32 or max_priority.device != tree.storage.device:
        raise ValueError(
            f"max_priority must be a float32 tensor of one element on {tree.storage.device}; got "
            f"{tuple(max_priority.shape)} {max_priority.dtype} on {max_priority.device}"
        )
    if (generation is None) != (generations is None):
        raise ValueError("generation and generations must be given together")
    if generation is not None and generations is not None:
        for name, x, size in (("generation", generation, indices.numel()), ("generations", generations, tree.capacity)):
            if x.shape != (size,) or x.dtype != torch.int64 or x.device != indices.device:
                raise ValueError(
                    f"{name} must be ({size},) int64 on {indices.device}; got {tuple(x.shape)} {x.dtype} on {x.device}"
                )
    if _direct(tree, backend, indices, td_error):
        kernels = _cpu_kernels()
        kernels.update_priorities_arrays(
            tree.arrays,
            indices.numpy(),
            kernels.float32_array(reference.narrow(td_error)),
            max_priority.view(1).numpy(),
            None if generation is None else generation.numpy(),
            None if generations is None else generations.numpy(),
            alpha,
            eps,
            p_max,
        )
        return
    state = (tree.storage, tree.nodes, tree.extrema, tree.status)
    shape = (tree.capacity, tree.fanout)
    _priorities_op(*state, indices, td_error, max_priority, generation, generations, *shape, alpha, eps, p_max, backend)


def tree_rebuild(tree: Tree, *, backend: _backends.Backend = "auto") -> None:
    """Recompute every sum (and extremum) from the leaves, after they were written directly.

    Leaves must be in [0, 2^20] and the padding 0. What it computes equals what any history of updates to the same
    leaves has left, bit for bit.
    """
    _rebuild_op(tree.storage, tree.nodes, tree.extrema, tree.capacity, tree.fanout, backend)


def tree_sample(
    tree: Tree,
    n: int,
    seed: int | Tensor,
    offset: Tensor,
    *,
    stratified: bool = False,
    out: TreeDraw | None = None,
    backend: _backends.Backend = "auto",
) -> TreeDraw:
    """Draw n leaves, with replacement, in proportion to their values.

        U_k uniform in {0, ..., 2^64 - 1}            (stratified: U_k replaced by floor((2^64 k + U_k) / n))
        i_k = the first i with L_0 + ... + L_i > floor(U_k sum(L) / 2^64),   L_i = floor(2^44 leaf_i)

    Args:
        tree: not changed, but for its status.
        n: how many, >= 1.
        seed: the stream's key, an int or a 0-d int64 tensor on the tree's device.
        offset: int64 tensor of one element on the tree's device, in [0, 2^48): the number of the next draw; advanced by
            n on the device, so that a replayed graph draws anew.
        stratified: one draw in each n-th of the total; indices come out sorted.
        out: what an earlier call with this n returned, or tensors like it: overwritten and returned; nothing is then
            allocated.

    Returns:
        Indices, leaves and total. Bit for bit the same on every backend. Draws continue one stream: n and m draws equal
        n + m draws (not when stratified).

    Nothing to draw from (total 0) raises on a CPU; on a GPU, where raising would have to wait, indices and values are 0
    and tree.status[2] is raised.

    Raises:
        ValueError: n, seed, offset or out wrong; an empty tree (CPU).

    Source: the proportional variant of Schaul et al. 2016 (arXiv 1511.05952), appendix B.2.1.
    """
    n = _backends.integer("n", n, 1)
    number, seed_tensor = split_seed(seed, tree.storage.device)
    check_offset(offset, tree.storage.device)
    if out is not None:
        _check_out(tree, n, out)
    if _direct(tree, backend, offset, offset):
        kernels = _cpu_kernels()
        key = number if seed_tensor is None else int(seed_tensor)
        where = offset.numpy() if offset.ndim else offset.view(1).numpy()
        drawn = kernels.sample_arrays(tree.arrays, n, key, where, stratified, out)
        return TreeDraw(*drawn) if out is None else out
    state = (tree.storage, tree.nodes, tree.status, offset)
    rest = (n, number, seed_tensor, tree.capacity, tree.fanout, stratified, backend)
    if out is None:
        return TreeDraw(*_sample_op(*state, *rest))
    _sample_out_op(*state, *out, *rest)
    return out


def tree_total(tree: Tree) -> Tensor:
    """The sum of all leaves, 0-d float64, from the exact integer sum. Not synchronised: reading it waits."""
    return reference.total_value(reference.carry(*tree.nodes[: tree.fanout].sum(0)))


def tree_extrema(tree: Tree) -> tuple[Tensor, Tensor]:
    """The smallest positive leaf (inf if none) and the largest leaf, 0-d float32.

    Raises:
        ValueError: the tree was made without extrema.
    """
    if tree.extrema is None:
        raise ValueError("this tree keeps no extrema: make it with extrema=True")
    top = tree.extrema[: tree.fanout]
    return top[:, 0].amin(), top[:, 1].amax()


def check_settings(alpha: float, eps: float, p_max: float) -> None:
    """Raise unless each leaf that p^alpha gives, in float32, is positive and at most MAX_LEAF."""
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= eps <= p_max <= limits.max:
        raise ValueError(
            f"eps and p_max must satisfy 0 < eps <= p_max, as normal float32 numbers ({limits.tiny:.2g} to "
            f"{limits.max:.2g}); got eps={eps}, p_max={p_max}"
        )
    # By logarithms, since powers overflow.
    if not (alpha >= 0 and alpha * math.log2(p_max) <= 20 and alpha * math.log2(eps) >= -44):
        raise ValueError(
            f"alpha must be >= 0, with p_max**alpha at most 2^20 and eps**alpha at least 2^-44; got alpha={alpha}, "
            f"p_max={p_max}, eps={eps}"
        )


@functools.cache
def _cpu_kernels() -> ModuleType:
    return _backends.load("sumtree", torch.device("cpu"), "cpu")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks for huge pages where PyTorch does not: at 1e8 leaves half of a draw's time is page table walks.
    return torch.from_numpy(np.zeros(shape, np.float32 if dtype == torch.float32 else np.int64))


def _check_items(tree: Tree, indices: Tensor, values: Tensor, name: str) -> None:
    _backends.require_tensors(**{"indices": indices, name: values})
    if indices.ndim != 1 or values.shape != indices.shape:
        raise ValueError(f"indices and {name} must both be (n,); got {tuple(indices.shape)} and {tuple(values.shape)}")
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be int64; got {indices.dtype}: pass indices.long()")
    if not values.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating; got {values.dtype}")
    if indices.device != tree.storage.device or values.device != tree.storage.device:
        raise ValueError(
            f"indices and {name} must be on the tree's device, {tree.storage.device}; got {indices.device} and "
            f"{values.device}: move them with .to()"
        )


def _check_out(tree: Tree, n: int, out: TreeDraw) -> None:
    likes = (((n,), torch.int64), ((n,), torch.float32), ((), torch.float64))
    for name, x, (shape, dtype) in zip(TreeDraw._fields, out, likes, strict=True):
        if x.shape != shape or x.dtype != dtype or x.device != tree.storage.device or not x.is_contiguous():
            raise ValueError(
                f"out.{name} must be {shape} {dtype} on {tree.storage.device}, contiguous; got {tuple(x.shape)} "
                f"{x.dtype} on {x.device}: pass what a call with this n returned"
            )


def _update(storage, nodes, extrema, status, indices, values, capacity, fanout, clamp, backend):
    impl = _backends.load("sumtree", storage.device, backend)
    impl.tree_update(
        storage, nodes, extrema, status, indices.contiguous(), values.contiguous(), capacity, fanout, clamp
    )


def _update_priorities(
    storage,
    nodes,
    extrema,
    status,
    indices,
    td_error,
    max_priority,
    generation,
    generations,
    capacity,
    fanout,
    alpha,
    eps,
    p_max,
    backend,
):
    impl = _backends.load("sumtree", storage.device, backend)
    impl.tree_update_priorities(
        storage,
        nodes,
        extrema,
        status,
        indices.contiguous(),
        td_error.contiguous(),
        max_priority,
        None if generation is None else generation.contiguous(),
        None if generations is None else generations.contiguous(),
        capacity,
        fanout,
        alpha,
        eps,
        p_max,
    )


def _rebuild(storage, nodes, extrema, capacity, fanout, backend):
    _backends.load("sumtree", storage.device, backend).tree_rebuild(storage, nodes, extrema, capacity, fanout)


def _sample(storage, nodes, status, offset, n, seed, seed_tensor, capacity, fanout, stratified, backend):
    impl = _backends.load("sumtree", storage.device, backend)
    key = seed if seed_tensor is None else seed_tensor
    return impl.tree_sample(storage, nodes, status, n, key, offset, capacity, fanout, stratified)


def _sample_out(
    storage,
    nodes,
    status,
    offset,
    indices,
    values,
    total,
    n,
    seed,
    seed_tensor,
    capacity,
    fanout,
    stratified,
    backend,
):
    impl = _backends.load("sumtree", storage.device, backend)
    key = seed if seed_tensor is None else seed_tensor
    out = (indices, values, total)
    impl.tree_sample(storage, nodes, status, n, key, offset, capacity, fanout, stratified, out)


def _sample_fake(storage, _nodes, _status, _offset, n, *_args):
    return (
        storage.new_empty(n, dtype=torch.int64),
        storage.new_empty(n),
        storage.new_empty((), dtype=torch.float64),
    )


def _direct(tree: Tree, backend: str, x: Tensor, y: Tensor) -> bool:
    """Whether to pass the dispatcher by: on a CPU, on plain contiguous tensors, outside any tracing.

    The dispatcher takes about 15 us a call, as long as updating or drawing 100 leaves does.
    """
    return (
        tree.arrays is not None
        and backend in ("auto", "cpu")
        and type(x) is Tensor
        and type(y) is Tensor
        and x.is_contiguous()
        and y.is_contiguous()
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


_STATE = "Tensor(a!) storage, Tensor(b!) nodes, Tensor(c!)? extrema"
_update_op = register(
    f"tree_update({_STATE}, Tensor(d!) status, Tensor indices, Tensor values, int capacity, int fanout, bool clamp, "
    "str backend) -> ()",
    _update,
    lambda *_: None,
)
_priorities_op = register(
    f"tree_update_priorities({_STATE}, Tensor(d!) status, Tensor indices, Tensor td_error, Tensor(e!) max_priority, "
    "Tensor? generation, Tensor? generations, int capacity, int fanout, float alpha, float eps, float p_max, "
    "str backend) -> ()",
    _update_priorities,
    lambda *_: None,
)
_rebuild_op = register(
    "tree_rebuild(Tensor storage, Tensor(a!) nodes, Tensor(b!)? extrema, int capacity, int fanout, str backend) -> ()",
    _rebuild,
    lambda *_: None,
)
_sample_op = register(
    "tree_sample(Tensor storage, Tensor nodes, Tensor(a!) status, Tensor(b!) offset, int n, int seed, "
    "Tensor? seed_tensor, int capacity, int fanout, bool stratified, str backend) -> (Tensor, Tensor, Tensor)",
    _sample,
    _sample_fake,
)
_sample_out_op = register(
    "tree_sample_out(Tensor storage, Tensor nodes, Tensor(a!) status, Tensor(b!) offset, Tensor(c!) indices, "
    "Tensor(d!) values, Tensor(e!) total, int n, int seed, Tensor? seed_tensor, int capacity, int fanout, "
    "bool stratified, str backend) -> ()",
    _sample_out,
    lambda *_: None,
)
