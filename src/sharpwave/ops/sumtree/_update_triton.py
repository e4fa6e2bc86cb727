"""Leaves and sums of the tree on a GPU: one launch an update, whatever the capacity, and nothing ever waits.

Because sums are integers, an update adds the exact change of each leaf to one node a level with atomics, whose order
cannot show; no level depends on another. Equal indices are settled by comparing every item with the later ones of its
launch, which costs less than any scratch memory would at the batch sizes of replay; larger batches take several
launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops.sumtree import reference

# Items whose duplicates one launch settles.
CHUNK = 8192

_MAX_LEAF = tl.constexpr(reference.MAX_LEAF)
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
_TO_HIGH = tl.constexpr(2.0 ** (reference.FRACTION_BITS - 32))
_INVALID = tl.constexpr(reference.INVALID)
_OUT_OF_RANGE = tl.constexpr(reference.OUT_OF_RANGE)
_STALE = tl.constexpr(reference.STALE)


@triton.jit
def digits(leaf):
    # Exact in float32: a power of two, a floor, and the fraction that is left.
    scaled = leaf * _TO_HIGH
    floor = tl.floor(scaled)
    high = floor.to(tl.int64)
    low = ((scaled - floor) * 4294967296.0).to(tl.int64)
    return high, tl.where((leaf > 0.0) & (high == 0) & (low == 0), 1, low)


@triton.jit
def level_size(capacity, LOG_FANOUT: tl.constexpr, LEVEL: tl.constexpr):
    """Nodes stored at a level counted from 1 above the leaves; `reference.level_offsets`."""
    size = (tl.cast(capacity, tl.int64) + ((1 << (LOG_FANOUT * LEVEL)) - 1)) >> (LOG_FANOUT * LEVEL)
    return ((size + ((1 << LOG_FANOUT) - 1)) >> LOG_FANOUT) << LOG_FANOUT


@triton.jit
def add_change(nodes_ptr, index, new, old, mask, capacity, LEVELS: tl.constexpr, LOG_FANOUT: tl.constexpr):
    """What leaves that change add to the sums above them; of equal indices one alone may be in the mask."""
    high, low = digits(tl.where(mask, new, 0.0))
    old_high, old_low = digits(tl.where(mask, old, 0.0))
    high -= old_high
    low -= old_low
    offset = tl.zeros([], tl.int64)
    for above in tl.static_range(LEVELS):
        node = 2 * (offset + (index >> (LOG_FANOUT * (LEVELS - above))))
        tl.atomic_add(nodes_ptr + node, high, mask=mask & (high != 0), sem="relaxed")
        tl.atomic_add(nodes_ptr + node + 1, low, mask=mask & (low != 0), sem="relaxed")
        offset += level_size(capacity, LOG_FANOUT, LEVELS - above)


@triton.jit
def _valid(value):
    return (value >= 0.0) & (value <= _MAX_LEAF)


@triton.jit
def _narrow(x):
    """`reference.narrow`."""
    if x.dtype == tl.float64:
        finite = tl.abs(x) < float("inf")
        x = tl.where(finite, tl.minimum(tl.maximum(x, -_MOST), _MOST), x)
    return x.to(tl.float32)


@triton.jit
def _bound(
    bound,
    leaves_ptr,
    values_ptr,
    indices_ptr,
    generation_ptr,
    generations_ptr,
    eps,
    p_max,
    n,
    capacity,
    GENERATIONS: tl.constexpr,
    BLOCK_LATER: tl.constexpr,
):
    """The larger of `bound` and this call's largest priority, from all its items.

    Whatever other programs have added to `bound` by now is below that largest, so the result is the same at any time.
    """
    for first in range(0, n, BLOCK_LATER):
        item = first + tl.arange(0, BLOCK_LATER)
        td_error = _narrow(tl.load(values_ptr + item, mask=item < n, other=float("inf")))
        index = tl.load(indices_ptr + item, mask=item < n, other=-1)
        counts = (tl.abs(td_error) < float("inf")) & (index >= 0) & (index < capacity)
        if GENERATIONS:
            given = tl.load(generation_ptr + item, mask=counts, other=-1)
            counts = counts & (given >= 0) & (tl.load(leaves_ptr + index, mask=counts, other=0.0) > 0.0)
            counts = counts & (given == tl.load(generations_ptr + index, mask=counts, other=-2))
        bound = tl.maximum(bound, tl.max(tl.where(counts, tl.minimum(tl.abs(td_error) + eps, p_max), 0.0), 0))
    return bound


@triton.jit
def _later_equals(
    index,
    now,
    their_index,
    their_generation,
    values_ptr,
    later,
    n,
    GENERATIONS: tl.constexpr,
    VALID_ONLY: tl.constexpr,
):
    """[BLOCK, BLOCK_LATER]: whether a later item will be stored where an item would be; no other beats it."""
    same = index == their_index
    if GENERATIONS:
        same = same & (their_generation == now)
    if VALID_ONLY:
        same = same & _valid(tl.load(values_ptr + later, mask=later < n, other=0.0).to(tl.float32))
    return same


@triton.jit
def _count(x):
    """How many of [BLOCK, 1] are set."""
    return tl.sum(tl.sum(x.to(tl.int32), 1), 0)


@triton.jit(do_not_specialize=["capacity"])
def _update_kernel(
    leaves_ptr,
    nodes_ptr,
    status_ptr,
    indices_ptr,
    values_ptr,
    max_priority_ptr,
    generation_ptr,
    generations_ptr,
    alpha,
    eps,
    p_max,
    n,
    capacity,
    FROM_TD: tl.constexpr,
    GENERATIONS: tl.constexpr,
    CLAMP: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LATER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Leaves from values, or (FROM_TD) from TD errors; `reference.tree_update` and `tree_update_priorities`.

    Items are columns [BLOCK, 1], so that comparing them with the later ones moves nothing between threads. All that can
    be read before an index is known is read first, the first BLOCK_LATER later items too.
    """
    after_previous(OVERLAP)
    start = tl.program_id(0) * BLOCK
    item = start + tl.arange(0, BLOCK)[:, None]
    later = start + tl.arange(0, BLOCK_LATER)[None, :]
    here = item < n
    index = tl.load(indices_ptr + item, mask=here, other=-1)
    value = _narrow(tl.load(values_ptr + item, mask=here, other=0.0))
    their_index = tl.load(indices_ptr + later, mask=later < n, other=-1)
    given = index
    their_generation = their_index
    if GENERATIONS:
        given = tl.load(generation_ptr + item, mask=here, other=-1)
        their_generation = tl.load(generation_ptr + later, mask=later < n, other=-1)
    if FROM_TD:
        most = tl.load(max_priority_ptr)
    in_range = (index >= 0) & (index < capacity)
    keep = here & in_range
    # Of equal indices one item alone writes, so this is what lay there before the launch wherever it is used.
    old = tl.load(leaves_ptr + index, mask=keep, other=0.0)
    now = given
    stale = keep & False
    if GENERATIONS:
        now = tl.load(generations_ptr + index, mask=keep, other=-1)
        # A leaf that another program has written by now was positive before.
        stale = keep & ((given < 0) | (given != now) | ~(old > 0.0))

    ONLY: tl.constexpr = not (CLAMP or FROM_TD)  # ty: ignore[invalid-assignment]
    same = _later_equals(index, now, their_index, their_generation, values_ptr, later, n, GENERATIONS, ONLY)
    beaten = tl.max((same & (item < later)).to(tl.int32), 1, keep_dims=True)
    for first in range(start + BLOCK_LATER, n, BLOCK_LATER):
        later = first + tl.arange(0, BLOCK_LATER)[None, :]
        their_index = tl.load(indices_ptr + later, mask=later < n, other=-1)
        if GENERATIONS:
            their_generation = tl.load(generation_ptr + later, mask=later < n, other=-1)
        same = _later_equals(index, now, their_index, their_generation, values_ptr, later, n, GENERATIONS, ONLY)
        beaten = tl.maximum(beaten, tl.max(same.to(tl.int32), 1, keep_dims=True))

    keep = keep & ~stale
    if FROM_TD:
        valid = (tl.abs(value) < float("inf")) | ~keep
        priority = tl.minimum(tl.abs(value) + eps, p_max)
        largest = tl.max(tl.max(tl.where(keep & valid, priority, 0.0), 1), 0)
        if _count(~valid) > 0:
            bound = tl.load(max_priority_ptr)
            given_ptrs = (leaves_ptr, values_ptr, indices_ptr, generation_ptr, generations_ptr)
            bound = _bound(bound, *given_ptrs, eps, p_max, n, capacity, GENERATIONS, BLOCK_LATER)
            priority = tl.where(valid, priority, bound)
        value = tl.minimum(tl.exp2(alpha * tl.log2(priority)), _MAX_LEAF)
    else:
        valid = _valid(value)
        if CLAMP:
            value = tl.where(value >= 0.0, tl.minimum(value, _MAX_LEAF), 0.0)
        else:
            keep = keep & valid
    write = keep & (beaten == 0)

    tl.store(leaves_ptr + index, value, mask=write)
    add_change(nodes_ptr, index, value, old, write, capacity, LEVELS, LOG_FANOUT)
    if FROM_TD:  # noqa: SIM102 (known when compiled)
        if largest > most:
            tl.atomic_max(max_priority_ptr, largest, sem="relaxed")
    # One test for all that is rare.
    if _count((here & ~(valid & in_range)) | stale) > 0:
        tl.atomic_add(status_ptr + _INVALID, _count(here & ~valid).to(tl.int64), sem="relaxed")
        tl.atomic_add(status_ptr + _OUT_OF_RANGE, _count(here & ~in_range).to(tl.int64), sem="relaxed")
        tl.atomic_add(status_ptr + _STALE, _count(stale).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["n", "capacity"])
