"""The sum tree for CPUs, one thread: a fan-out of 16 keeps a node's children in four cache lines, and leaves in one.

An update adds the exact change of a leaf to one node a level and reads no sibling. A draw walks down, taking children's
mass off its own until the rest would be negative. Both wait for memory more than they compute, so items go through in
blocks, level by level, and ask for their next cache lines one level ahead: this takes a third off the time at a million
leaves, and more above.
"""

import functools
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from sharpwave.ops._philox import as_signed
from sharpwave.ops._philox_numba import multiply_high, random_bits
from sharpwave.ops.sumtree import reference
from sharpwave.ops.sumtree._prefetch import prefetch

_MAX_LEAF = np.float32(reference.MAX_LEAF)
_TO_HIGH = np.float32(2.0 ** (reference.FRACTION_BITS - 32))
_TO_LOW = np.float32(2.0**32)
_UNIT = 2.0**-reference.FRACTION_BITS
_MASK = np.int64(0xFFFFFFFF)
_32 = np.uint64(32)
_INVALID, _STALE = reference.INVALID, reference.STALE
# Items on their way at once: enough to hide memory's latency, few enough that their cache lines stay.
_BLOCK = 256
# Elements of nodes (flat int64) and of leaves (float32) in a cache line.
_NODE_LINE, _LEAF_LINE = 8, 16


class Arrays(NamedTuple):
    """A tree as the kernels take it: NumPy views of its tensors (nodes flat), and its shape."""

    leaves: np.ndarray
    nodes: np.ndarray
    extrema: np.ndarray
    status: np.ndarray
    offsets: np.ndarray
    shift: int
    capacity: int
    has_extrema: bool


@numba.njit(inline="always", cache=True)
def digits(leaf):
    scaled = leaf * _TO_HIGH
    high = np.int64(scaled)
    low = np.int64((scaled - np.float32(high)) * _TO_LOW)
    if high == 0 and low == 0 and leaf > 0:
        low = np.int64(1)
    return high, low


@numba.njit(cache=True)
def update(leaves, nodes, offsets, shift, capacity, status, indices, values, clamp):
    """-1, or the first item whose index is out of range: then nothing is changed."""
    n = indices.shape[0]
    levels = offsets.shape[0] - 1
    for k in range(n):
        if indices[k] < 0 or indices[k] >= capacity:
            return k
    invalid = 0
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        for k in range(start, end):
            node = indices[k]
            prefetch(leaves, node)
            for level in range(levels - 1, max(levels - 4, -1), -1):
                node >>= shift
                prefetch(nodes, 2 * (offsets[level] + node))
        for k in range(start, end):
            value = values[k]
            if not (value >= 0.0 and value <= _MAX_LEAF):
                invalid += 1
                if not clamp:
                    continue
                value = _MAX_LEAF if value > 0.0 else np.float32(0)
            node = indices[k]
            leaf = np.uint64(node)
            old_high, old_low = digits(leaves[leaf])
            high, low = digits(value)
            leaves[leaf] = value
            high -= old_high
            low -= old_low
            for level in range(levels - 1, -1, -1):
                node >>= shift
                at = np.uint64(2 * (offsets[level] + node))
                nodes[at] += high
                nodes[at + np.uint64(1)] += low
    status[_INVALID] += invalid
    return -1


@numba.njit(cache=True)
def priorities(
    tree_leaves, indices, td_error, max_priority, generation, generations, has_generations, alpha, eps, p_max, status
):
    """Fresh items' indices and leaves, packed at the front. The caller has checked the indices."""
    n = indices.shape[0]
    kept = np.empty(n, np.int64)
    leaves = np.empty(n, np.float32)
    count = 0
    largest = max_priority[0]
    for k in range(n):
        if has_generations:
            given = generation[k]
            if given < 0 or given != generations[indices[k]] or not tree_leaves[indices[k]] > 0:
                status[_STALE] += 1
                continue
        priority = min(abs(td_error[k]) + eps, p_max)
        if not abs(td_error[k]) < np.inf:
            status[_INVALID] += 1
            priority = np.float32(np.nan)
        elif priority > largest:
            largest = priority
        kept[count] = indices[k]
        leaves[count] = priority
        count += 1
    max_priority[0] = largest
    for k in range(count):
        priority = largest if np.isnan(leaves[k]) else leaves[k]
        leaves[k] = priority**alpha
    return kept[:count], leaves[:count]


@numba.njit(cache=True)
def refresh_extrema(leaves, extrema, offsets, shift, indices, early):
    """Recompute the nodes above `indices`; with `early`, stop where a node did not change."""
    fanout = 1 << shift
    levels = offsets.shape[0] - 1
    for k in range(indices.shape[0]):
        node = indices[k]
        for level in range(levels - 1, -1, -1):
            node >>= shift
            smallest, largest = np.float32(np.inf), np.float32(0)
            first = node << shift
            if level == levels - 1:
                for c in range(first, first + fanout):
                    leaf = leaves[c]
                    if leaf > 0:
                        smallest = min(smallest, leaf)
                    largest = max(largest, leaf)
            else:
                first += offsets[level + 1]
                for c in range(first, first + fanout):
                    smallest = min(smallest, extrema[c, 0])
                    largest = max(largest, extrema[c, 1])
            at = offsets[level] + node
            if early and extrema[at, 0] == smallest and extrema[at, 1] == largest:
                break
            extrema[at, 0] = smallest
            extrema[at, 1] = largest


