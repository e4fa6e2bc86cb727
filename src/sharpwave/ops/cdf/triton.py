"""Prefix sums and draws for GPUs.

`_look_back_kernel` scans in one pass. What makes its result the same on every run is that every addition has a fixed
place: the prefix P_t of tile t is the prefix of t's group of tiles plus the sums of the group's tiles below t, added by
one reduction tree whose other leaves are 0. (Adding up whatever a look-back happens to find gives bits that depend on
timing.) That tree also makes P_t monotone in t, and P_{t+1} = P_t exactly where tile t is all zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._philox_triton import MAX_PROGRAMS, count_draws, first_draw, random_bits, uniform53
from sharpwave.ops.cdf import _scratch, reference

# Tiles that publish into one group; the chain of group prefixes is n / (GROUP * BLOCK) links long.
GROUP = 128
SMALL_DRAW = 16384


@triton.jit
def _cut(x):
    """A float64 >= 0 rounded down to the 36 mantissa bits that share a word with a 16-bit tag."""
    return (x.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFF0000).to(tl.float64, bitcast=True)


@triton.jit
def _tagged(x, tag):
    return (x.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFF0000) | tag


@triton.jit
def _to_float32(x):
    return tl.minimum(x.to(tl.float32), 3.4028234663852886e38)


@triton.jit
def _load_weights(weights_ptr, offs, n):
    return _clean(tl.load(weights_ptr + offs, mask=offs < n, other=0.0))


@triton.jit
def _clean(w):
    w = tl.maximum(w, 0.0)
    return tl.where(w < float("inf"), w, 0.0)  # false for NaN too


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tile_offsets(ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]


@triton.jit
def _scan_tile(w, below, through, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Prefix sums of one tile [ROWS, COLS] that begin at `below` and end at `through`: of rows, then within rows.

    Short rows lie in a few lanes of a warp, so most of the work needs no shared memory.

    A parallel sum need not be monotone in its last bit. The running maximum over the items of positive weight is, and
    repeats the last of them at items of weight 0. The highest value becomes `through`, where the next tile begins.
    """
    d = w.to(tl.float64)
    row = tl.arange(0, ROWS)
    row_sums = _spread(tl.sum(d, 1), ROWS)
    starts = below + (tl.cumsum(row_sums, 0) - row_sums)
    sums = (starts[:, None] + tl.cumsum(d, 1)).to(tl.float32)
    rising = tl.associative_scan(tl.where(w > 0.0, sums, 0.0), 1, _larger)
    tops = tl.associative_scan(_spread(tl.max(rising, 1), ROWS), 0, _larger)
    top = tl.max(tops, 0)
    reached = tl.where(row == 0, 0.0, tl.gather(tops, tl.maximum(row - 1, 0), 0))
    rising = tl.maximum(rising, reached[:, None])
    low, high = _to_float32(below), _to_float32(through)
    return tl.where(rising >= top, high, tl.minimum(tl.maximum(rising, low), high))


@triton.jit
def _spread(x, SIZE: tl.constexpr):
    """The same vector in a layout of its own: one left over from a reduction has many copies, and scans slowly."""
    return tl.gather(x, tl.arange(0, SIZE), 0)