def _extrema_kernel(
    leaves_ptr,
    extrema_ptr,
    indices_ptr,
    n,
    capacity,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    EVERY: tl.constexpr,
):
    """Recompute one level's nodes above the indices (EVERY: all nodes), from finished nodes below: one a program.

    Programs of equal nodes write equal values.
    """
    program = tl.program_id(0).to(tl.int64)
    offset = tl.zeros([], tl.int64)
    below = tl.zeros([], tl.int64)
    for above in tl.static_range(LEVELS):
        if LEVELS - above > LEVEL:
            offset += level_size(capacity, LOG_FANOUT, LEVELS - above)
        if LEVELS - above >= LEVEL:
            below += level_size(capacity, LOG_FANOUT, LEVELS - above)
    lanes = tl.arange(0, 1 << LOG_FANOUT)
    if EVERY:
        node = program
        in_range = True
    else:
        index = tl.load(indices_ptr + program)
        in_range = (index >= 0) & (index < capacity)
        node = tl.where(in_range, index >> (LOG_FANOUT * LEVEL), 0)
    children = (node << LOG_FANOUT) + lanes
    if LEVEL == 1:
        largest = tl.load(leaves_ptr + children)
        smallest = tl.where(largest > 0.0, largest, float("inf"))
    else:
        smallest = tl.load(extrema_ptr + 2 * (below + children))
        largest = tl.load(extrema_ptr + 2 * (below + children) + 1)
    tl.store(extrema_ptr + 2 * (offset + node), tl.min(smallest, 0), mask=in_range)
    tl.store(extrema_ptr + 2 * (offset + node) + 1, tl.max(largest, 0), mask=in_range)


