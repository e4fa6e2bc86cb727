"""What follows a draw on a GPU, in two kinds of launches: weights, generations and windows; and rows of fields.

The definitions are `reference.draw` and `windows`. Beta, counters and the stream's position stay on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.replay.state import AGE, DRAWN, HELD, NOT_DRAWN, WRITTEN

_HELD, _WRITTEN, _DRAWN, _AGE = (tl.constexpr(x) for x in (HELD, WRITTEN, DRAWN, AGE))
_NOT_DRAWN = tl.constexpr(NOT_DRAWN)
NO_NORM, BATCH_NORM, BUFFER_NORM = range(3)
_BATCH_NORM = tl.constexpr(BATCH_NORM)
_NO_NORM = tl.constexpr(NO_NORM)


@triton.jit(do_not_specialize=["n", "ring"])
def _finish_kernel(
    drawn_ptr,
    values_ptr,
    total_ptr,
    generation_ptr,
    counters_ptr,
    offset_ptr,
    betas_ptr,
    beta_ptr,
    smallest_ptr,
    indices_ptr,
    weights_ptr,
    probabilities_ptr,
    generations_ptr,
    reward_ptr,
    terminated_ptr,
    truncated_ptr,
    step_ptr,
    discount_ptr,
    return_ptr,
    last_terminated_ptr,
    last_truncated_ptr,
    slots_ptr,
    gamma,
    n,
    ring,
    NORM: tl.constexpr,
    OWN_BETA: tl.constexpr,
    WINDOWS: tl.constexpr,
    DISCOUNT: tl.constexpr,
    SPAN: tl.constexpr,
    FRAMES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK draws a program. slots (2, n, FRAMES): of the observation's frames, and the next observation's."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = k < n
    index = tl.load(drawn_ptr + k, mask=here, other=0)
    value = tl.load(values_ptr + k, mask=here, other=0.0)
    total = tl.load(total_ptr)
    positive = here & (value > 0.0)
    if OWN_BETA:
        first = tl.load(betas_ptr)
        last = tl.load(betas_ptr + 1)
        draws = tl.load(betas_ptr + 2)
        # The draw itself has moved the stream on by n already.
        done = tl.minimum((tl.load(offset_ptr) - n).to(tl.float32) / tl.maximum(draws, 1.0), 1.0)
        beta = first + (last - first) * tl.where(draws > 0.0, done, 0.0)
    else:
        beta = tl.load(beta_ptr)

    safe = tl.where(positive, value, 1.0)
    if NORM == _NO_NORM:
        held = tl.load(counters_ptr + _HELD)
        ratio = (total / (safe.to(tl.float64) * held.to(tl.float64))).to(tl.float32)
    else:
        if NORM == _BATCH_NORM:
            lowest = tl.full([BLOCK], float("inf"), tl.float32)
            for start in range(0, n, BLOCK):
                other = start + tl.arange(0, BLOCK)
                lowest = tl.minimum(lowest, tl.load(values_ptr + other, mask=other < n, other=float("inf")))
            smallest = tl.min(lowest, 0)
        else:
            smallest = tl.load(smallest_ptr)
        ratio = smallest / safe
    weight = tl.where(ratio == 1.0, 1.0, tl.exp2(beta * tl.log2(ratio)))
    probability = (safe.to(tl.float64) / tl.where(total > 0.0, total, 1.0)).to(tl.float32)
    generation = tl.load(generation_ptr + index, mask=positive, other=_NOT_DRAWN)
    tl.store(indices_ptr + k, index, mask=here)
    tl.store(weights_ptr + k, tl.where(positive, weight, 0.0), mask=here)
    tl.store(probabilities_ptr + k, tl.where(positive, probability, 0.0), mask=here)
    tl.store(generations_ptr + k, generation, mask=here)
    newest = tl.load(counters_ptr + _WRITTEN) - 1
    tl.atomic_add(counters_ptr + _DRAWN, tl.sum(positive.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(counters_ptr + _AGE, tl.sum(tl.where(positive, newest - generation, 0), 0), sem="relaxed")

    if DISCOUNT and not WINDOWS:
        terminated = tl.load(terminated_ptr + index, mask=here, other=0)
        tl.store(discount_ptr + k, tl.where(terminated != 0, 0.0, gamma), mask=here)
    if WINDOWS:
        position = index % ring
        base = index - position
        at = index
        goes_on = here
        result = tl.zeros([BLOCK], tl.float32)
        power = tl.full([BLOCK], 1.0, tl.float32)
        terminated = tl.zeros([BLOCK], tl.int8) != 0
        truncated = terminated
        for j in tl.static_range(SPAN):
            slot = base + (position + j) % ring
            at = tl.where(goes_on, slot, at)
            result += power * tl.load(reward_ptr + slot, mask=goes_on, other=0.0)
            power = tl.where(goes_on, power * gamma, power)
            ends_terminal = tl.load(terminated_ptr + slot, mask=goes_on, other=0) != 0
            ends_cut = tl.load(truncated_ptr + slot, mask=goes_on, other=0) != 0
            terminated = terminated | ends_terminal
            truncated = truncated | ends_cut
            goes_on = goes_on & ~(ends_terminal | ends_cut)
        tl.store(return_ptr + k, result, mask=here)
        tl.store(discount_ptr + k, tl.where(terminated, 0.0, power), mask=here)
        tl.store(last_terminated_ptr + k, terminated.to(tl.uint8), mask=here)
        tl.store(last_truncated_ptr + k, truncated.to(tl.uint8), mask=here)
        step = tl.load(step_ptr + index, mask=here, other=0)
        step_after = tl.load(step_ptr + at, mask=here, other=0) + 1
        following = at - base + 1
        for j in tl.static_range(FRAMES):
            back = FRAMES - 1 - j
            # The added ring keeps the dividend positive: % truncates in C's way.
            slot = base + (position - tl.minimum(step, back) + ring) % ring
            after = base + (following - tl.minimum(step_after, back) + ring) % ring
            tl.store(slots_ptr + k.to(tl.int64) * FRAMES + j, slot, mask=here)
            tl.store(slots_ptr + (k.to(tl.int64) + n) * FRAMES + j, after, mask=here)


@triton.jit(do_not_specialize=["n"])
def _rows_kernel(
    origin_ptr,
    slots_ptr,
    out_ptr,
    other_slots_ptr,
    other_out_ptr,
    n,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows of WORDS words, [ROWS, BLOCK] a program; axis 2 chooses between two lists of rows of one field."""
    if tl.program_id(2) == 1:
        slots_ptr = other_slots_ptr
        out_ptr = other_out_ptr
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < n, other=0)
    mask = (row < n)[:, None] & (word < WORDS)[None, :]  # [ROWS, BLOCK]
    words = tl.load(origin_ptr + slot[:, None] * WORDS + word[None, :], mask=mask)
    tl.store(out_ptr + row[:, None] * WORDS + word[None, :], words, mask=mask)