@numba.njit(cache=True)
def _rebuild(leaves, nodes, offsets, shift):
    levels = offsets.shape[0] - 1
    nodes[:] = 0
    for i in range(leaves.shape[0]):
        high, low = digits(leaves[i])
        at = 2 * (offsets[levels - 1] + (i >> shift))
        nodes[at] += high
        nodes[at + 1] += low
    for level in range(levels - 2, -1, -1):
        children = offsets[level + 1]
        for i in range(offsets[level + 2] - children):
            at = 2 * (offsets[level] + (i >> shift))
            nodes[at] += nodes[2 * (children + i)]
            nodes[at + 1] += nodes[2 * (children + i) + 1]


@numba.njit(inline="always", cache=True)
def _share(bits, high, low):
    """Digits of floor(bits (high 2^32 + low) / 2^64)."""
    product = bits * np.uint64(high)
    small = bits * np.uint64(low)
    carry = np.uint64(1) if (product << _32) + small < small else np.uint64(0)
    rest0 = np.int64((product >> _32) + multiply_high(bits, np.uint64(low)) + carry)
    rest1 = np.int64(multiply_high(bits, np.uint64(high))) + (rest0 >> 32)
    return rest1, rest0 & _MASK


@numba.njit(cache=True)
def sample(leaves, nodes, offsets, shift, seed, offset, stratified, indices, values, total):
    """Draws and the total; False if there is nothing to draw from."""
    fanout = np.uint64(1 << shift)
    last = fanout - np.uint64(1)
    levels = offsets.shape[0] - 1
    n = indices.shape[0]
    high, low = np.int64(0), np.int64(0)
    for c in range(fanout):
        high += nodes[2 * c]
        low += nodes[2 * c + 1]
    high += low >> 32
    low &= _MASK
    if high == 0 and low == 0:
        return False
    total[0] = (np.float64(high) * 2.0**32 + np.float64(low)) * _UNIT
    first = offset[0]
    rest1, rest0 = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    for start in range(0, n, _BLOCK):
        size = min(_BLOCK, n - start)
        for j in range(size):
            k = start + j
            bits = random_bits(seed, first + k)
            if stratified:
                upper = (np.uint64(k) << _32) + (bits >> _32)
                lower = ((upper % np.uint64(n)) << _32) + (bits & np.uint64(_MASK))
                bits = ((upper // np.uint64(n)) << _32) + lower // np.uint64(n)
            rest1[j], rest0[j] = _share(bits, high, low)
            indices[k] = 0
        for level in range(levels):
            for j in range(size):
                index = indices[start + j] << shift
                at = np.uint64(2 * (offsets[level] + index))
                r1, r0 = rest1[j], rest0[j]
                child = np.uint64(0)
                # The last child needs no test: the mass is below the node's, exactly.
                while child < last:
                    next0 = r0 - nodes[at + np.uint64(1)]
                    next1 = r1 - nodes[at] + (next0 >> 32)
                    if next1 < 0:
                        break
                    r1, r0 = next1, next0 & _MASK
                    child += np.uint64(1)
                    at += np.uint64(2)
                rest1[j], rest0[j] = r1, r0
                index += np.int64(child)
                indices[start + j] = index
                if level + 1 < levels:
                    ahead = 2 * (offsets[level + 1] + (index << shift))
                    for line in range(0, 2 << shift, _NODE_LINE):
                        prefetch(nodes, ahead + line)
                else:
                    for line in range(0, 1 << shift, _LEAF_LINE):
                        prefetch(leaves, (index << shift) + line)
        for j in range(size):
            at = np.uint64(indices[start + j] << shift)
            r1, r0 = rest1[j], rest0[j]
            child = np.uint64(0)
            while child < last:
                leaf_high, leaf_low = digits(leaves[at])
                next0 = r0 - leaf_low
                next1 = r1 - leaf_high + (next0 >> 32)
                if next1 < 0:
                    break
                r1, r0 = next1, next0 & _MASK
                child += np.uint64(1)
                at += np.uint64(1)
            indices[start + j] = np.int64(at)
            values[start + j] = leaves[at]
    offset[0] = first + n
    return True


def arrays(leaves: Tensor, nodes: Tensor, extrema: Tensor | None, status: Tensor, capacity: int, fanout: int) -> Arrays:
    offsets, shift = _layout(capacity, fanout)
    return Arrays(
        leaves.numpy(),
        nodes.view(-1).numpy(),
        _NO_EXTREMA if extrema is None else extrema.numpy(),
        status.numpy(),
        offsets,
        shift,
        capacity,
        extrema is not None,
    )


def update_arrays(tree: Arrays, indices: np.ndarray, values: np.ndarray, clamp: bool) -> None:
    """`tree_update` on a tree whose views were taken before: taking them costs as much as updating 200 leaves."""
    bad = update(tree.leaves, tree.nodes, tree.offsets, tree.shift, tree.capacity, tree.status, indices, values, clamp)
    if bad >= 0:
        raise reference.index_error(torch.from_numpy(_outside(indices, tree.capacity)), tree.capacity)
    if tree.has_extrema:
        refresh_extrema(tree.leaves, tree.extrema, tree.offsets, tree.shift, indices, True)


def update_priorities_arrays(
    tree: Arrays,
    indices: np.ndarray,
    td_error: np.ndarray,
    max_priority: np.ndarray,
    generation: np.ndarray | None,
    generations: np.ndarray | None,
    alpha: float,
    eps: float,
    p_max: float,
) -> None:
    """`tree_update_priorities`, likewise."""
    outside = _outside(indices, tree.capacity)
    if outside.size:
        raise reference.index_error(torch.from_numpy(outside), tree.capacity)
    if not max_priority[0] >= 0:
        raise reference.bad_maximum(max_priority[0])
    has_generations = generation is not None
    kept, leaves = priorities(
        tree.leaves,
        indices,
        td_error,
        max_priority,
        generation if has_generations else indices,
        generations if has_generations else indices,
        has_generations,
        np.float32(alpha),
        np.float32(eps),
        np.float32(p_max),
        tree.status,
    )
    update_arrays(tree, kept, leaves, True)


def sample_arrays(
    tree: Arrays,
    n: int,
    seed: int,
    offset: np.ndarray,
    stratified: bool,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tree_sample`, likewise."""
    if out is None:
        # NumPy's empty and PyTorch's from_numpy take half the time of PyTorch's own empty.
        arrays_ = np.empty(n, np.int64), np.empty(n, np.float32), np.empty(())
        out = torch.from_numpy(arrays_[0]), torch.from_numpy(arrays_[1]), torch.from_numpy(arrays_[2])
    else:
        arrays_ = out[0].numpy(), out[1].numpy(), out[2].numpy()
    indices, values, total = arrays_
    drawn = sample(
        tree.leaves,
        tree.nodes,
        tree.offsets,
        tree.shift,
        np.int64(seed),
        offset,
        stratified,
        indices,
        values,
        total.reshape(1),
    )
    if not drawn:
        raise reference.zero_total()
    return out


def tree_update(
    leaves: Tensor,
    nodes: Tensor,
    extrema: Tensor | None,
    status: Tensor,
    indices: Tensor,
    values: Tensor,
    capacity: int,
    fanout: int,
    clamp: bool,
) -> None:
    """Same as `reference.tree_update`."""
    update_arrays(
        arrays(leaves, nodes, extrema, status, capacity, fanout), indices.numpy(), float32_array(values), clamp
    )


def tree_update_priorities(
    leaves: Tensor,
    nodes: Tensor,
    extrema: Tensor | None,
    status: Tensor,
    indices: Tensor,
    td_error: Tensor,
    max_priority: Tensor,
    generation: Tensor | None,
    generations: Tensor | None,
    capacity: int,
    fanout: int,
    alpha: float,
    eps: float,
    p_max: float,
) -> None:
    """Same as `reference.tree_update_priorities`."""
    update_priorities_arrays(
        arrays(leaves, nodes, extrema, status, capacity, fanout),
        indices.numpy(),
        float32_array(reference.narrow(td_error)),
        max_priority.view(1).numpy(),
        None if generation is None else generation.numpy(),
        None if generations is None else generations.numpy(),
        alpha,
        eps,
        p_max,
    )


def tree_rebuild(leaves: Tensor, nodes: Tensor, extrema: Tensor | None, capacity: int, fanout: int) -> None:
    """Same as `reference.tree_rebuild`."""
    offsets, shift = _layout(capacity, fanout)
    _rebuild(leaves.numpy(), nodes.view(-1).numpy(), offsets, shift)
    if extrema is not None:
        extrema[:, 0], extrema[:, 1] = torch.inf, 0
        every = np.arange(0, leaves.numel(), fanout)
        refresh_extrema(leaves.numpy(), extrema.numpy(), offsets, shift, every, False)


def tree_sample(
    leaves: Tensor,
    nodes: Tensor,
    status: Tensor,
    n: int,
    seed: int | Tensor,
    offset: Tensor,
    capacity: int,
    fanout: int,
    stratified: bool,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.tree_sample`."""
    tree = arrays(leaves, nodes, None, status, capacity, fanout)
    return sample_arrays(tree, n, as_signed(int(seed)), offset.view(1).numpy(), stratified, out)


def float32_array(values: Tensor) -> np.ndarray:
    if values.requires_grad:
        values = values.detach()
    return (values if values.dtype == torch.float32 else values.float()).numpy()


_NO_EXTREMA = np.zeros((0, 2), np.float32)


def _outside(indices: np.ndarray, capacity: int) -> np.ndarray:
    return indices[(indices < 0) | (indices >= capacity)]


@functools.lru_cache(maxsize=256)
def _layout(capacity: int, fanout: int) -> tuple[np.ndarray, int]:
    return np.array(reference.level_offsets(capacity, fanout)), fanout.bit_length() - 1
