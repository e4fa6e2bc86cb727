"""Prefix sums (`_scan_triton`) and draws for GPUs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops._philox_triton import (
    MAX_PROGRAMS,
    count_draws,
    first_draw,
    random_bits,
    uniform53,
)
from sharpwave.ops.cdf import reference
from sharpwave.ops.cdf._scan_triton import build_cdf, build_cdf_serial, clean

__all__ = ["build_cdf", "build_cdf_serial", "draw_segments", "sample_cdf"]

# Of a launch that does not say otherwise.
_THREADS = 128


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
    THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A FANOUT-ary search for each draw: DRAWS of them a program, a row of pivots each."""
    after_previous(OVERLAP)
    first = first_draw(offset_ptr, n, tl.num_programs(0))
    count_draws(offset_ptr, n, tl.num_programs(0), THREADS)
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
    cdf_ptr,
    out_ptr,
    seed,
    seed_ptr,
    offset_ptr,
    size,
    SEED_IN_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):
    first = first_draw(offset_ptr, size, tl.num_programs(0))
    count_draws(offset_ptr, size, tl.num_programs(0), THREADS)
    key = _seed(seed, seed_ptr, SEED_IN_MEMORY)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        through = tl.load(cdf_ptr + i, mask=i < size, other=0.0).to(tl.float64)
        below = tl.load(cdf_ptr + i - 1, mask=(i > 0) & (i < size), other=0.0).to(tl.float64)
        u = uniform53(random_bits(key, first + i))
        clock = -tl.log(u + 5.5511151231257827e-17) / (through - below)
        tl.store(out_ptr + i, tl.where(through > below, clock, float("inf")), mask=i < size)


@triton.jit
def _units(w, scale, ZEROS: tl.constexpr):
    """`reference.draw_segments`, integers in float64: adding 2^52 rounds to the nearest, and one is added."""
    units = (w.to(tl.float64) * scale + 4503599627370496.0) - 4503599627370495.0
    return tl.where(w > 0.0, units, 0.0) if ZEROS else units


@triton.jit
def _padded_weights(weight_ptr, offs, count, eps, MASKED: tl.constexpr):
    if MASKED:
        return tl.where(offs < count, clean(tl.load(weight_ptr + offs, mask=offs < count, other=0.0)) + eps, 0.0)
    else:
        return clean(tl.load(weight_ptr + offs)) + eps


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
    MASKED: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DRAWS: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program adds up all weights by itself, which is cheaper than waiting for another, and makes a few draws.

    Sums are integers below 2^53, exact in float64 in any order, so every program has the same ones. A draw finds its
    row by the sums of rows, then its column. One program more than the draws need counts the invalid weights.
    """
    after_previous(OVERLAP)
    offs = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    if tl.program_id(0) == tl.num_programs(0) - 1:
        raw = tl.load(weight_ptr + offs, mask=offs < count, other=0.0)
        bad = (raw < 0.0) | ~(raw < float("inf"))
        tl.store(bad_ptr, tl.sum(bad.to(tl.int32)).to(tl.int64))
        return
    w = _padded_weights(weight_ptr, offs, count, eps, MASKED)
    first = first_draw(offset_ptr, n, tl.num_programs(0) - 1)
    key = _seed(seed, seed_ptr, SEED_IN_MEMORY)
    beta = tl.load(beta_ptr)
    k = tl.program_id(0) * DRAWS + tl.arange(0, DRAWS).to(tl.int64)
    bits = random_bits(key, first + k)
    count_draws(offset_ptr, n, tl.num_programs(0) - 1, 32 * WARPS)
    # The largest weight is below 2^exponent and, if normal, at least half of it.
    exponent = tl.maximum(tl.max(w).to(tl.int32, bitcast=True) >> 23, 1) - 126
    scale = ((1023 + BITS - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    # Gathered where it is: a vector left over from a reduction has many copies, and scans slowly.
    row_sums = tl.gather(tl.sum(_units(w, scale, ZEROS), 1), tl.arange(0, ROWS), 0)
    row_ends = tl.cumsum(row_sums, 0)
    total = tl.max(row_ends, 0)
    mass = tl.umulhi(bits, total.to(tl.int64).to(tl.uint64)).to(tl.int64).to(tl.float64)
    passed = row_ends[None, :] <= mass[:, None]  # [DRAWS, ROWS]
    row = tl.minimum(tl.sum(passed.to(tl.int32), 1), ROWS - 1)  # only a total of 0 comes past the end
    rest = mass - tl.sum(tl.where(passed, row_sums[None, :], 0.0), 1)
    col = tl.arange(0, COLS)[None, :]
    w_row = _padded_weights(weight_ptr, row[:, None] * COLS + col, count, eps, MASKED)  # [DRAWS, COLS]
    chosen = tl.sum((tl.cumsum(_units(w_row, scale, ZEROS), 1) <= rest[:, None]).to(tl.int32), 1)
    picked = tl.sum(tl.where(col == chosen[:, None], w_row, 0.0), 1)
    units = (picked.to(tl.float64) * scale).to(tl.float32) * tl.cast(count, tl.float32)
    importance = tl.exp2(-beta * tl.log2(units / total.to(tl.float32)))
    tl.store(index_ptr + k, tl.where(total > 0, row * COLS + chosen, 0).to(tl.int64), mask=k < n)
    tl.store(importance_ptr + k, tl.where(total > 0, importance, 0.0), mask=k < n)


def sample_cdf(cdf: Tensor, n: int, seed: int | Tensor, offset: Tensor, stratified: bool, replacement: bool) -> Tensor:
    """Same as `reference.sample_cdf`; keeps the reference's promises without reading the device."""
    in_memory = isinstance(seed, Tensor)
    seeds = (0, seed) if in_memory else (seed, None)
    size = cdf.numel()
    if not replacement:
        clocks = torch.empty(size, dtype=torch.float64, device=cdf.device)
        grid = (min(triton.cdiv(size, 1024), MAX_PROGRAMS),)
        _clock_kernel[grid](cdf, clocks, *seeds, offset, size, SEED_IN_MEMORY=in_memory, BLOCK=1024, THREADS=_THREADS)
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
        THREADS=_THREADS,
        **overlap(cdf.device),
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
    """Same as `reference.draw_segments`: one launch up to reference.SMALL_DRAW weights, else the reference itself.

    `draws` a program, `cols` and `warps` are for tuning.
    """
    count = weight.numel()
    programs = triton.cdiv(n, draws) + 1
    if count > reference.SMALL_DRAW or programs > MAX_PROGRAMS:
        return reference.draw_segments(weight, n, seed, offset, beta, eps)
    device = weight.device
    in_memory = isinstance(seed, Tensor)
    seeds = (0, seed) if in_memory else (seed, None)
    index = torch.empty(n, dtype=torch.int64, device=device)
    importance = torch.empty(n, device=device)
    bad = torch.empty((), dtype=torch.int64, device=device)
    size = max(triton.next_power_of_2(count), 256)
    masked = size != count
    warps = warps or (4 if size <= 8192 else 8)
    _draw_segments_kernel[(programs,)](
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
        MASKED=masked,
        ZEROS=masked or eps == 0,
        ROWS=size // cols,
        COLS=cols,
        DRAWS=draws,
        WARPS=warps,
        num_warps=warps,
        **overlap(device),
    )
    return index, importance, bad
