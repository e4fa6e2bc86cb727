"""The MinGRU scan for GPUs: the steps of a tile in parallel lanes, the carries alone in serial order.

A program owns one row and BLOCK_H channels, and walks T in tiles of SEGMENTS x CHECKPOINT steps. A lane owns
CHECKPOINT consecutive steps of one channel and holds them in registers, so that loads, gates and stores of all segments
run side by side. What one segment hands to the next is found by running the carry alone, segment after segment:
two operations a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._backends import triton_interpreted
from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops.mingru.reference import CHECKPOINT


@triton.jit
def _sigmoid(x, APPROX: tl.constexpr):
    """1 / (1 + e^-x) to about 2 ulps; 0 and 1 where it would underflow or round there."""
    y = 1.0 + tl.exp2(x * -1.4426950408889634)
    if APPROX:
        # A full division costs more than the rest of the gate. The interpreter and other vendors take that.
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return 1.0 / y


@triton.jit
def _candidate(hidden, APPROX: tl.constexpr):
    """c and its slope in `hidden`."""
    squashed = _sigmoid(hidden, APPROX)
    up = hidden >= 0
    return tl.where(up, hidden + 0.5, squashed), tl.where(up, 1.0, squashed * (1.0 - squashed))


@triton.jit
def _load(ptrs, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return tl.load(ptrs).to(tl.float32)


@triton.jit
def _load_last(ptrs, mask, MASKED: tl.constexpr, LAST: tl.constexpr):
    """`_load`; with LAST nothing reads it again for long, and its place in the cache is the first to be given away."""
    if LAST:
        if MASKED:
            return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        return tl.load(ptrs, eviction_policy="evict_first").to(tl.float32)
    return _load(ptrs, mask, MASKED)


@triton.jit
def _store(ptrs, value, mask, MASKED: tl.constexpr):
    value = value.to(ptrs.dtype.element_ty)
    if MASKED:
        tl.store(ptrs, value, mask=mask)
    else:
        tl.store(ptrs, value)


@triton.jit
def _keep(ptrs, mask, MASKED: tl.constexpr):
    """All ones where the episode goes on, 0 where it was reset: what a state's bits are anded with, NaN or not."""
    if MASKED:
        return tl.load(ptrs, mask=mask, other=0).to(tl.int32) - 1
    return tl.load(ptrs).to(tl.int32) - 1


@triton.jit
def _keeps(reset_ptr, row, first, T, STEPS: tl.constexpr, EVEN_T: tl.constexpr):
    """`_keep` of each of a lane's steps; four flags a load where none is masked, for loads are what is scarce."""
    keeps = ()
    for k in tl.static_range(STEPS):
        if EVEN_T and STEPS % 4 == 0:
            if k % 4 == 0:
                word = tl.load((reset_ptr + row + k).to(tl.pointer_type(tl.int32)))
            keeps += (~((word << (31 - 8 * (k % 4))) >> 31),)
        else:
            keeps += (_keep(reset_ptr + row + k, first + k < T, not EVEN_T),)
    return keeps


@triton.jit
def _mask_bits(h, keep):
    return (h.to(tl.int32, bitcast=True) & keep).to(tl.float32, bitcast=True)


