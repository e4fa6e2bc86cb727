"""The sum tree for GPUs: one launch an update, one a draw, whatever the capacity, and nothing ever waits.

Because sums are integers, an update adds the exact change of each leaf to one node a level with atomics, whose order
cannot show; no level depends on another. Equal indices are settled by comparing every item with the later ones of its
launch, which costs less than any scratch memory would at the batch sizes of replay; larger batches take several
launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._philox_triton import MAX_PROGRAMS, advance_draws, arrive, random_bits, read_draws
from sharpwave.ops.sumtree import reference

# Items whose duplicates one launch settles.
CHUNK = 8192

_MAX_LEAF = tl.constexpr(reference.MAX_LEAF)
_TO_HIGH = tl.constexpr(2.0 ** (reference.FRACTION_BITS - 32))
_UNIT = tl.constexpr(2.0**-reference.FRACTION_BITS)
_INVALID = tl.constexpr(reference.INVALID)
_OUT_OF_RANGE = tl.constexpr(reference.OUT_OF_RANGE)
_EMPTY = tl.constexpr(reference.EMPTY)
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
def _level_size(capacity, LOG_FANOUT: tl.constexpr, LEVEL: tl.constexpr):
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
        offset += _level_size(capacity, LOG_FANOUT, LEVELS - above)


@triton.jit
def _valid(value):
    return (value >= 0.0) & (value <= _MAX_LEAF)


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
):
    """Leaves from values, or (FROM_TD) from TD errors; `reference.tree_update` and `tree_update_priorities`."""
    start = tl.program_id(0) * BLOCK
    item = start + tl.arange(0, BLOCK)
    here = item < n
    index = tl.load(indices_ptr + item, mask=here, other=-1)
    value = tl.load(values_ptr + item, mask=here, other=0.0).to(tl.float32)
    in_range = (index >= 0) & (index < capacity)
    keep = here & in_range
    stale = keep & False
    # Of equal indices one item alone writes, so this is what lay there before the launch wherever it is used.
    old = tl.load(leaves_ptr + index, mask=keep, other=0.0)
    if GENERATIONS:
        now = tl.load(generations_ptr + index, mask=keep, other=-1)
        mine = tl.load(generation_ptr + item, mask=here, other=-1)
        # A leaf that another program has written by now was positive before.
        stale = keep & ((mine < 0) | (mine != now) | ~(old > 0.0))
        keep = keep & ~stale
    if FROM_TD:
        valid = (tl.abs(value) < float("inf")) | ~keep
        priority = tl.minimum(tl.abs(value) + eps, p_max)
        largest = tl.max(tl.where(keep & valid, priority, 0.0), 0)
        if largest > 0.0:
            tl.atomic_max(max_priority_ptr, largest, sem="relaxed")
        if tl.min(valid.to(tl.int32), 0) == 0:
            # Whatever the other programs have added by now is below this call's largest, so taking that into account
            # gives the same number at any time.
            bound = tl.load(max_priority_ptr)
            for first in range(0, n, BLOCK_LATER):
                any_item = first + tl.arange(0, BLOCK_LATER)
                td = tl.load(values_ptr + any_item, mask=any_item < n, other=float("inf")).to(tl.float32)
                their_index = tl.load(indices_ptr + any_item, mask=any_item < n, other=-1)
                counts = (tl.abs(td) < float("inf")) & (their_index >= 0) & (their_index < capacity)
                if GENERATIONS:
                    given = tl.load(generation_ptr + any_item, mask=counts, other=-1)
                    counts = counts & (given >= 0) & (tl.load(leaves_ptr + their_index, mask=counts, other=0.0) > 0.0)
                    counts = counts & (given == tl.load(generations_ptr + their_index, mask=counts, other=-2))
                theirs = tl.where(counts, tl.minimum(tl.abs(td) + eps, p_max), 0.0)
                bound = tl.maximum(bound, tl.max(theirs, 0))
            priority = tl.where(valid, priority, bound)
        value = tl.minimum(tl.exp2(alpha * tl.log2(priority)), _MAX_LEAF)
    else:
        valid = _valid(value)
        if CLAMP:
            value = tl.where(value >= 0.0, tl.minimum(value, _MAX_LEAF), 0.0)
        else:
            keep = keep & valid

    beaten = tl.zeros([BLOCK], tl.int32)
    for first in range(start, n, BLOCK_LATER):
        later = first + tl.arange(0, BLOCK_LATER)
        their_index = tl.load(indices_ptr + later, mask=later < n, other=-1)
        same = (index[:, None] == their_index[None, :]) & (item[:, None] < later[None, :])  # [BLOCK, BLOCK_LATER]
        # An item that will not be stored beats nobody.
        if GENERATIONS:
            given = tl.load(generation_ptr + later, mask=later < n, other=-1)
            same = same & (given[None, :] == now[:, None])
        if not (CLAMP or FROM_TD):
            theirs = tl.load(values_ptr + later, mask=later < n, other=0.0).to(tl.float32)
            same = same & _valid(theirs)[None, :]
        beaten = tl.maximum(beaten, tl.max(same.to(tl.int32), 1))
    write = keep & (beaten == 0)

    tl.store(leaves_ptr + index, value, mask=write)
    add_change(nodes_ptr, index, value, old, write, capacity, LEVELS, LOG_FANOUT)

    invalid = tl.sum((here & ~valid).to(tl.int64), 0)
    outside = tl.sum((here & ~in_range).to(tl.int64), 0)
    if invalid > 0:
        tl.atomic_add(status_ptr + _INVALID, invalid, sem="relaxed")
    if outside > 0:
        tl.atomic_add(status_ptr + _OUT_OF_RANGE, outside, sem="relaxed")
    if GENERATIONS:
        dropped = tl.sum(stale.to(tl.int64), 0)
        if dropped > 0:
            tl.atomic_add(status_ptr + _STALE, dropped, sem="relaxed")


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
            offset += _level_size(capacity, LOG_FANOUT, LEVELS - above)
        if LEVELS - above >= LEVEL:
            below += _level_size(capacity, LOG_FANOUT, LEVELS - above)
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
            offset += _level_size(capacity, LOG_FANOUT, LEVELS - above)
        if LEVELS - above >= LEVEL:
            below += _level_size(capacity, LOG_FANOUT, LEVELS - above)
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


@triton.jit
def _share(bits, total1, total0):
    """floor(bits * total / 2^64) in the tree's digits."""
    high_total = total1.to(tl.uint64)
    low_total = total0.to(tl.uint64)
    product = bits * high_total
    small = bits * low_total
    carry = ((product << 32) + small < small).to(tl.uint64)
    rest0 = ((product >> 32) + tl.umulhi(bits, low_total) + carry).to(tl.int64)
    return tl.umulhi(bits, high_total).to(tl.int64) + (rest0 >> 32), rest0 & 0xFFFFFFFF