@triton.jit
def _one_tile_kernel(weights_ptr, out_ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    offs = _tile_offsets(ROWS, COLS)
    w = _load_weights(weights_ptr, offs, n)
    below = tl.zeros([], tl.float64)
    through = tl.sum(tl.sum(w.to(tl.float64), 1), 0)
    tl.store(out_ptr + offs, _scan_tile(w, below, through, ROWS, COLS), mask=offs < n)


@triton.jit
def _look_back_kernel(
    weights_ptr,
    out_ptr,
    words_ptr,
    n,
    n_tiles,
    capacity,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """words: [epoch << 32 | tickets taken], `capacity` tile sums, capacity / GROUP + 1 group prefixes.

    No hang: a tile waits only for tiles of smaller ticket, which have started, since tickets are taken by running
    programs. Each publishes its sum before it waits for anything, and the least ticket that waits for a group prefix
    waits for a tile that has all it needs; so by induction every wait ends, in whatever order blocks are scheduled.
    """
    # One word holds both, so that whoever takes the last ticket knows that all others have read the epoch.
    claim = tl.atomic_add(words_ptr, 1, sem="relaxed").to(tl.uint64)
    tile = (claim & 0xFFFFFFFF).to(tl.int64)
    epoch = claim >> 32
    if tile == n_tiles - 1:
        tl.atomic_xchg(words_ptr, ((epoch + 1) << 32).to(tl.int64), sem="relaxed")
    tag = (epoch + 1) & 0xFFFF
    sums_ptr = words_ptr + 1
    groups_ptr = sums_ptr + capacity

    offs = _tile_offsets(ROWS, COLS)
    start = tile * (ROWS * COLS)
    w = _load_weights(weights_ptr + start, offs, n - start)
    own = _cut(tl.sum(tl.sum(w.to(tl.float64), 1), 0))
    # Value and tag are one word, so that no reader can see the one without the other, and no other data hangs on it:
    # relaxed order is enough.
    tl.atomic_xchg(sums_ptr + tile, _tagged(own, tag).to(tl.int64), sem="relaxed")
    if tile + n_tiles < capacity:  # the size class's other words must carry this epoch too
        tl.atomic_xchg(sums_ptr + tile + n_tiles, tag.to(tl.int64), sem="relaxed")
    if (tile > n_tiles // GROUP) & (tile <= capacity // GROUP):
        tl.atomic_xchg(groups_ptr + tile, tag.to(tl.int64), sem="relaxed")

    group = tile // GROUP
    place = tile % GROUP
    lanes = tl.arange(0, GROUP)
    base = tl.zeros([], tl.float64)
    before = sums_ptr + group * GROUP + lanes
    if place > 0:
        seen = 0
        while seen == 0:
            words = tl.load(before, mask=lanes < place, other=0, volatile=True).to(tl.uint64)
            seen = tl.min(tl.where((lanes < place) & ((words & 0xFFFF) != tag), 0, 1), 0)
    # Read again: several threads may hold copies of one lane, and only one of them need have seen it in the loop.
    words = tl.load(before, mask=lanes < place, other=0, volatile=True).to(tl.uint64)
    sums = _cut(words.to(tl.float64, bitcast=True))
    if group > 0:
        seen = 0
        while seen == 0:
            word = tl.load(groups_ptr + group, volatile=True).to(tl.uint64)
            seen = tl.where((word & 0xFFFF) == tag, 1, 0)
            base = _cut(word.to(tl.float64, bitcast=True))
    sums = tl.where(lanes < place, sums, 0.0)
    sums = tl.where(lanes == place, own, sums)
    # One reduction for both ends, so that the next tile's lower end has the bits of this tile's upper end.
    ends = tl.arange(0, 2)
    both = tl.where(lanes[None, :] < place + ends[:, None], sums[None, :], 0.0)  # [2, GROUP]
    prefixes = _cut(base + tl.sum(both, 1))
    below = tl.sum(tl.where(ends == 0, prefixes, 0.0), 0)
    through = tl.sum(tl.where(ends == 1, prefixes, 0.0), 0)
    if place == GROUP - 1:
        tl.atomic_xchg(groups_ptr + group + 1, _tagged(through, tag).to(tl.int64), sem="relaxed")
    tl.store(out_ptr + start + offs, _scan_tile(w, below, through, ROWS, COLS), mask=offs < n - start)


@triton.jit
def _serial_kernel(weights_ptr, out_ptr, n):
    total = tl.zeros([], tl.float64)
    for i in range(n):
        w = tl.load(weights_ptr + i)
        total += tl.where((w >= 0.0) & (w < float("inf")), w, 0.0).to(tl.float64)
        tl.store(out_ptr + i, _to_float32(total))


@triton.jit
def _seed(seed, seed_ptr, SEED_IN_MEMORY: tl.constexpr):
    return tl.load(seed_ptr) if SEED_IN_MEMORY else seed


@triton.jit(do_not_specialize=["seed", "size", "n"])
def _sample_kernel(
    cdf_ptr,
    out_ptr,
    seed,
    seed_ptr,
    offset_ptr,
    size,
    n,
    SEED_IN_MEMORY: tl.constexpr,
    STRATIFIED: tl.constexpr,
    DRAWS: tl.constexpr,
    FANOUT: tl.constexpr,
):
    """A FANOUT-ary search for each draw: DRAWS of them a program, a row of pivots each."""
    first = first_draw(offset_ptr, n)
    tl.debug_barrier()
    count_draws(offset_ptr, n)
    key = _seed(seed, seed_ptr, SEED_IN_MEMORY)
    total = tl.load(cdf_ptr + size - 1).to(tl.float64)
    lanes = tl.arange(0, FANOUT)
    for block in range(tl.program_id(0), tl.cdiv(n, DRAWS), tl.num_programs(0)):
        k = block * DRAWS + tl.arange(0, DRAWS).to(tl.int64)
        u = uniform53(random_bits(key, first + k))
        if STRATIFIED:
            u = (k.to(tl.float64) + u) / tl.cast(n, tl.float64)
        mass = u * total
        low = tl.zeros([DRAWS], tl.int64)
        length = tl.cast(size, tl.int64)
        # Keeps: the answer is in [low, low + length), and the last item of the CDF satisfies the test.
        while length > 1:
            step = tl.cdiv(length, FANOUT)
            pivots = low[:, None] + (lanes[None, :] + 1) * step - 1  # [DRAWS, FANOUT]
            cdf = tl.load(cdf_ptr + pivots, mask=pivots < size, other=float("inf")).to(tl.float64)
            above = (cdf > mass[:, None]) | (cdf == total)
            low += step * tl.sum(tl.where(above, 0, 1), 1)
            length = step
        tl.store(out_ptr + k, low, mask=k < n)


@triton.jit(do_not_specialize=["seed", "size"])
def _clock_kernel(
    cdf_ptr, out_ptr, seed, seed_ptr, offset_ptr, size, SEED_IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr
):
    first = first_draw(offset_ptr, size)
    tl.debug_barrier()
    count_draws(offset_ptr, size)
    key = _seed(seed, seed_ptr, SEED_IN_MEMORY)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        through = tl.load(cdf_ptr + i, mask=i < size, other=0.0).to(tl.float64)
        below = tl.load(cdf_ptr + i - 1, mask=(i > 0) & (i < size), other=0.0).to(tl.float64)
        u = uniform53(random_bits(key, first + i))
        clock = -tl.log(u + 5.5511151231257827e-17) / (through - below)
        tl.store(out_ptr + i, tl.where(through > below, clock, float("inf")), mask=i < size)


@triton.jit
def _units(w, scale):
    """Weights as integers: `reference.draw_segments`."""
    return tl.where(w > 0.0, (w.to(tl.float64) * scale).to(tl.int64) + 1, 0)


@triton.jit(do_not_specialize=["seed", "n"])
def _draw_segments_kernel(
    weight_ptr,
    index_ptr,
    importance_ptr,
    bad_ptr,
    seed,
    seed_ptr,
    offset_ptr,
    beta_ptr,
    eps,
    count,
    n,
    BITS: tl.constexpr,
    SEED_IN_MEMORY: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Each program adds up all weights by itself, which is cheaper than waiting for another, and makes a few draws.

    Sums are integers, so every program has the same ones. A draw finds its row by the sums of rows, then its column.
    """
    offs = _tile_offsets(ROWS, COLS)
    raw = tl.load(weight_ptr + offs, mask=offs < count, other=0.0)
    first = first_draw(offset_ptr, n)
    tl.debug_barrier()
    count_draws(offset_ptr, n)
    w = tl.where(offs < count, _clean(raw) + eps, 0.0)
    # The largest weight is below 2^exponent and, if normal, at least half of it.
    largest = tl.max(tl.max(w, 1), 0)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1) - 126
    scale = ((1023 + BITS - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    row_sums = _spread(tl.sum(_units(w, scale), 1), ROWS)
    row_ends = tl.cumsum(row_sums, 0)
    total = tl.max(row_ends, 0)
    if tl.program_id(0) == 0:
        bad = (raw < 0.0) | ~(raw < float("inf"))
        tl.store(bad_ptr, tl.sum(tl.sum(bad.to(tl.int32), 1), 0).to(tl.int64))

    key = _seed(seed, seed_ptr, SEED_IN_MEMORY)
    beta = tl.load(beta_ptr)
    per_weight = tl.cast(count, tl.float64) * scale / total.to(tl.float64)
    col = tl.arange(0, COLS)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(n, DRAWS), tl.num_programs(0)):
        k = block * DRAWS + tl.arange(0, DRAWS).to(tl.int64)
        mass = tl.umulhi(random_bits(key, first + k), total.to(tl.uint64)).to(tl.int64)
        passed = row_ends[None, :] <= mass[:, None]  # [DRAWS, ROWS]
        row = tl.minimum(tl.sum(passed.to(tl.int32), 1), ROWS - 1)  # only a total of 0 comes past the end
        rest = mass - tl.sum(tl.where(passed, row_sums[None, :], 0), 1)
        at = row[:, None] * COLS + col  # [DRAWS, COLS]
        w_row = tl.load(weight_ptr + at, mask=at < count, other=0.0)
        w_row = tl.where(at < count, _clean(w_row) + eps, 0.0)
        chosen = tl.sum((tl.cumsum(_units(w_row, scale), 1) <= rest[:, None]).to(tl.int32), 1)
        index = tl.where(total > 0, row * COLS + chosen, 0)
        picked = tl.sum(tl.where(col == chosen[:, None], w_row, 0.0), 1)
        importance = tl.exp2(-beta * tl.log2((picked.to(tl.float64) * per_weight).to(tl.float32)))
        tl.store(index_ptr + k, index.to(tl.int64), mask=k < n)
        tl.store(importance_ptr + k, tl.where(total > 0, importance, 0.0), mask=k < n)


def build_cdf(
    weights: Tensor,
    out: Tensor,
    block: int | None = None,
    cols: int = 16,
    group: int = GROUP,
    warps: int = 4,
) -> None:
    """Same as `reference.build_cdf`; all but the first two arguments are for tests and tuning."""
    n = weights.numel()
    if block is None:
        # The fastest of those tried on an H200 at 2^13, 2^18, 2^20 and 2^25.
        if n <= 1 << 14:
            block, cols = min(max(triton.next_power_of_2(n), 128), 1024), 32
        else:
            block = 4096 if 1 << 19 < n <= 1 << 22 else 2048
    n_tiles = triton.cdiv(n, block)
    tile = dict(ROWS=block // cols, COLS=cols)
    if n_tiles == 1:
        _one_tile_kernel[(1,)](weights, out, n, **tile, num_warps=warps)
        return
    capacity = triton.next_power_of_2(n_tiles)
    words = _scratch.slab(capacity + capacity // group + 2, weights.device)
    _look_back_kernel[(n_tiles,)](weights, out, words, n, n_tiles, capacity, **tile, GROUP=group, num_warps=warps)


def build_cdf_serial(weights: Tensor, out: Tensor) -> None:
    """Same as `reference.build_cdf`, by one thread."""
    _serial_kernel[(1,)](weights, out, weights.numel(), num_warps=1)


def sample_cdf(cdf: Tensor, n: int, seed: int | Tensor, offset: Tensor, stratified: bool, replacement: bool) -> Tensor:
    """Same as `reference.sample_cdf`; keeps the reference's promises without reading the device."""
    in_memory = isinstance(seed, Tensor)
    seeds = (0, seed) if in_memory else (seed, None)
    size = cdf.numel()
    if not replacement:
        clocks = torch.empty(size, dtype=torch.float64, device=cdf.device)
        grid = (min(triton.cdiv(size, 1024), MAX_PROGRAMS),)
        _clock_kernel[grid](cdf, clocks, *seeds, offset, size, SEED_IN_MEMORY=in_memory, BLOCK=1024)
        return reference.earliest(clocks, n)
    out = torch.empty(n, dtype=torch.int64, device=cdf.device)
    draws = 4
    _sample_kernel[(min(triton.cdiv(n, draws), MAX_PROGRAMS),)](
        cdf,
        out,
        *seeds,
        offset,
        size,
        n,
        SEED_IN_MEMORY=in_memory,
        STRATIFIED=stratified,
        DRAWS=draws,
        FANOUT=128,
    )
    return out


def draw_segments(
    weight: Tensor,
    n: int,
    seed: int | Tensor,
    offset: Tensor,
    beta: Tensor,
    eps: float,
    draws: int = 4,
    cols: int = 64,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.draw_segments`: one launch up to SMALL_DRAW weights, else the reference itself.

    `draws` a program, `cols` and `warps` are for tuning.
    """
    count = weight.numel()
    if count > SMALL_DRAW:
        return reference.draw_segments(weight, n, seed, offset, beta, eps)
    device = weight.device
    in_memory = isinstance(seed, Tensor)
    seeds = (0, seed) if in_memory else (seed, None)
    index = torch.empty(n, dtype=torch.int64, device=device)
    importance = torch.empty(n, device=device)
    bad = torch.empty((), dtype=torch.int64, device=device)
    size = max(triton.next_power_of_2(count), 256)
    _draw_segments_kernel[(min(triton.cdiv(n, draws), MAX_PROGRAMS),)](
        weight,
        index,
        importance,
        bad,
        *seeds,
        offset,
        beta,
        eps,
        count,
        n,
        BITS=reference.segment_bits(count),
        SEED_IN_MEMORY=in_memory,
        ROWS=size // cols,
        COLS=cols,
        DRAWS=draws,
        num_warps=warps or min(max(size // 1024, 4), 16),
    )
    return index, importance, bad
