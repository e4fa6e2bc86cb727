"""Prefix sums for GPUs.

`_scan_kernel` scans in one pass over tiles. What makes its result the same on every run is that every addition has a
fixed place. Prefixes come from trees of fixed shape: one over the sums of a group's tiles, one over the sums of groups,
one over those of groups of groups. A tile's prefix is the tree's value with the tiles above it taken as 0, so it never
falls from tile to tile, and two tiles with only zeros between them have the same one, by bits. No sum waits for a
prefix, so the longest chain of waits is as long as there are levels, three at most. (Adding up whatever a look-back
happens to find gives bits that depend on timing; a chain of prefixes from group to group takes a microsecond a link.)
"""

import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops.cdf import _scratch

# Tiles of a group, and groups of a group of groups; the third level holds them all.
GROUP = 256


@triton.jit
def _cut(x):
    """A float64 >= 0 rounded down to the 36 mantissa bits that share a word with a 16-bit tag."""
    return (x.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFF0000).to(tl.float64, bitcast=True)


@triton.jit
def _tagged(x, tag):
    return ((x.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFF0000) | tag).to(tl.int64)


@triton.jit
def _to_float32(x):
    return tl.minimum(x.to(tl.float32), 3.4028234663852886e38)


@triton.jit
def clean(w):
    """0 for what is negative, NaN or infinite: as unsigned integers, the bits of all of these are the largest."""
    return tl.where(w.to(tl.uint32, bitcast=True) < 0x7F800000, w, 0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _split4(x, SIZE: tl.constexpr):
    """[4 SIZE] in any shape, as elements 0, 1, 2 and 3 of every four."""
    even, odd = tl.split(tl.reshape(x, [SIZE, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _join4(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _quad_offsets(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _load_tile(weights_ptr, start, n, BLOCK: tl.constexpr):
    """[BLOCK / 4, 4]: a thread holds four neighbours."""
    offs = _quad_offsets(BLOCK)
    if start + BLOCK <= n:
        w = tl.load(weights_ptr + start + offs)
    else:
        w = tl.load(weights_ptr + start + offs, mask=offs < n - start, other=0.0)
    return clean(w)


@triton.jit
def _store_tile(out_ptr, start, n, y, BLOCK: tl.constexpr):
    offs = _quad_offsets(BLOCK)
    if start + BLOCK <= n:
        tl.store(out_ptr + start + offs, y)
    else:
        tl.store(out_ptr + start + offs, y, mask=offs < n - start)


@triton.jit
def _sums_within(w, BLOCK: tl.constexpr):
    """Prefix sums of quads, p1 to p4 [BLOCK / 4] float32, and over the quads of rows, e1 to e4 [BLOCK / 16] float64.

    Two roundings a quad, and one at the end, stay below 1.8e-7: sums of numbers >= 0 are as accurate as the worst of
    them. Rows of four quads are brought into one thread, so that most of the work needs no other lane.
    """
    p1, b, c, d = _split4(w, BLOCK // 4)
    p2 = p1 + b
    p3 = p2 + c
    p4 = p2 + (c + d)
    q0, q1, q2, q3 = _split4(p4, BLOCK // 16)
    e1 = q0.to(tl.float64)
    e2 = e1 + q1.to(tl.float64)
    e3 = e2 + q2.to(tl.float64)
    e4 = e3 + q3.to(tl.float64)
    return p1, p2, p3, p4, e1, e2, e3, e4


@triton.jit
def _prefix_sums(p1, p2, p3, p4, e1, e2, e3, e4, below, through, BLOCK: tl.constexpr):
    """[BLOCK / 4, 4] prefix sums of a tile that begins at `below` and ends at `through`.

    A parallel sum need not be monotone in its last bit. The running maximum over the rows with a positive item is, and
    repeats the last of them at rows of zeros; its highest value becomes `through`, where the next tile begins. A row
    begins where the one before it ends. Within a row sums are serial, so they never fall and repeat at zeros; what
    reaches its row's or quad's last value is set to that row's or quad's end.
    """
    ROWS: tl.constexpr = BLOCK // 16
    row = tl.arange(0, ROWS)
    sums = tl.cumsum(e4, 0)
    rising = tl.associative_scan(tl.where(e4 > 0.0, sums, 0.0), 0, _larger)
    most = tl.gather(rising, row * 0 + (ROWS - 1), 0)
    end = tl.where(rising == most, through, tl.minimum(below + rising, through))
    start = tl.where(row == 0, below, tl.gather(end, tl.maximum(row - 1, 0), 0))
    # Where each quad of a row begins, and its last value.
    v0 = tl.where(e4 == 0.0, end, start)
    v1 = tl.where(e1 == e4, end, start + e1)
    v2 = tl.where(e2 == e4, end, start + e2)
    v3 = tl.where(e3 == e4, end, start + e3)
    high = _to_float32(end)
    f1 = tl.minimum(v1.to(tl.float32), high)
    f2 = tl.minimum(v2.to(tl.float32), high)
    f3 = tl.minimum(v3.to(tl.float32), high)
    base = tl.reshape(_join4(v0, v1, v2, v3), [BLOCK // 4])
    y4 = tl.reshape(_join4(f1, f2, f3, high), [BLOCK // 4])
    y1 = tl.where(p1 == p4, y4, tl.minimum((base + p1.to(tl.float64)).to(tl.float32), y4))
    y2 = tl.where(p2 == p4, y4, tl.minimum((base + p2.to(tl.float64)).to(tl.float32), y4))
    y3 = tl.where(p3 == p4, y4, tl.minimum((base + p3.to(tl.float64)).to(tl.float32), y4))
    return tl.reshape(_join4(y1, y2, y3, y4), [BLOCK // 4, 4])


@triton.jit
def _one_tile_kernel(weights_ptr, out_ptr, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after_previous(OVERLAP)
    p1, p2, p3, p4, e1, e2, e3, e4 = _sums_within(_load_tile(weights_ptr, 0, n, BLOCK), BLOCK)
    below = tl.zeros([], tl.float64)
    y = _prefix_sums(p1, p2, p3, p4, e1, e2, e3, e4, below, tl.sum(e4, 0), BLOCK)
    _store_tile(out_ptr, 0, n, y, BLOCK)


@triton.jit
def _wait(ptr, tag):
    seen = 0
    while seen == 0:
        seen = ((tl.load(ptr, volatile=True).to(tl.uint64) & 0xFFFF) == tag).to(tl.int32)


@triton.jit
def _ends(ptr, tag, place, below, through, WIDTH: tl.constexpr):
    """The first `place` words' sum, with `below` and with `through` in the next place, by one tree of WIDTH leaves.

    Waits for these words: one without the tag counts as infinite, so that one reduction adds them up and says whether
    all were there. (Several threads may hold copies of a lane that were not read together, and of these a reduction
    takes one.)
    """
    lanes = tl.arange(0, WIDTH)
    low = tl.full([], float("inf"), tl.float64)
    high = low
    while low == float("inf"):
        words = tl.load(ptr + lanes, mask=lanes < place, other=0, volatile=True).to(tl.uint64)
        sums = tl.where((words & 0xFFFF) == tag, _cut(words.to(tl.float64, bitcast=True)), float("inf"))
        sums = tl.where(lanes < place, sums, 0.0)
        low, high = tl.reduce(
            (tl.where(lanes == place, below, sums), tl.where(lanes == place, through, sums)), 0, _add2
        )
    return _cut(low), _cut(high)


@triton.jit
def _scan_kernel(
    weights_ptr,
    out_ptr,
    words_ptr,
    n,
    n_tiles,
    capacity,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LEVELS: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """words: [epoch << 32 | tickets taken], and sums: `capacity` of tiles, of groups of GROUP, of groups of groups.

    No hang: a tile waits only for sums of tiles of smaller ticket, which have started, since tickets are taken by
    running programs. A tile publishes its own sum before it waits for anything, and the last of a group publishes the
    group's as soon as it has its tiles' sums; so every wait ends, in whatever order blocks are scheduled.
    """
    after_previous(OVERLAP)
    # One word holds both, so that whoever takes the last ticket knows that all others have read the epoch.
    claim = tl.atomic_add(words_ptr, 1, sem="relaxed").to(tl.uint64)
    tile = (claim & 0xFFFFFFFF).to(tl.int32)
    epoch = claim >> 32
    if tile == n_tiles - 1:
        tl.atomic_xchg(words_ptr, ((epoch + 1) << 32).to(tl.int64), sem="relaxed")
    tag = (epoch + 1) & 0xFFFF
    sums_ptr = words_ptr + 1
    groups_ptr = sums_ptr + capacity
    tops_ptr = groups_ptr + capacity // GROUP

    start = tile.to(tl.int64) * BLOCK
    p1, p2, p3, p4, e1, e2, e3, e4 = _sums_within(_load_tile(weights_ptr, start, n, BLOCK), BLOCK)
    own = _cut(tl.sum(e4, 0))
    # Value and tag are one word, so that no reader can see the one without the other, and no other data hangs on it:
    # relaxed order is enough.
    tl.atomic_xchg(sums_ptr + tile, _tagged(own, tag), sem="relaxed")
    # The size class's other words must carry this epoch too.
    if tile + n_tiles < capacity:
        tl.atomic_xchg(sums_ptr + tile + n_tiles, tag.to(tl.int64), sem="relaxed")
    if LEVELS > 1:  # noqa: SIM102 (known when compiled)
        if (tile >= n_tiles // GROUP) & (tile < capacity // GROUP):
            tl.atomic_xchg(groups_ptr + tile, tag.to(tl.int64), sem="relaxed")
    if LEVELS > 2:  # noqa: SIM102 (known when compiled)
        if (tile >= n_tiles // (GROUP * GROUP)) & (tile < capacity // (GROUP * GROUP)):
            tl.atomic_xchg(tops_ptr + tile, tag.to(tl.int64), sem="relaxed")

    # Waiting for the nearest word first spares the others' reduction most of its turns, and costs a turn where tiles
    # are few.
    group = tile // GROUP
    place = tile % GROUP
    if not FEW:  # noqa: SIM102 (known when compiled)
        if place > 0:
            _wait(sums_ptr + tile - 1, tag)
    below, through = _ends(sums_ptr + group * GROUP, tag, place, tl.zeros([], tl.float64), own, GROUP)
    if LEVELS > 1:
        if place == GROUP - 1:
            tl.atomic_xchg(groups_ptr + group, _tagged(through, tag), sem="relaxed")
        top = group // GROUP
        at = group % GROUP
        if not FEW:  # noqa: SIM102 (known when compiled)
            if at > 0:
                _wait(groups_ptr + group - 1, tag)
        below, through = _ends(groups_ptr + top * GROUP, tag, at, below, through, GROUP)
        if LEVELS > 2:
            if (place == GROUP - 1) & (at == GROUP - 1):
                tl.atomic_xchg(tops_ptr + top, _tagged(through, tag), sem="relaxed")
            below, through = _ends(tops_ptr, tag, top, below, through, GROUP)
    y = _prefix_sums(p1, p2, p3, p4, e1, e2, e3, e4, below, through, BLOCK)
    _store_tile(out_ptr, start, n, y, BLOCK)


@triton.jit
def _serial_kernel(weights_ptr, out_ptr, n):
    total = tl.zeros([], tl.float64)
    for i in range(n):
        w = tl.load(weights_ptr + i)
        total += tl.where((w >= 0.0) & (w < float("inf")), w, 0.0).to(tl.float64)
        tl.store(out_ptr + i, _to_float32(total))


def build_cdf(
    weights: Tensor, out: Tensor, block: int | None = None, group: int | None = None, warps: int | None = None
) -> None:
    """Same as `reference.build_cdf`; all but the first two arguments are for tests and tuning."""
    n = weights.numel()
    few = n <= 1 << 14
    if block is None:
        # The fastest of those tried on an H200 at 2^13, 2^18, 2^20 and 2^25.
        smallest = 256 if n <= 1 << 13 else 512
        block = min(max(triton.next_power_of_2(n), 64), smallest) if few else 2048 if n <= 1 << 19 else 4096
    warps = warps or (2 if block <= 256 else 4)
    early = overlap(weights.device)
    n_tiles = triton.cdiv(n, block)
    if n_tiles == 1:
        _one_tile_kernel[(1,)](weights, out, n, BLOCK=block, num_warps=warps, **early)
        return
    group = group or min(triton.next_power_of_2(n_tiles), GROUP)
    levels = 1 if n_tiles <= group else 2 if n_tiles <= group**2 else 3
    capacity = triton.next_power_of_2(n_tiles)
    words = _scratch.slab(capacity + capacity // group + capacity // group**2 + 1, weights.device)
    shape = dict(BLOCK=block, GROUP=group, LEVELS=levels, FEW=few)
    _scan_kernel[(n_tiles,)](weights, out, words, n, n_tiles, capacity, **shape, num_warps=warps, **early)


def build_cdf_serial(weights: Tensor, out: Tensor) -> None:
    """Same as `reference.build_cdf`, by one thread."""
    _serial_kernel[(1,)](weights, out, weights.numel(), num_warps=1)
