"""Draws from the tree on a GPU: one launch, a warp a draw, and nothing ever waits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops._philox_triton import MAX_PROGRAMS, count_draws, first_draw, random_bits
from sharpwave.ops.sumtree import reference
from sharpwave.ops.sumtree._update_triton import digits, level_size, tree_shape

_UNIT = tl.constexpr(2.0**-reference.FRACTION_BITS)
_EMPTY = tl.constexpr(reference.EMPTY)


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
        high = tl.load(node_ptr, eviction_policy="evict_last")
        low = tl.load(node_ptr + 1, eviction_policy="evict_last")
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
        offset += level_size(capacity, LOG_FANOUT, LEVELS - above)
    lanes = tl.arange(0, FANOUT)
    at = (index << LOG_FANOUT) + (lanes if DRAWS == 0 else lanes[None, :])
    leaf = tl.load(leaves_ptr + at, eviction_policy="evict_last")
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
    OVERLAP: tl.constexpr,
):
    """DRAWS warps a program, a draw each: programs count themselves on one word, one after the other."""
    after_previous(OVERLAP)
    first = first_draw(offset_ptr, n, tl.num_programs(0))
    top_high, top_low = top_level(nodes_ptr, 1 << LOG_FANOUT, DRAWS)
    key = tl.load(seed_ptr) if SEED_IN_MEMORY else seed
    count_draws(offset_ptr, n, tl.num_programs(0), 32 * DRAWS)
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
    levels, log_fanout = tree_shape(capacity, fanout)
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
        **overlap(device),
    )
    return out