@triton.jit(do_not_specialize=["capacity", "n_nodes"])
def _rebuild_kernel(
    leaves_ptr,
    nodes_ptr,
    capacity,
    n_nodes,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of one level from the level below, BLOCK nodes a program."""
    offset = tl.zeros([], tl.int64)
    below = tl.zeros([], tl.int64)
    for above in tl.static_range(LEVELS):
        if LEVELS - above > LEVEL:
            offset += level_size(capacity, LOG_FANOUT, LEVELS - above)
        if LEVELS - above >= LEVEL:
            below += level_size(capacity, LOG_FANOUT, LEVELS - above)
    node = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = node < n_nodes
    children = (node[:, None] << LOG_FANOUT) + tl.arange(0, 1 << LOG_FANOUT)[None, :]  # [BLOCK, FANOUT]
    if LEVEL == 1:
        high, low = digits(tl.load(leaves_ptr + children, mask=here[:, None], other=0.0))
    else:
        high = tl.load(nodes_ptr + 2 * (below + children), mask=here[:, None], other=0)
        low = tl.load(nodes_ptr + 2 * (below + children) + 1, mask=here[:, None], other=0)
    tl.store(nodes_ptr + 2 * (offset + node), tl.sum(high, 1), mask=here)
    tl.store(nodes_ptr + 2 * (offset + node) + 1, tl.sum(low, 1), mask=here)


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
    for start in range(0, indices.numel(), CHUNK):
        where, what = indices[start : start + CHUNK], values[start : start + CHUNK]
        _launch_update(leaves, nodes, status, where, what, capacity, fanout, clamp)
    if extrema is not None:
        refresh_extrema(leaves, extrema, indices, capacity, fanout)


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
    """Same as `reference.tree_update_priorities`; a batch larger than CHUNK counts as several calls in a row."""
    for start in range(0, indices.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        given = None if generation is None else generation[chunk]
        td = (max_priority, given, generations, alpha, eps, p_max)
        _launch_update(leaves, nodes, status, indices[chunk], td_error[chunk], capacity, fanout, True, *td)
    if extrema is not None:
        refresh_extrema(leaves, extrema, indices, capacity, fanout)


def _launch_update(
    leaves,
    nodes,
    status,
    indices,
    values,
    capacity,
    fanout,
    clamp,
    max_priority=None,
    generation=None,
    generations=None,
    alpha=0.0,
    eps=0.0,
    p_max=0.0,
    block=None,
    warps=None,
):
    levels, log_fanout = tree_shape(capacity, fanout)
    n = indices.numel()
    # Every program reads all later items: few in it while there are few later ones.
    block = block or (2 if n <= 1024 else 8)
    warps = warps or (2 if block == 2 else 4)
    _update_kernel[(triton.cdiv(n, block),)](
        leaves,
        nodes,
        status,
        indices,
        values,
        max_priority,
        generation,
        generations,
        alpha,
        eps,
        p_max,
        n,
        capacity,
        FROM_TD=max_priority is not None,
        GENERATIONS=generation is not None,
        CLAMP=clamp,
        LEVELS=levels,
        LOG_FANOUT=log_fanout,
        BLOCK=block,
        BLOCK_LATER=max(min(triton.next_power_of_2(n), 1024), block),
        num_warps=warps,
        **overlap(leaves.device),
    )


def refresh_extrema(leaves, extrema, indices, capacity, fanout):
    levels, log_fanout = tree_shape(capacity, fanout)
    n = indices.numel()
    for level in range(1, levels + 1 if n else 1):
        _extrema_kernel[(n,)](
            leaves,
            extrema,
            indices,
            n,
            capacity,
            LEVEL=level,
            LEVELS=levels,
            LOG_FANOUT=log_fanout,
            EVERY=False,
            num_warps=1,
        )


def tree_rebuild(leaves: Tensor, nodes: Tensor, extrema: Tensor | None, capacity: int, fanout: int) -> None:
    """Same as `reference.tree_rebuild`."""
    levels, log_fanout = tree_shape(capacity, fanout)
    offsets = reference.level_offsets(capacity, fanout)
    size = leaves.numel()
    block = max(2048 // fanout, 1)
    nodes.zero_()
    if extrema is not None:
        extrema[:, 0], extrema[:, 1] = torch.inf, 0
    for level in range(1, levels + 1):
        size = size // fanout
        shape = dict(LEVEL=level, LEVELS=levels, LOG_FANOUT=log_fanout)
        _rebuild_kernel[(triton.cdiv(size, block),)](leaves, nodes, capacity, size, **shape, BLOCK=block)
        if extrema is not None:
            _extrema_kernel[(size,)](leaves, extrema, leaves, size, capacity, **shape, EVERY=True, num_warps=1)
        size = offsets[levels - level + 1] - offsets[levels - level]


def tree_shape(capacity: int, fanout: int) -> tuple[int, int]:
    return len(reference.level_offsets(capacity, fanout)) - 1, fanout.bit_length() - 1
