"""`sample` on a GPU: one launch, a program an item; the last program to arrive turns all leaves into weights."""

import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops._philox_triton import random_bits
from sharpwave.ops.sumtree.reference import EMPTY
from sharpwave.ops.sumtree.triton import draw_leaves, stratum, top_level, total_value
from sharpwave.replay.kernels._rows_triton import (
    LOWER,
    WARPS,
    as_bytes,
    hold,
    hold_each,
    put,
    put_each,
    shapes_of,
    tree_shape,
    wrapped,
)
from sharpwave.replay.state import AGE, DRAWN, HELD, NOT_DRAWN, WRITTEN, State

_HELD, _WRITTEN, _DRAWN, _AGE = (tl.constexpr(x) for x in (HELD, WRITTEN, DRAWN, AGE))
_NOT_DRAWN, _EMPTY = tl.constexpr(NOT_DRAWN), tl.constexpr(EMPTY)
NO_NORM, BATCH_NORM, BUFFER_NORM = range(3)
_BATCH_NORM = tl.constexpr(BATCH_NORM)
_NO_NORM = tl.constexpr(NO_NORM)


@triton.jit
def _weight(value, smallest, total, held, beta, NORM: tl.constexpr):
    """`windows.importance_weights`; a value of 0 weighs 0."""
    safe = tl.where(value > 0.0, value, 1.0)
    if NORM == _NO_NORM:
        ratio = (total / (safe.to(tl.float64) * held.to(tl.float64))).to(tl.float32)
    else:
        ratio = smallest / safe
    weight = tl.where(ratio == 1.0, 1.0, tl.exp2(beta * tl.log2(ratio)))
    return tl.where(value > 0.0, weight, 0.0)


@triton.jit
def _window(reward_ptr, terminated_ptr, truncated_ptr, base, position, ring, gamma, SPAN: tl.constexpr):
    """`windows.n_step_return`: return, discount where it does not terminate, its end's flags, and its length."""
    result = tl.load(reward_ptr + base + position)
    terminated = tl.load(terminated_ptr + base + position) != 0
    truncated = tl.load(truncated_ptr + base + position) != 0
    power = gamma
    length = 1
    for j in tl.static_range(1, SPAN):
        at = base + wrapped(position + j, ring)
        goes_on = (length == j) & ~(terminated | truncated)
        result += tl.where(goes_on, power * tl.load(reward_ptr + at), 0.0)
        terminated = tl.where(goes_on, tl.load(terminated_ptr + at) != 0, terminated)
        truncated = tl.where(goes_on, tl.load(truncated_ptr + at) != 0, truncated)
        power = tl.where(goes_on, power * gamma, power)
        length += goes_on.to(tl.int32)
    return result, power, terminated, truncated, length


@triton.jit
def _beta(beta_ptr, betas_ptr, first, OWN_BETA: tl.constexpr):
    if OWN_BETA:
        begin = tl.load(betas_ptr)
        end = tl.load(betas_ptr + 1)
        draws = tl.load(betas_ptr + 2)
        done = tl.minimum(first.to(tl.float32) / tl.maximum(draws, 1.0), 1.0)
        return begin + (end - begin) * tl.where(draws > 0.0, done, 0.0)
    else:
        return tl.load(beta_ptr)


@triton.jit
def _leaves_to_weights(
    weights_ptr, smallest_ptr, counters_ptr, total, beta, n, NORM: tl.constexpr, BLOCK: tl.constexpr
):
    """All n leaves in place; the first BLOCK are read once."""
    held = tl.load(counters_ptr + _HELD)
    item = tl.arange(0, BLOCK)
    values = tl.load(weights_ptr + item, mask=item < n, other=float("inf"), cache_modifier=".cg")
    smallest = 1.0
    if NORM == _BATCH_NORM:
        lowest = values
        for start in range(BLOCK, n, BLOCK):
            more = tl.load(weights_ptr + start + item, mask=start + item < n, other=float("inf"), cache_modifier=".cg")
            lowest = tl.minimum(lowest, more)
        smallest = tl.min(lowest, 0)
    elif NORM != _NO_NORM:
        smallest = tl.load(smallest_ptr)
    tl.store(weights_ptr + item, _weight(values, smallest, total, held, beta, NORM), mask=item < n)
    for start in range(BLOCK, n, BLOCK):
        values = tl.load(weights_ptr + start + item, mask=start + item < n, other=1.0, cache_modifier=".cg")
        tl.store(weights_ptr + start + item, _weight(values, smallest, total, held, beta, NORM), mask=start + item < n)