@triton.jit
def _lane(x, at, AXIS: tl.constexpr):
    """x at one place of each draw: one exchange in its warp, where a sum over lanes takes five."""
    if AXIS == 0:
        return tl.sum(tl.gather(x, tl.zeros([1], tl.int32) + at, 0), 0)
    else:
        return tl.gather(x, at, 1)


@triton.jit
def _descend(index, rest1, rest0, high, low, LOG_FANOUT: tl.constexpr, AXIS: tl.constexpr):
    """`reference._descend` for [DRAWS, 1] masses over [DRAWS, FANOUT] children, or for scalars over [FANOUT]."""
    low_below = tl.cumsum(low, AXIS)
    high_below = tl.cumsum(high, AXIS) + (low_below >> 32)
    low_below = low_below & 0xFFFFFFFF
    passed = (high_below < rest1) | ((high_below == rest1) & (low_below <= rest0))
    child = tl.minimum(tl.sum(passed.to(tl.int32), AXIS, keep_dims=AXIS == 1), (1 << LOG_FANOUT) - 1)
    before = tl.maximum(child - 1, 0)
    rest0 -= tl.where(child > 0, _lane(low_below, before, AXIS), 0)
    rest1 += (rest0 >> 32) - tl.where(child > 0, _lane(high_below, before, AXIS), 0)
    return (index << LOG_FANOUT) + child, rest1, rest0 & 0xFFFFFFFF