def finish(
    state, drawn, beta: Tensor | None, norm: int, smallest: Tensor | None, out: dict[str, Tensor], steps, gamma: float
) -> None:
    """Weights, probabilities, generations and windows of a TreeDraw, into `out` (and out["slots"]).

    Args:
        steps: reward (with environments; else None), terminated and truncated (or None) of the storage.
    """
    layout = state.layout
    reward, terminated, truncated = (None if x is None else _bits(x) for x in steps)
    n = drawn.indices.numel()
    windows = layout.envs > 0
    block = 128
    _finish_kernel[(triton.cdiv(n, block),)](
        drawn.indices,
        drawn.values,
        drawn.total,
        state.generation,
        state.counters,
        state.offset,
        state.beta,
        beta,
        smallest,
        out["indices"],
        out["weights"],
        out["probabilities"],
        out["generations"],
        reward,
        terminated,
        truncated,
        state.step,
        out.get("discount"),
        out["reward"] if windows else None,
        _bits(out["terminated"]) if windows else None,
        _bits(out["truncated"]) if windows else None,
        out.get("slots"),
        gamma,
        n,
        layout.ring,
        NORM=norm,
        OWN_BETA=beta is None,
        WINDOWS=windows,
        DISCOUNT="discount" in out,
        SPAN=layout.span,
        FRAMES=layout.frames,
        BLOCK=block,
    )


def rows(origin: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """out[k] = origin[slots[k]] for one or two pairs (slots, out) of equal length, in one launch."""
    bytes_ = origin[0].numel() * origin.element_size()
    if bytes_ == 0:
        return
    size, word = next((s, d) for s, d in _WORDS if bytes_ % s == 0)
    words = bytes_ // size
    n = pairs[0][0].numel()
    block = min(triton.next_power_of_2(words), 1024)
    per_program = max(min(1024 // block, triton.next_power_of_2(n)), 1)
    (slots, out), (other_slots, other_out) = pairs[0], pairs[-1]
    _rows_kernel[(triton.cdiv(n, per_program), triton.cdiv(words, block), len(pairs))](
        _words(origin, word),
        slots,
        _words(out, word),
        other_slots,
        _words(other_out, word),
        n,
        WORDS=words,
        ROWS=per_program,
        BLOCK=block,
    )


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _words(x: Tensor, word: torch.dtype) -> Tensor:
    return x.reshape(-1).view(torch.uint8).view(word)