@triton.jit
def _row(tile, offs_s, s):
    """Row s of a [SEGMENTS, BLOCK_H] tile, bit for bit: the sum is one of integers."""
    bits = tl.where(offs_s == s, tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _or_minus_zero(value, condition):
    """`value` or -0, which leaves every number it is added to as it was, a zero's sign included.

    By its bits: Triton makes a literal -0.0 into +0.
    """
    bits = tl.where(condition, value.to(tl.int32, bitcast=True), -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scan_fwd_steps(
    h, combined_ptr, x_ptr, reset_ptr, out_ptr, kept_ptr, b, T, offs_h, mask,
    H: tl.constexpr, SAVE: tl.constexpr, APPROX: tl.constexpr, CHECKPOINT: tl.constexpr,
):  # fmt: skip
    """A row's steps one after the other, with resets that forget a NaN; the state after them."""
    for t in range(T):
        row = b * T + t
        combined = combined_ptr + row * 3 * H + offs_h
        hidden = _load(combined, mask, True)
        z = _sigmoid(_load(combined + H, mask, True), APPROX)
        p = _sigmoid(_load(combined + 2 * H, mask, True), APPROX)
        x = _load(x_ptr + row * H + offs_h, mask, True)
        if SAVE:
            tl.store(kept_ptr + t // CHECKPOINT * H + offs_h, h, mask=mask & (t % CHECKPOINT == 0))
        h = _mask_bits(h, _keep(reset_ptr + row, True, False))
        h = tl.fma(1.0 - z, h, z * _candidate(hidden, APPROX)[0])
        _store(out_ptr + row * H + offs_h, tl.fma(p, h - x, x), mask, True)
    return h


@triton.jit(do_not_specialize=["T"])
def _scan_fwd_kernel(
    combined_ptr,
    state_ptr,
    x_ptr,
    reset_ptr,
    out_ptr,
    next_state_ptr,
    checkpoints_ptr,
    T,
    H: tl.constexpr,
    STEPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESET: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN_T: tl.constexpr,
    MASKED: tl.constexpr,
    APPROX: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    LAST_READ: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    b = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    offs_h = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    offs_s = tl.arange(0, SEGMENTS)[:, None]
    mask_h = offs_h < H
    kept_ptr = checkpoints_ptr + b * tl.cdiv(T, CHECKPOINT) * H

    carry = tl.load(state_ptr + b * H + offs_h, mask=mask_h, other=0.0)  # [1, BLOCK_H]
    largest = tl.zeros([SEGMENTS, BLOCK_H], tl.int32)
    for tile in range(tl.cdiv(T, SEGMENTS * STEPS)):
        first = (tile * SEGMENTS + offs_s) * STEPS  # [SEGMENTS, 1]
        row = b * T + first
        combined = combined_ptr + row * (3 * H) + offs_h
        # h_t = a_t h_{t-1} + b_t. At a reset a_t is 0, which takes no more registers than a_t.
        decays, gains, ps, xs = (), (), (), ()
        if RESET:
            keeps = _keeps(reset_ptr, row, first, T, STEPS, EVEN_T)
        for k in tl.static_range(STEPS):
            mask = (first + k < T) & mask_h
            hidden = _load_last(combined + k * 3 * H, mask, MASKED, LAST_READ)
            z = _sigmoid(_load_last(combined + (k * 3 * H + H), mask, MASKED, LAST_READ), APPROX)
            ps += (_sigmoid(_load_last(combined + (k * 3 * H + 2 * H), mask, MASKED, LAST_READ), APPROX),)
            xs += (_load_last(x_ptr + row * H + offs_h + k * H, mask, MASKED, LAST_READ),)
            decay, gain = 1.0 - z, z * _candidate(hidden, APPROX)[0]
            if not EVEN_T:  # a step past the end is h = 1 h + -0, which keeps the sign of a zero too
                decay, gain = tl.where(first + k < T, decay, 1.0), _or_minus_zero(gain, first + k < T)
            decays += (_mask_bits(decay, keeps[k]) if RESET else decay,)
            gains += (gain,)
        start = tl.broadcast_to(carry, [SEGMENTS, BLOCK_H])
        for s in tl.static_range(SEGMENTS - 1):
            h = start
            for k in tl.static_range(STEPS):
                h = tl.fma(decays[k], h, gains[k])
            start = tl.where(offs_s == s + 1, _row(h, offs_s, s), start)
        h = start
        for k in tl.static_range(STEPS):
            if SAVE and k % CHECKPOINT == 0:
                kept = kept_ptr + (first + k) // CHECKPOINT * H + offs_h
                _store(kept, h, (first + k < T) & mask_h, MASKED)
            h = tl.fma(decays[k], h, gains[k])
            out = tl.fma(ps[k], h - xs[k], xs[k])
            _store(out_ptr + row * H + offs_h + k * H, out, (first + k < T) & mask_h, MASKED)
        if RESET:
            largest = tl.maximum(largest, h.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        carry = h
        if SEGMENTS > 1:
            carry = _row(h, offs_s, SEGMENTS - 1)
    if RESET:  # noqa: SIM102
        # A state that is not finite stays so, for 0 NaN and 0 inf are NaN, and a reset did not forget it.
        if tl.max(tl.max(largest, 1), 0) >= 0x7F800000:
            tl.debug_barrier()  # what is written from here on comes after what was written above
            h = tl.load(state_ptr + b * H + offs_h, mask=mask_h, other=0.0)
            carry = _scan_fwd_steps(
                h, combined_ptr, x_ptr, reset_ptr, out_ptr, kept_ptr, b, T, offs_h, mask_h,
                H, SAVE, APPROX, CHECKPOINT,
            )  # fmt: skip
    tl.store(next_state_ptr + b * H + offs_h, carry, mask=mask_h)


@triton.jit(do_not_specialize=["T", "n_chunks", "tiles_per_chunk"])
def _scan_bwd_tiled_kernel(
    dout_ptr,
    dnext_state_ptr,
    combined_ptr,
    x_ptr,
    reset_ptr,
    checkpoints_ptr,
    dcombined_ptr,
    dstate_ptr,
    dx_ptr,
    slopes_ptr,
    adds_ptr,
    T,
    n_chunks,
    tiles_per_chunk,
    H: tl.constexpr,
    STEPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESET: tl.constexpr,
    LAST: tl.constexpr,
    EVEN_T: tl.constexpr,
    MASKED: tl.constexpr,
    APPROX: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    LAST_READ: tl.constexpr,
):
    b = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    offs_h = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    offs_s = tl.arange(0, SEGMENTS)[:, None]
    mask_h = offs_h < H
    n_tiles = tl.cdiv(T, SEGMENTS * STEPS)

    carry = tl.zeros([1, BLOCK_H], tl.float32)
    if LAST:
        carry = tl.load(dnext_state_ptr + b * H + offs_h, mask=mask_h, other=0.0)
    chunk = tl.program_id(1)
    end = tl.minimum((chunk + 1) * tiles_per_chunk, n_tiles)
    for back in range(n_chunks - 1 - chunk):
        at = (b * n_chunks + n_chunks - 1 - back) * H + offs_h
        slope = tl.load(slopes_ptr + at, mask=mask_h, other=1.0)
        carry = tl.fma(slope, carry, tl.load(adds_ptr + at, mask=mask_h, other=0.0))
    for back in range(end - chunk * tiles_per_chunk):
        first = ((end - 1 - back) * SEGMENTS + offs_s) * STEPS
        row = b * T + first
        combined = combined_ptr + row * (3 * H) + offs_h
        dcombined = dcombined_ptr + row * (3 * H) + offs_h
        kept = checkpoints_ptr + (b * tl.cdiv(T, CHECKPOINT) + first // CHECKPOINT) * H + offs_h
        h = _load_last(kept, (first < T) & mask_h, MASKED, LAST_READ)
        # Every load stands before the first store, which it could not be moved across.
        hiddens, gates, projs, xs, gs = (), (), (), (), ()
        if RESET:
            keeps = _keeps(reset_ptr, row, first, T, STEPS, EVEN_T)
        for k in tl.static_range(STEPS):
            mask = (first + k < T) & mask_h
            hiddens += (_load_last(combined + k * 3 * H, mask, MASKED, LAST_READ),)
            gates += (_load_last(combined + (k * 3 * H + H), mask, MASKED, LAST_READ),)
            projs += (_load_last(combined + (k * 3 * H + 2 * H), mask, MASKED, LAST_READ),)
            xs += (_load(x_ptr + row * H + offs_h + k * H, mask, MASKED),)
            gs += (_load_last(dout_ptr + row * H + offs_h + k * H, mask, MASKED, LAST_READ),)
        # Four numbers of each step are kept: with total = dh + into, dhidden = total to_hidden, dgate = total to_gate,
        # and the step before gets dh = total decay.
        intos, decays, to_hiddens, to_gates = (), (), (), ()
        for k in tl.static_range(STEPS):
            mask = (first + k < T) & mask_h
            z, p, g = _sigmoid(gates[k], APPROX), _sigmoid(projs[k], APPROX), gs[k]
            c, slope = _candidate(hiddens[k], APPROX)
            decay, into = 1.0 - z, g * p
            pass_on = decay
            if RESET:
                h, pass_on = _mask_bits(h, keeps[k]), _mask_bits(decay, keeps[k])
            to_gates += ((c - h) * (z * decay),)
            to_hiddens += (z * slope,)
            h = tl.fma(decay, h, z * c)
            if not EVEN_T:  # a step past the end is dh = (dh + -0) 1
                pass_on, into = tl.where(first + k < T, pass_on, 1.0), _or_minus_zero(into, first + k < T)
            decays += (pass_on,)
            intos += (into,)
            _store(dcombined + (k * 3 * H + 2 * H), g * (h - xs[k]) * (p * (1.0 - p)), mask, MASKED)
            _store(dx_ptr + row * H + offs_h + k * H, g * (1.0 - p), mask, MASKED)
        start = tl.broadcast_to(carry, [SEGMENTS, BLOCK_H])
        for s in tl.static_range(SEGMENTS - 1, 0, -1):
            dh = start
            for k in tl.static_range(STEPS - 1, -1, -1):
                dh = (dh + intos[k]) * decays[k]
            start = tl.where(offs_s == s - 1, _row(dh, offs_s, s), start)
        dh = start
        for k in tl.static_range(STEPS - 1, -1, -1):
            mask = (first + k < T) & mask_h
            total = dh + intos[k]
            _store(dcombined + k * 3 * H, total * to_hiddens[k], mask, MASKED)
            _store(dcombined + (k * 3 * H + H), total * to_gates[k], mask, MASKED)
            dh = total * decays[k]
        carry = dh
        if SEGMENTS > 1:
            carry = _row(dh, offs_s, 0)
    if chunk == 0:
        tl.store(dstate_ptr + b * H + offs_h, carry, mask=mask_h)


@triton.jit(do_not_specialize=["T", "n_chunks", "steps_per_chunk"])
def _summary_kernel(
    dout_ptr,
    combined_ptr,
    reset_ptr,
    slopes_ptr,
    adds_ptr,
    T,
    n_chunks,
    steps_per_chunk,
    H: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESET: tl.constexpr,
    APPROX: tl.constexpr,
):
    """What a chunk of time makes of the dh that enters at its end: slope dh + add at its start."""
    b = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    chunk = tl.program_id(1) + 1  # nothing is before chunk 0
    offs_h = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    begin, end = chunk * steps_per_chunk, tl.minimum((chunk + 1) * steps_per_chunk, T)
    slope, dh = tl.full([BLOCK_H], 1.0, tl.float32), tl.zeros([BLOCK_H], tl.float32)
    for back in range(tl.cdiv(end - begin, STEPS)):
        decays, intos = (), ()
        for k in tl.static_range(STEPS):
            t = end - 1 - back * STEPS - k + tl.zeros([1], tl.int32)  # [1], so that it broadcasts like a tile
            mask = mask_h & (t >= begin)
            row = b * T + t
            z = _sigmoid(_load(combined_ptr + row * 3 * H + H + offs_h, mask, True), APPROX)
            p = _sigmoid(_load(combined_ptr + row * 3 * H + 2 * H + offs_h, mask, True), APPROX)
            intos += (_load(dout_ptr + row * H + offs_h, mask, True) * p,)
            decay = 1.0 - z
            if RESET:
                decay = _mask_bits(decay, _keep(reset_ptr + row, t >= begin, True))
            decays += (tl.where(mask, decay, 1.0),)
        for k in tl.static_range(STEPS):
            dh = (dh + intos[k]) * decays[k]
            slope = slope * decays[k]
    at = (b * n_chunks + chunk) * H + offs_h
    tl.store(slopes_ptr + at, slope, mask=mask_h)
    tl.store(adds_ptr + at, dh, mask=mask_h)


@triton.jit(do_not_specialize=["T", "n_checkpoints"])
def _scan_bwd_serial_kernel(
    dout_ptr,
    dnext_state_ptr,
    combined_ptr,
    x_ptr,
    reset_ptr,
    checkpoints_ptr,
    states_ptr,
    dcombined_ptr,
    dstate_ptr,
    dx_ptr,
    T,
    n_checkpoints,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESET: tl.constexpr,
    LAST: tl.constexpr,
    APPROX: tl.constexpr,
):
    """The definition: a lane walks its channel's T steps forwards, writing every state down, and then backwards."""
    b = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    offs_h = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < H
    h = tl.load(checkpoints_ptr + b * n_checkpoints * H + offs_h, mask=mask, other=0.0)
    for t in range(T):
        row = b * T + t
        hidden = _load(combined_ptr + row * 3 * H + offs_h, mask, True)
        z = _sigmoid(_load(combined_ptr + row * 3 * H + H + offs_h, mask, True), APPROX)
        tl.store(states_ptr + row * H + offs_h, h, mask=mask)
        if RESET:
            h = _mask_bits(h, _keep(reset_ptr + row, True, False))
        h = tl.fma(1.0 - z, h, z * _candidate(hidden, APPROX)[0])
    dh = tl.zeros([BLOCK_H], tl.float32)
    if LAST:
        dh = tl.load(dnext_state_ptr + b * H + offs_h, mask=mask, other=0.0)
    for back in range(T):
        t = T - 1 - back
        row = b * T + t
        hidden = _load(combined_ptr + row * 3 * H + offs_h, mask, True)
        z = _sigmoid(_load(combined_ptr + row * 3 * H + H + offs_h, mask, True), APPROX)
        p = _sigmoid(_load(combined_ptr + row * 3 * H + 2 * H + offs_h, mask, True), APPROX)
        x = _load(x_ptr + row * H + offs_h, mask, True)
        g = _load(dout_ptr + row * H + offs_h, mask, True)
        c, slope = _candidate(hidden, APPROX)
        carried = tl.load(states_ptr + row * H + offs_h, mask=mask, other=0.0)
        decay = 1.0 - z
        h_tm1, pass_on = carried, decay
        if RESET:
            keep = _keep(reset_ptr + row, True, False)
            h_tm1, pass_on = _mask_bits(h_tm1, keep), _mask_bits(decay, keep)
        total = dh + g * p
        dcombined = dcombined_ptr + row * 3 * H + offs_h
        _store(dcombined, total * (z * slope), mask, True)
        _store(dcombined + H, total * ((c - h_tm1) * (z * decay)), mask, True)
        _store(dcombined + 2 * H, g * (h - x) * (p * (1.0 - p)), mask, True)
        _store(dx_ptr + row * H + offs_h, g * (1.0 - p), mask, True)
        dh = total * pass_on
        h = carried
    tl.store(dstate_ptr + b * H + offs_h, dh, mask=mask)


@triton.jit
def _step_kernel(
    combined_ptr,
    state_ptr,
    x_ptr,
    reset_ptr,
    out_ptr,
    next_state_ptr,
    n,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    RESET: tl.constexpr,
    APPROX: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    b = offs // H
    combined = combined_ptr + 2 * b * H + offs  # b * 3H + channel
    hidden = _load(combined, mask, True)
    z = _sigmoid(_load(combined + H, mask, True), APPROX)
    p = _sigmoid(_load(combined + 2 * H, mask, True), APPROX)
    x = _load(x_ptr + offs, mask, True)
    h = tl.load(state_ptr + offs, mask=mask, other=0.0)
    if RESET:
        h = _mask_bits(h, _keep(reset_ptr + b, mask, True))
    h = tl.fma(1.0 - z, h, z * _candidate(hidden, APPROX)[0])
    tl.store(next_state_ptr + offs, h, mask=mask)
    _store(out_ptr + offs, tl.fma(p, h - x, x), mask, True)


# Contraction is written (tl.fma) and otherwise off, so that every kernel here rounds alike.
FUSION = {"enable_fp_fusion": False}
BLOCK_H = 32  # channels a program of the serial backward: one lane each


def _approx() -> bool:
    return not triton_interpreted() and torch.version.hip is None


def _prepare(tensors: tuple[Tensor, ...], reset: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Contiguous tensors, and the resets as bytes (any tensor where there are none)."""
    kept = [v.contiguous() for v in tensors]
    if kept[0].dtype == torch.float64:
        raise TypeError("the triton backend of mingru takes float32 and narrower; got float64: use backend='reference'")
    if reset is None:
        return kept, kept[0]
    flags = reset.contiguous().view(torch.uint8)
    return kept, flags if flags.data_ptr() % 4 == 0 else flags.clone()  # they are read in words


class _Tiling(NamedTuple):
    """How a program walks its row: lanes of `steps` steps, `segments` of them after each other, `channels` abreast."""

    steps: int
    segments: int
    channels: int
    num_warps: int

    def options(self, horizon: int, h: int) -> dict[str, int | bool]:
        """What the kernels are built with: as many segments as T fills, and whether T and H fill all tiles."""
        segments = min(self.segments, triton.next_power_of_2(triton.cdiv(horizon, self.steps)))
        even = horizon % (self.steps * segments) == 0
        return {
            "STEPS": self.steps,
            "SEGMENTS": segments,
            "BLOCK_H": self.channels,
            "EVEN_T": even,
            "MASKED": not even or h % self.channels != 0,
            "CHECKPOINT": CHECKPOINT,
            "num_warps": max(1, self.num_warps * segments // self.segments),
        }


def _tiling(b: int, h: int, size: int, backward: bool) -> _Tiling:
    """Measured on an H200 for T = 128, H = 256 and elements of `size` bytes.

    A small batch wants many segments: a lane's loads are in flight together. A large one fills the GPU anyway, and more
    segments only run the carry more often. Two 16-bit channels a lane make loads of four bytes.
    """
    if size == 2 and b * triton.cdiv(h, 64) >= 512:
        return _Tiling(8, 2, 64, 2) if backward else _Tiling(16, 2, 64, 2)
    return _Tiling(16, 4, 32, 4 if backward or size == 4 else 2)


def _outgrows_cache(combined: Tensor) -> bool:
    """Whether little of `combined` would be in an H200's L2 cache of 50 MB when the backward scan comes to read it.

    Then the forward scan lets it and x go, so that its output stays for the next layer: 10 to 14 us less for three
    layers of 256 at 32768 steps. Otherwise the backward scan lets go of what it reads, so that its results stay for the
    products after it: 1 to 4 us less at 8192 steps, but 5 to 8 more at 32768.
    """
    return combined.numel() * combined.element_size() > 32 << 20


def _chunks(programs: int, n_tiles: int) -> int:
    """How many share what is one program's time in the "fast" backward: enough to fill a GPU, and at most 32."""
    return max(1, min(32, n_tiles, 528 // programs))


def mingru_scan(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, save: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.mingru_scan`."""
    b, horizon, h = x.shape
    (combined, state, x), flags = _prepare((combined, state, x), reset)
    out = torch.empty_like(x)
    next_state = torch.empty_like(state)
    checkpoints = state.new_empty(b, triton.cdiv(horizon, CHECKPOINT) if save else 0, h)
    if x.numel() == 0:
        return out, next_state, checkpoints
    tiling = _tiling(b, h, x.element_size(), backward=False)
    large = _outgrows_cache(combined)  # and then takes so long that overlapping launches rather disturbs
    _scan_fwd_kernel[(triton.cdiv(h, tiling.channels) * b,)](
        *(combined, state, x, flags, out, next_state, checkpoints),
        T=horizon,
        H=h,
        RESET=reset is not None,
        SAVE=save,
        APPROX=_approx(),
        LAST_READ=large,
        **({"OVERLAP": False} if large else overlap(x.device)),
        **tiling.options(horizon, h),
        **FUSION,
    )
    return out, next_state, checkpoints


def mingru_step(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, out_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same as `reference.mingru_step`."""
    (combined, state, x), flags = _prepare((combined, state, x), reset)
    out, next_state = torch.empty_like(x), torch.empty_like(state) if out_state is None else out_state
    n = x.numel()
    if n:
        block = 512
        _step_kernel[(triton.cdiv(n, block),)](
            *(combined, state, x, flags, out, next_state),
            n,
            H=x.shape[1],
            BLOCK=block,
            RESET=reset is not None,
            APPROX=_approx(),
            **FUSION,
        )
    return out, next_state


def mingru_scan_backward(
    dout: Tensor,
    dnext_state: Tensor | None,
    combined: Tensor,
    x: Tensor,
    reset: Tensor | None,
    checkpoints: Tensor,
    backward: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.mingru_scan_backward`; `backward` picks the kernel."""
    b, horizon, h = x.shape
    (dout, combined, x), flags = _prepare((dout, combined, x), reset)
    dcombined, dstate, dx = torch.empty_like(combined), checkpoints.new_empty(b, h), torch.empty_like(x)
    last = dstate if dnext_state is None else dnext_state.contiguous()
    if x.numel() == 0:
        return dcombined, dstate, dx
    if backward == "serial":
        _scan_bwd_serial_kernel[(triton.cdiv(h, BLOCK_H) * b,)](
            *(dout, last, combined, x, flags, checkpoints),
            torch.empty(b, horizon, h, dtype=dstate.dtype, device=x.device),
            *(dcombined, dstate, dx),
            T=horizon,
            n_checkpoints=checkpoints.shape[1],
            H=h,
            BLOCK_H=BLOCK_H,
            RESET=reset is not None,
            LAST=dnext_state is not None,
            APPROX=_approx(),
            num_warps=1,
            **FUSION,
        )
        return dcombined, dstate, dx
    tiling = _tiling(b, h, x.element_size(), backward=True)
    options = tiling.options(horizon, h)
    tile = options["STEPS"] * options["SEGMENTS"]
    n_tiles = triton.cdiv(horizon, tile)
    programs = triton.cdiv(h, tiling.channels) * b
    tiles_per_chunk = triton.cdiv(n_tiles, _chunks(programs, n_tiles) if backward == "fast" else 1)
    chunks = triton.cdiv(n_tiles, tiles_per_chunk)
    common = {"T": horizon, "n_chunks": chunks, "H": h, "RESET": reset is not None, "APPROX": _approx(), **FUSION}
    slopes = adds = dstate
    if chunks > 1:
        slopes, adds = dstate.new_empty(b, chunks, h), dstate.new_empty(b, chunks, h)
        _summary_kernel[(programs, chunks - 1)](
            *(dout, combined, flags, slopes, adds),
            steps_per_chunk=tiles_per_chunk * tile,
            STEPS=tiling.steps,
            BLOCK_H=tiling.channels,
            num_warps=1,
            **common,
        )
    _scan_bwd_tiled_kernel[(programs, chunks)](
        *(dout, last, combined, x, flags, checkpoints, dcombined, dstate, dx, slopes, adds),
        tiles_per_chunk=tiles_per_chunk,
        LAST=dnext_state is not None,
        LAST_READ=not _outgrows_cache(combined),
        **options,
        **common,
    )
    return dcombined, dstate, dx