@triton.jit
def stratum(bits, k, n):
    """floor((2^64 k + bits) / n), by long division with 32-bit digits."""
    strata = tl.cast(n, tl.uint64)
    upper = (k.to(tl.uint64) << 32) + (bits >> 32)
    lower = ((upper % strata) << 32) + (bits & 0xFFFFFFFF)
    return ((upper // strata) << 32) + lower // strata


@triton.jit
def children(nodes_ptr, first, FANOUT: tl.constexpr, DRAWS: tl.constexpr):
    """Digits (high, low) of the FANOUT nodes from `first` on: [DRAWS, 1], or a scalar if DRAWS is 0."""
    if DRAWS == 0:
        node_ptr = nodes_ptr + 2 * (first + tl.arange(0, FANOUT))
        high = tl.load(node_ptr)
        low = tl.load(node_ptr + 1)
    else:
        # Both digits are one access of 16 bytes, which lays the children out along a warp; by two, Triton would lay the
        # draws along it, and every sum over children would go through shared memory.
        words = tl.load(nodes_ptr + 2 * first + tl.arange(0, 2 * FANOUT)[None, :])
        high, low = tl.split(tl.reshape(words, [DRAWS, FANOUT, 2]))
    return high, low


@triton.jit
def top_level(nodes_ptr, FANOUT: tl.constexpr, DRAWS: tl.constexpr):
    first = tl.zeros([], tl.int64) if DRAWS == 0 else tl.zeros([DRAWS, 1], tl.int64)
    high, low = children(nodes_ptr, first, FANOUT, DRAWS)
    return high, low


@triton.jit
def draw_leaves(
    leaves_ptr,
    nodes_ptr,
    high,
    low,
    bits,
    capacity,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Leaves that words of 64 random bits choose: index, value, and the total's digits; of an empty tree 0, 0, 0, 0.

    DRAWS words [DRAWS, 1] are for a warp each, and no two warps need each other. DRAWS = 0 is one scalar word: every
    warp walks alone to the same leaf. `high`, `low` are the top level, which can be read before there are any bits.
    """
    FANOUT: tl.constexpr = 1 << LOG_FANOUT
    AXIS: tl.constexpr = 0 if DRAWS == 0 else 1  # ty: ignore[invalid-assignment]
    total0 = tl.sum(low, AXIS, keep_dims=AXIS == 1)
    total1 = tl.sum(high, AXIS, keep_dims=AXIS == 1) + (total0 >> 32)
    total0 = total0 & 0xFFFFFFFF
    rest1, rest0 = _share(bits, total1, total0)
    # A mass below 0 goes into the first child everywhere: an empty tree's walk ends at index 0.
    rest1 = tl.where((total1 | total0) == 0, -1, rest1)
    index = total1 * 0
    offset = tl.zeros([], tl.int64)
    for above in tl.static_range(LEVELS):
        if above > 0:
            high, low = children(nodes_ptr, offset + (index << LOG_FANOUT), FANOUT, DRAWS)
        index, rest1, rest0 = _descend(index, rest1, rest0, high, low, LOG_FANOUT, AXIS)
        offset += _level_size(capacity, LOG_FANOUT, LEVELS - above)
    lanes = tl.arange(0, FANOUT)
    leaf = tl.load(leaves_ptr + (index << LOG_FANOUT) + (lanes if DRAWS == 0 else lanes[None, :]))
    high, low = digits(leaf)
    index, rest1, rest0 = _descend(index, rest1, rest0, high, low, LOG_FANOUT, AXIS)
    return index, _lane(leaf, (index & (FANOUT - 1)).to(tl.int32), AXIS), total1, total0


@triton.jit
def total_value(total1, total0):
    return (total1.to(tl.float64) * 4294967296.0 + total0.to(tl.float64)) * _UNIT


@triton.jit(do_not_specialize=["seed", "n", "capacity"])
def _sample_kernel(
    leaves_ptr,
    nodes_ptr,
    status_ptr,
    indices_ptr,
    values_ptr,
    total_ptr,
    seed,
    seed_ptr,
    offset_ptr,
    n,
    capacity,
    SEED_IN_MEMORY: tl.constexpr,
    STRATIFIED: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """DRAWS warps a program, a draw each: programs count themselves on one word, one after the other."""
    first = read_draws(offset_ptr)
    top_high, top_low = top_level(nodes_ptr, 1 << LOG_FANOUT, DRAWS)
    key = tl.load(seed_ptr) if SEED_IN_MEMORY else seed
    ticket = arrive(offset_ptr, 32 * DRAWS)
    for block in range(tl.program_id(0), tl.cdiv(n, DRAWS), tl.num_programs(0)):
        k = block * DRAWS + tl.arange(0, DRAWS).to(tl.int64)[:, None]
        bits = random_bits(key, first + k)
        if STRATIFIED:
            bits = stratum(bits, k, n)
        index, value, total1, total0 = draw_leaves(
            leaves_ptr, nodes_ptr, top_high, top_low, bits, capacity, LEVELS, LOG_FANOUT, DRAWS
        )
        tl.store(indices_ptr + k, index, mask=k < n)
        tl.store(values_ptr + k, value, mask=k < n)
        if block == 0:
            tl.store(total_ptr + k, total_value(total1, total0), mask=k == 0)
            empty = (k == 0) & ((total1 | total0) == 0)
            tl.atomic_add(status_ptr + _EMPTY + k, empty.to(tl.int64), mask=empty, sem="relaxed")
    advance_draws(offset_ptr, first, ticket, n, tl.num_programs(0), 32 * DRAWS)


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
    block=8,
    later=1024,
    warps=8,
):
    levels, log_fanout = _shape(capacity, fanout)
    n = indices.numel()
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
        BLOCK_LATER=later,
        num_warps=warps,
    )


def refresh_extrema(leaves, extrema, indices, capacity, fanout):
    levels, log_fanout = _shape(capacity, fanout)
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
    levels, log_fanout = _shape(capacity, fanout)
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
    """Same as `reference.tree_sample`, except that an empty tree is flagged, not raised."""
    levels, log_fanout = _shape(capacity, fanout)
    device = leaves.device
    in_memory = isinstance(seed, Tensor)
    if out is None:
        out = (
            torch.empty(n, dtype=torch.int64, device=device),
            torch.empty(n, device=device),
            torch.empty((), dtype=torch.float64, device=device),
        )
    draws = 8
    _sample_kernel[(min(triton.cdiv(n, draws), MAX_PROGRAMS),)](
        leaves,
        nodes,
        status,
        *out,
        *((0, seed) if in_memory else (seed, None)),
        offset,
        n,
        capacity,
        SEED_IN_MEMORY=in_memory,
        STRATIFIED=stratified,
        LEVELS=levels,
        LOG_FANOUT=log_fanout,
        DRAWS=draws,
        num_warps=draws,
    )
    return out


def _shape(capacity: int, fanout: int) -> tuple[int, int]:
    return len(reference.level_offsets(capacity, fanout)) - 1, fanout.bit_length() - 1