@triton.jit(do_not_specialize=["n", "ring", "capacity"])
def _sample_kernel(
    leaves_ptr,
    nodes_ptr,
    status_ptr,
    generation_ptr,
    step_ptr,
    counters_ptr,
    offset_ptr,
    seed_ptr,
    betas_ptr,
    beta_ptr,
    smallest_ptr,
    reward_ptr,
    terminated_ptr,
    truncated_ptr,
    indices_ptr,
    generations_ptr,
    weights_ptr,
    probabilities_ptr,
    discount_ptr,
    return_ptr,
    last_terminated_ptr,
    last_truncated_ptr,
    fields,
    outs,
    seen_fields,
    seen_outs,
    next_outs,
    gamma,
    n,
    ring,
    capacity,
    SHAPES: tl.constexpr,
    SEEN_SHAPES: tl.constexpr,
    NORM: tl.constexpr,
    OWN_BETA: tl.constexpr,
    WINDOWS: tl.constexpr,
    DISCOUNT: tl.constexpr,
    STRATIFIED: tl.constexpr,
    SPAN: tl.constexpr,
    FRAMES: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Draw number tl.program_id(0) of n: its leaf, its window, and the rows it shows.

    `fields` are copied by the item's slot, `seen_fields` twice, as stacks of FRAMES before and after the window.
    """
    after_previous(OVERLAP)
    k = tl.program_id(0).to(tl.int64)
    first = tl.load(offset_ptr) & LOWER
    written = tl.load(counters_ptr + _WRITTEN) & LOWER
    bits = random_bits(tl.load(seed_ptr), first + k)
    if STRATIFIED:
        bits = stratum(bits, k, n)
    high, low = top_level(nodes_ptr, 1 << LOG_FANOUT, 0)
    slot, value, total1, total0 = draw_leaves(leaves_ptr, nodes_ptr, high, low, bits, capacity, LEVELS, LOG_FANOUT, 0)
    total = total_value(total1, total0)
    drawn = value > 0.0
    tl.store(indices_ptr + k, slot)
    # Weights pass through here as leaves, until the last program to arrive turns all of them into weights.
    tl.store(weights_ptr + k, value)
    tl.debug_barrier()  # every warp has read the stream's position, which the last arrival moves
    lanes = tl.arange(0, THREADS)
    tickets = tl.atomic_add(offset_ptr + lanes * 0, lanes.to(tl.int64) * 0 + (1 << 48), mask=lanes == 0, sem="acq_rel")

    # All rows are on their way before anything waits, for the ticket or for a store.
    generation = tl.load(generation_ptr + slot)
    if DISCOUNT and not WINDOWS:
        ends = tl.load(terminated_ptr + slot) != 0
    plain = hold_each(fields, slot, SHAPES)
    seen = ()
    if WINDOWS:
        # There are fewer than 2^31 slots: 32 bits suffice, and take a fraction of the time in a division.
        position = slot.to(tl.int32) % ring
        base = slot - position
        result, power, terminated, truncated, length = _window(
            reward_ptr, terminated_ptr, truncated_ptr, base, position, ring, gamma, SPAN
        )
        following = wrapped(position + length, ring)
        step = 0
        step_after = 0
        if FRAMES > 1:
            step = tl.load(step_ptr + slot)
            step_after = tl.load(step_ptr + base + wrapped(position + length - 1, ring)) + 1
        for f in tl.static_range(len(SEEN_SHAPES)):
            for j in tl.static_range(FRAMES):
                before = base + wrapped(position - tl.minimum(step, FRAMES - 1 - j), ring)
                after = base + wrapped(following - tl.minimum(step_after, FRAMES - 1 - j), ring)
                row = hold(seen_fields[f], before, SEEN_SHAPES, f)
                next_row = hold(seen_fields[f], after, SEEN_SHAPES, f)
                seen = seen + ((before, row, after, next_row),)  # noqa: RUF005 (Triton's tuples)

    if tl.max(tl.where(lanes == 0, tickets >> 48, -1), 0) == n - 1:
        beta = _beta(beta_ptr, betas_ptr, first, OWN_BETA)
        _leaves_to_weights(weights_ptr, smallest_ptr, counters_ptr, total, beta, n, NORM, BLOCK)
        if drawn:
            tl.atomic_add(counters_ptr + _DRAWN, tl.cast(n, tl.int64), sem="relaxed")
        else:
            tl.atomic_add(status_ptr + _EMPTY, 1, sem="relaxed")
        tl.atomic_xchg(offset_ptr, first + n, sem="relaxed")

    if WINDOWS:
        for f in tl.static_range(len(SEEN_SHAPES)):
            for j in tl.static_range(FRAMES):
                before, row, after, next_row = seen[f * FRAMES + j]
                to = k * FRAMES + j
                put(row, seen_fields[f], before, seen_outs[f], to, SEEN_SHAPES, f)
                put(next_row, seen_fields[f], after, next_outs[f], to, SEEN_SHAPES, f)
        tl.store(return_ptr + k, result)
        tl.store(discount_ptr + k, tl.where(terminated, 0.0, power))
        tl.store(last_terminated_ptr + k, terminated.to(tl.uint8))
        tl.store(last_truncated_ptr + k, truncated.to(tl.uint8))
    put_each(plain, fields, slot, outs, k, SHAPES)
    if DISCOUNT and not WINDOWS:
        tl.store(discount_ptr + k, tl.where(ends, 0.0, gamma))
    generation = tl.where(drawn, generation, _NOT_DRAWN)
    tl.store(generations_ptr + k, generation)
    probability = (value.to(tl.float64) / tl.where(total > 0.0, total, 1.0)).to(tl.float32)
    tl.store(probabilities_ptr + k, probability)
    if drawn:
        tl.atomic_add(counters_ptr + _AGE, written - 1 - generation, sem="relaxed")


def sample(
    state: State,
    n: int,
    out: dict[str, Tensor],
    storage: dict[str, Tensor],
    origins: list[tuple[str, str, int]],
    beta: Tensor | None,
    norm: int,
    smallest: Tensor | None,
    stratified: bool,
    gamma: float,
) -> None:
    """Draw n <= MAX_PROGRAMS items into `out`.

    Args:
        storage: the fields. origins: (output, field, 0: the item's row; 1, 2: the stack before, after the window).
    """
    layout, tree = state.layout, state.tree
    windows = layout.envs > 0
    plain = [(name, origin) for name, origin, which in origins if which == 0 and storage[origin][0].numel()]
    seen = [(name, origin) for name, origin, which in origins if which == 1 and storage[origin][0].numel()]
    reward, terminated, truncated = (as_bytes(storage.get(name)) for name in ("reward", "terminated", "truncated"))
    levels, log_fanout = tree_shape(state)
    _sample_kernel[(n,)](
        tree.storage,
        tree.nodes,
        tree.status,
        state.generation,
        state.step,
        state.counters,
        state.offset,
        state.seed,
        state.beta,
        beta,
        smallest,
        reward if windows else None,
        terminated,
        truncated if windows else None,
        out["indices"],
        out["generations"],
        out["weights"],
        out["probabilities"],
        out.get("discount"),
        out["reward"] if windows else None,
        as_bytes(out["terminated"]) if windows else None,
        as_bytes(out["truncated"]) if windows else None,
        tuple(storage[origin] for _, origin in plain),
        tuple(out[name] for name, _ in plain),
        tuple(storage[origin] for _, origin in seen),
        tuple(out[name] for name, _ in seen),
        tuple(out[f"next_{name}"] for name, _ in seen),
        gamma,
        n,
        layout.ring,
        layout.slots,
        SHAPES=shapes_of([storage[origin] for _, origin in plain]),
        SEEN_SHAPES=shapes_of([storage[origin] for _, origin in seen], copies=2 * layout.frames),
        NORM=norm,
        OWN_BETA=beta is None,
        WINDOWS=windows,
        DISCOUNT="discount" in out,
        STRATIFIED=stratified,
        SPAN=layout.span,
        FRAMES=layout.frames,
        LEVELS=levels,
        LOG_FANOUT=log_fanout,
        BLOCK=256,  # not a row's: Triton gives accesses of one shape one layout, which would be wrong for one of them
        THREADS=32 * WARPS,
        num_warps=WARPS,
        **overlap(tree.storage.device),
    )
