"""The sum tree in plain PyTorch: its layout, its exact arithmetic, and every operation.

Mass is a fixed-point number with a unit of 2^-44, held as two int64 digits (high, low) worth 2^32 and 1 units. A leaf's
digits are below 2^32 (or exactly (2^32, 0)), so the plain digit sums of 2^31 leaves fit in int64: sums carry nothing,
and two digits become one number only where they are compared.
"""

import torch
from torch import Tensor

from sharpwave.ops import _philox
from sharpwave.ops._philox import MASK32, multiply_words

# Leaves count in units of 2^-FRACTION_BITS; MAX_LEAF's mass still fits beside 2^31 - 1 others.
FRACTION_BITS = 44
MAX_LEAF = 2.0**20

# The status words of a tree.
INVALID, OUT_OF_RANGE, EMPTY, STALE = range(4)


def level_offsets(capacity: int, fanout: int) -> list[int]:
    """Where each level of sums begins, from the top (at 0) to the one above the leaves, and the end of the last.

    A node of level l, counted from 1 above the leaves, sums `fanout` of level l - 1; the top has at most `fanout`. Each
    level is padded with zeros to a multiple of `fanout`, so that no descent needs a bound.
    """
    sizes = [_padded(-(-capacity // fanout), fanout)]
    while sizes[-1] > fanout:
        sizes.append(_padded(sizes[-1] // fanout, fanout))
    offsets = [0]
    for size in reversed(sizes):
        offsets.append(offsets[-1] + size)
    return offsets


def padded_leaves(capacity: int, fanout: int) -> int:
    """Leaves stored, so that the children of every first-level node exist."""
    return _padded(capacity, fanout)


def digits(leaves: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf as (high, low): its multiple of 2^-44, rounded down, but at least one unit if positive."""
    scaled = leaves * 2.0 ** (FRACTION_BITS - 32)
    high = scaled.floor()
    low = ((scaled - high) * 2.0**32).long()
    high = high.long()
    return high, torch.where((leaves > 0) & (high == 0) & (low == 0), 1, low)


def carry(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of the same mass with 0 <= low < 2^32."""
    return high + (low >> 32), low & MASK32


def clean(values: Tensor, clamp: bool) -> tuple[Tensor, Tensor]:
    """Values to store, and which of the given ones were valid."""
    valid = (values >= 0) & (values <= MAX_LEAF)
    if clamp:
        values = torch.where(values >= 0, values.clamp(max=MAX_LEAF), 0)
    return values, valid


def narrow(td_error: Tensor) -> Tensor:
    """As float32. Finite float64 numbers beyond its range become its largest: a large TD error is not a bad one."""
    if td_error.dtype == torch.float64:
        most = torch.finfo(torch.float32).max
        td_error = torch.where(td_error.isinf(), td_error, td_error.clamp(-most, most))
    return td_error.float()


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
    """The contract is `sharpwave.ops.sumtree.tree_update`."""
    in_range = (indices >= 0) & (indices < capacity)
    if indices.device.type == "cpu" and not in_range.all():
        raise index_error(indices[~in_range], capacity)
    values, valid = clean(values.float(), clamp)
    status[INVALID] += (~valid).sum()
    status[OUT_OF_RANGE] += (~in_range).sum()
    keep = in_range if clamp else in_range & valid
    indices, values = indices[keep], values[keep]

    # The last of equal indices: the one whose successor in a stable sort differs.
    order = torch.argsort(indices, stable=True)
    indices, values = indices[order], values[order]
    last = torch.ones_like(indices, dtype=torch.bool)
    last[:-1] = indices[1:] != indices[:-1]
    indices, values = indices[last], values[last]

    change = torch.stack([new - old for new, old in zip(digits(values), digits(leaves[indices]), strict=True)], 1)
    leaves[indices] = values
    offsets = level_offsets(capacity, fanout)
    node = indices
    for level in reversed(range(len(offsets) - 1)):
        node = node // fanout
        nodes.index_add_(0, offsets[level] + node, change)
    if extrema is not None:
        _refresh_extrema(leaves, extrema, offsets, fanout, indices)


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
    """The contract is `sharpwave.ops.sumtree.tree_update_priorities`."""
    in_range = (indices >= 0) & (indices < capacity)
    if indices.device.type == "cpu" and not in_range.all():
        raise index_error(indices[~in_range], capacity)
    if indices.device.type == "cpu" and not max_priority >= 0:
        raise bad_maximum(max_priority.item())
    status[OUT_OF_RANGE] += (~in_range).sum()
    indices, td_error = indices[in_range], narrow(td_error[in_range])
    if generation is not None and generations is not None:
        given = generation[in_range]
        fresh = (given >= 0) & (given == generations[indices]) & (leaves[indices] > 0)
        status[STALE] += (~fresh).sum()
        indices, td_error = indices[fresh], td_error[fresh]
    finite = torch.isfinite(td_error)
    status[INVALID] += (~finite).sum()
    priority = (td_error.abs() + eps).clamp(max=p_max)
    if finite.any():
        max_priority.copy_(torch.maximum(max_priority, priority[finite].max().view_as(max_priority)))
    priority = torch.where(finite, priority, max_priority)
    tree_update(leaves, nodes, extrema, status, indices, priority.pow(alpha), capacity, fanout, clamp=True)


def tree_rebuild(leaves: Tensor, nodes: Tensor, extrema: Tensor | None, capacity: int, fanout: int) -> None:
    """The contract is `sharpwave.ops.sumtree.tree_rebuild`."""
    nodes.zero_()
    offsets = level_offsets(capacity, fanout)
    children = torch.stack(digits(leaves), 1)
    for level in reversed(range(len(offsets) - 1)):
        sums = children.view(-1, fanout, 2).sum(1)
        nodes[offsets[level] : offsets[level] + len(sums)] = sums
        children = nodes[offsets[level] : offsets[level + 1]]
    if extrema is not None:
        extrema[:, 0], extrema[:, 1] = torch.inf, 0
        _refresh_extrema(leaves, extrema, offsets, fanout, torch.arange(len(leaves), device=leaves.device))


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
    """The contract is `sharpwave.ops.sumtree.tree_sample`."""
    total = carry(*nodes[:fanout].sum(0))
    empty = (total[0] | total[1]) == 0
    if leaves.device.type == "cpu" and empty:
        raise zero_total()
    w1, w0 = _philox.draw_words(seed, offset, n)
    offset += n
    if stratified:
        w1, w0 = _stratum(w1, w0, n)
    high, low = _share(w1, w0, *total)
    # A mass below 0 goes into the first child everywhere: an empty tree's walk ends at index 0.
    mass = torch.where(empty, -1, high), low

    offsets = level_offsets(capacity, fanout)
    index = torch.zeros_like(offset).expand(n)
    for level in range(len(offsets) - 1):
        children = nodes[offsets[level] + _children(index, fanout)]
        index, mass = _descend(index, mass, children[..., 0], children[..., 1])
    index, _ = _descend(index, mass, *digits(leaves[_children(index, fanout)]))

    status[EMPTY] += empty
    index = torch.where(empty, 0, index)
    values, whole = leaves[index], total_value(total)
    if out is None:
        return index, values, whole
    return out[0].copy_(index), out[1].copy_(values), out[2].copy_(whole)


def total_value(total: tuple[Tensor, Tensor]) -> Tensor:
    """The mass of two digits as float64, 0-d."""
    high, low = total
    return (high.double() * 2.0**32 + low.double()) * 2.0**-FRACTION_BITS


def _share(u1: Tensor, u0: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of floor(u total / 2^64), for u = u1 2^32 + u0 < 2^64: below the total, whatever u is."""
    t2, t1 = high >> 32, high & MASK32
    products = {
        (a, b): multiply_words(u, t)
        for a, u in enumerate((u0, u1))
        for b, t in enumerate((low.expand_as(u0), t1.expand_as(u0), t2.expand_as(u0)))
    }
    columns = [torch.zeros_like(u0) for _ in range(5)]
    for (a, b), (product_high, product_low) in products.items():
        columns[a + b] = columns[a + b] + product_low
        columns[a + b + 1] = columns[a + b + 1] + product_high
    column1 = columns[1] + (columns[0] >> 32)
    column2 = columns[2] + (column1 >> 32)
    return columns[3] + (columns[4] << 32) + (column2 >> 32), column2 & MASK32


def _stratum(w1: Tensor, w0: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Words of floor(2^64 (k + w 2^-64) / n) for draw k, by long division with 32-bit digits."""
    k = torch.arange(n, device=w1.device)
    upper = (k << 32) + w1
    lower = ((upper % n) << 32) + w0
    return upper // n, lower // n


def _children(index: Tensor, fanout: int) -> Tensor:
    return index[:, None] * fanout + torch.arange(fanout, device=index.device)


def _descend(
    index: Tensor, mass: tuple[Tensor, Tensor], high: Tensor, low: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Into the first child whose prefix sum exceeds the mass; the mass is then counted from that child's start."""
    below = carry(high.cumsum(1), low.cumsum(1))
    m1, m0 = mass[0][:, None], mass[1][:, None]
    passed = (below[0] < m1) | ((below[0] == m1) & (below[1] <= m0))
    child = passed.sum(1).clamp(max=high.shape[1] - 1)  # the mass is below the node's: a bound for broken trees alone
    skipped = [torch.where(passed, x, 0).sum(1) for x in (high, low)]
    return index * high.shape[1] + child, carry(mass[0] - skipped[0], mass[1] - skipped[1])


def _refresh_extrema(leaves: Tensor, extrema: Tensor, offsets: list[int], fanout: int, indices: Tensor) -> None:
    """Recompute (smallest positive, largest) of the nodes above `indices`, level by level."""
    smallest, largest = torch.where(leaves > 0, leaves, torch.inf), leaves
    node = indices
    for level in reversed(range(len(offsets) - 1)):
        node = node // fanout
        children = _children(node, fanout)
        both = torch.stack([smallest[children].amin(1), largest[children].amax(1)], 1)
        extrema[offsets[level] + node] = both
        smallest, largest = extrema[offsets[level] : offsets[level + 1]].unbind(1)


def _padded(size: int, fanout: int) -> int:
    return -(-size // fanout) * fanout


def index_error(bad: Tensor, capacity: int) -> IndexError:
    return IndexError(
        f"indices must be in [0, {capacity}); got {bad[0].item()} and {bad.numel() - 1} more out of range"
    )


def bad_maximum(given: float) -> ValueError:
    return ValueError(f"max_priority must hold the largest priority so far, a number >= 0; got {given}")


def zero_total() -> ValueError:
    return ValueError("nothing to draw from: the tree's total is 0; update it with at least one positive value")
