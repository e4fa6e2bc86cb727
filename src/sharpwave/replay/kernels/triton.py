"""The steps of a buffer on a GPU: one launch for an `add`, one for a `sample`, whatever the fields.

The definitions are `reference` and `windows`. Counters, heads, beta and the stream's position stay on the device. A
program serves one item. The last program of a launch to arrive at its end, which a count that all of them raise tells,
moves the counters on for the next launch and does what needs every draw: nobody waits for anybody.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._philox_triton import MAX_PROGRAMS, random_bits
from sharpwave.ops.sumtree.reference import EMPTY, MAX_LEAF, level_offsets
from sharpwave.ops.sumtree.triton import add_change, draw_leaves, refresh_extrema, stratum, top_level, total_value
from sharpwave.replay.state import AGE, DRAWN, HELD, NOT_DRAWN, NOTHING, WRITTEN, State

_HELD, _WRITTEN, _DRAWN, _AGE = (tl.constexpr(x) for x in (HELD, WRITTEN, DRAWN, AGE))
_NOTHING, _NOT_DRAWN, _EMPTY = tl.constexpr(NOTHING), tl.constexpr(NOT_DRAWN), tl.constexpr(EMPTY)
_MAX_LEAF = tl.constexpr(MAX_LEAF)
NO_NORM, BATCH_NORM, BUFFER_NORM = range(3)
_BATCH_NORM = tl.constexpr(BATCH_NORM)
_NO_NORM = tl.constexpr(NO_NORM)
_WARPS = 4
# Words of a row that a program has in flight; rows of fewer are loaded all together before any is stored.
_BLOCK = 1024
# A word that programs count themselves in: the number in the lower 48 bits, arrivals above it.
_LOWER = tl.constexpr(0xFFFFFFFFFFFF)


@triton.jit
def _row(ptr, row, WORDS: tl.constexpr, SIZE: tl.constexpr):
    """Where a row of WORDS words of SIZE bytes begins, whatever the field's dtype."""
    if SIZE == 8:
        return ptr.to(tl.pointer_type(tl.int64)) + row * WORDS
    elif SIZE == 4:
        return ptr.to(tl.pointer_type(tl.int32)) + row * WORDS
    elif SIZE == 2:
        return ptr.to(tl.pointer_type(tl.int16)) + row * WORDS
    else:
        return ptr.to(tl.pointer_type(tl.int8)) + row * WORDS


@triton.jit
def _words(row_ptr, start, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + offs, mask=offs < WORDS)


@triton.jit
def _put(row_ptr, start, words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    tl.store(row_ptr + offs, words, mask=offs < WORDS)


@triton.jit
def _copy_two(from_a, to_a, from_b, to_b, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Two rows, both in flight together: no load passes a store that may touch its memory."""
    for start in tl.range(0, WORDS, BLOCK):
        a = _words(from_a, start, WORDS, BLOCK)
        b = _words(from_b, start, WORDS, BLOCK)
        _put(to_a, start, a, WORDS, BLOCK)
        _put(to_b, start, b, WORDS, BLOCK)


@triton.jit
def _copy_each(from_ptrs, from_row, to_ptrs, to_row, SHAPES: tl.constexpr, LONGEST: tl.constexpr):
    """One row of several fields. SHAPES: a block, words and bytes a word of each; the short ones all in flight."""
    held = ()
    for f in tl.static_range(len(SHAPES)):
        if SHAPES[f][1] <= LONGEST:
            row_ptr = _row(from_ptrs[f], from_row, SHAPES[f][1], SHAPES[f][2])
            held = held + (_words(row_ptr, 0, SHAPES[f][1], SHAPES[f][0]),)  # noqa: RUF005 (Triton's tuples)
        else:
            held = held + (0,)  # noqa: RUF005
    for f in tl.static_range(len(SHAPES)):
        to_ptr = _row(to_ptrs[f], to_row, SHAPES[f][1], SHAPES[f][2])
        if SHAPES[f][1] <= LONGEST:
            _put(to_ptr, 0, held[f], SHAPES[f][1], SHAPES[f][0])
        else:
            row_ptr = _row(from_ptrs[f], from_row, SHAPES[f][1], SHAPES[f][2])
            for start in tl.range(0, SHAPES[f][1], SHAPES[f][0]):
                _put(to_ptr, start, _words(row_ptr, start, SHAPES[f][1], SHAPES[f][0]), SHAPES[f][1], SHAPES[f][0])


@triton.jit
def _wrapped(position, ring):
    """position % ring, for -ring <= position < 2 ring."""
    position = tl.where(position < 0, position + ring, position)
    return tl.where(position >= ring, position - ring, position)


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
    LONGEST: tl.constexpr,
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
):
    """Draw number tl.program_id(0) of n: its leaf, its window, and the rows it shows.

    `fields` are copied by the item's slot, `seen_fields` twice, as stacks of FRAMES before and after the window.
    """
    k = tl.program_id(0).to(tl.int64)
    first = tl.load(offset_ptr) & _LOWER
    bits = random_bits(tl.load(seed_ptr), first + k)
    if STRATIFIED:
        bits = stratum(bits, k, n)
    high, low = top_level(nodes_ptr, 1 << LOG_FANOUT, 0)
    slot, value, total1, total0 = draw_leaves(leaves_ptr, nodes_ptr, high, low, bits, capacity, LEVELS, LOG_FANOUT, 0)
    total = total_value(total1, total0)
    drawn = value > 0.0
    tl.store(indices_ptr + k, slot)
    # Weights pass through here as leaves: the last program to arrive turns all of them into weights.
    tl.store(weights_ptr + k, value)
    tl.debug_barrier()  # every warp has read the stream's position, which the last arrival moves
    lanes = tl.arange(0, THREADS)
    tickets = tl.atomic_add(offset_ptr + lanes * 0, lanes.to(tl.int64) * 0 + (1 << 48), mask=lanes == 0, sem="acq_rel")

    generation = tl.load(generation_ptr + slot)
    generation = tl.where(drawn, generation, _NOT_DRAWN)
    tl.store(generations_ptr + k, generation)
    probability = (value.to(tl.float64) / tl.where(total > 0.0, total, 1.0)).to(tl.float32)
    tl.store(probabilities_ptr + k, probability)
    if drawn:
        age = (tl.load(counters_ptr + _WRITTEN) & _LOWER) - 1 - generation
        tl.atomic_add(counters_ptr + _AGE, age, sem="relaxed")
    if DISCOUNT and not WINDOWS:
        ends = tl.load(terminated_ptr + slot) != 0
        tl.store(discount_ptr + k, tl.where(ends, 0.0, gamma))
    if WINDOWS:
        # There are fewer than 2^31 slots: 32 bits suffice, and take a fraction of the time in a division.
        position = slot.to(tl.int32) % ring
        base = slot - position
        result = tl.load(reward_ptr + slot)
        terminated = tl.load(terminated_ptr + slot) != 0
        truncated = tl.load(truncated_ptr + slot) != 0
        power = gamma
        length = 1
        for j in tl.static_range(1, SPAN):
            at = base + _wrapped(position + j, ring)
            goes_on = (length == j) & ~(terminated | truncated)
            result += tl.where(goes_on, power * tl.load(reward_ptr + at), 0.0)
            terminated = tl.where(goes_on, tl.load(terminated_ptr + at) != 0, terminated)
            truncated = tl.where(goes_on, tl.load(truncated_ptr + at) != 0, truncated)
            power = tl.where(goes_on, power * gamma, power)
            length += goes_on.to(tl.int32)
        tl.store(return_ptr + k, result)
        tl.store(discount_ptr + k, tl.where(terminated, 0.0, power))
        tl.store(last_terminated_ptr + k, terminated.to(tl.uint8))
        tl.store(last_truncated_ptr + k, truncated.to(tl.uint8))
        following = _wrapped(position + length, ring)
        step = 0
        step_after = 0
        if FRAMES > 1:
            step = tl.load(step_ptr + slot)
            step_after = tl.load(step_ptr + base + _wrapped(position + length - 1, ring)) + 1
        for f in tl.static_range(len(SEEN_SHAPES)):
            for j in tl.static_range(FRAMES):
                back = FRAMES - 1 - j
                before = base + _wrapped(position - tl.minimum(step, back), ring)
                after = base + _wrapped(following - tl.minimum(step_after, back), ring)
                _copy_two(
                    _row(seen_fields[f], before, SEEN_SHAPES[f][1], SEEN_SHAPES[f][2]),
                    _row(seen_outs[f], k * FRAMES + j, SEEN_SHAPES[f][1], SEEN_SHAPES[f][2]),
                    _row(seen_fields[f], after, SEEN_SHAPES[f][1], SEEN_SHAPES[f][2]),
                    _row(next_outs[f], k * FRAMES + j, SEEN_SHAPES[f][1], SEEN_SHAPES[f][2]),
                    SEEN_SHAPES[f][1],
                    SEEN_SHAPES[f][0],
                )
    _copy_each(fields, slot, outs, k, SHAPES, LONGEST)

    if tl.max(tl.where(lanes == 0, tickets >> 48, -1), 0) == n - 1:
        if OWN_BETA:
            begin = tl.load(betas_ptr)
            end = tl.load(betas_ptr + 1)
            draws = tl.load(betas_ptr + 2)
            done = tl.minimum(first.to(tl.float32) / tl.maximum(draws, 1.0), 1.0)
            beta = begin + (end - begin) * tl.where(draws > 0.0, done, 0.0)
        else:
            beta = tl.load(beta_ptr)
        smallest = 1.0
        held = tl.load(counters_ptr + _HELD)
        if NORM == _BATCH_NORM:
            lowest = tl.full([BLOCK], float("inf"), tl.float32)
            for start in range(0, n, BLOCK):
                item = start + tl.arange(0, BLOCK)
                values = tl.load(weights_ptr + item, mask=item < n, other=float("inf"), cache_modifier=".cg")
                lowest = tl.minimum(lowest, values)
            smallest = tl.min(lowest, 0)
        elif NORM != _NO_NORM:
            smallest = tl.load(smallest_ptr)
        for start in range(0, n, BLOCK):
            item = start + tl.arange(0, BLOCK)
            values = tl.load(weights_ptr + item, mask=item < n, other=0.0, cache_modifier=".cg")
            tl.store(weights_ptr + item, _weight(values, smallest, total, held, beta, NORM), mask=item < n)
        if drawn:
            tl.atomic_add(counters_ptr + _DRAWN, tl.cast(n, tl.int64), sem="relaxed")
        else:
            tl.atomic_add(status_ptr + _EMPTY, 1, sem="relaxed")
        tl.atomic_xchg(offset_ptr, first + n, sem="relaxed")


@triton.jit(do_not_specialize=["n", "ring", "capacity"])
def _add_kernel(
    leaves_ptr,
    nodes_ptr,
    generation_ptr,
    step_ptr,
    counters_ptr,
    head_ptr,
    episode_step_ptr,
    max_priority_ptr,
    leaf_ptr,
    terminated_ptr,
    truncated_ptr,
    valid_ptr,
    slots_ptr,
    touched_ptr,
    given,
    fields,
    next_given,
    next_fields,
    alpha,
    n,
    ring,
    capacity,
    SHAPES: tl.constexpr,
    NEXT_SHAPES: tl.constexpr,
    LONGEST: tl.constexpr,
    ENVS: tl.constexpr,
    SPAN: tl.constexpr,
    SHORT: tl.constexpr,
    PERIOD: tl.constexpr,
    FRAMES: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
):
    """Items (ENVS: environments) tl.program_id(0), + number of programs, ...: `reference.add_items` and `add_step`.

    An environment's step touches the leaves from SPAN - 1 slots before its own to FRAMES after it, each once.
    """
    first = tl.load(counters_ptr + _WRITTEN) & _LOWER
    if leaf_ptr is None:
        leaf = tl.minimum(tl.exp2(alpha * tl.log2(tl.load(max_priority_ptr))), _MAX_LEAF)
    else:
        leaf = tl.load(leaf_ptr)
    reach = tl.arange(0, WIDTH) - (SPAN - 1)
    head = tl.load(head_ptr)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        k = tl.cast(i, tl.int64)
        if ENVS:
            position = tl.load(head_ptr + k)
            base = k * ring
            step = tl.load(episode_step_ptr + k)
            ended = (tl.load(terminated_ptr + k) | tl.load(truncated_ptr + k)) != 0
            newest = 1 - SPAN
            if SHORT:
                newest = tl.where(ended, 0, newest)
            last = FRAMES
            if valid_ptr is not None:
                took = tl.load(valid_ptr + k) != 0
                newest = tl.where(took, newest, -SPAN)
                last = tl.where(took, last, -1)
            complete = (reach <= newest) & (-reach <= step) & ((step + reach) % PERIOD == 0)
            dead = (reach >= 0) & (reach <= last)
        else:
            position = (head + k) % ring
            base = tl.zeros([], tl.int64)
            complete = reach == 0
            dead = complete
        slot = base + position
        touched = complete | dead
        at = base + _wrapped(position + reach, ring)
        old = tl.load(leaves_ptr + at, mask=touched, other=0.0)
        tl.debug_barrier()  # every warp has read what one of them overwrites
        new = tl.where(complete, leaf, 0.0)
        tl.store(leaves_ptr + at, new, mask=touched)
        add_change(nodes_ptr, at, new, old, touched, capacity, LEVELS, LOG_FANOUT)
        tl.store(generation_ptr + at, tl.where(reach == 0, first + k, _NOTHING), mask=dead)
        if touched_ptr is not None:
            tl.store(touched_ptr + k * WIDTH + tl.arange(0, WIDTH), tl.where(touched, at, -1))
        change = tl.sum(complete.to(tl.int32), 0) - tl.sum((dead & (old > 0.0)).to(tl.int32), 0)
        if change != 0:
            tl.atomic_add(counters_ptr + _HELD, change.to(tl.int64), sem="relaxed")
        if ENVS:
            if last >= 0:
                tl.store(slots_ptr + k, slot)
                tl.store(step_ptr + slot, step.to(tl.int32))
                tl.store(head_ptr + k, _wrapped(position + 1 + ended.to(tl.int64), ring))
                tl.store(episode_step_ptr + k, tl.where(ended, 0, step + 1))
                _copy_each(next_given, k, next_fields, base + _wrapped(position + 1, ring), NEXT_SHAPES, LONGEST)
                _copy_each(given, k, fields, slot, SHAPES, LONGEST)
            else:
                tl.store(slots_ptr + k, tl.full([], -1, tl.int64))
        else:
            tl.store(slots_ptr + k, slot)
            _copy_each(given, k, fields, slot, SHAPES, LONGEST)
    tl.debug_barrier()
    written_ptr = counters_ptr + _WRITTEN
    ticket = tl.atomic_add(written_ptr, 1 << 48, sem="relaxed") >> 48
    if ticket == tl.num_programs(0) - 1:
        tl.atomic_xchg(written_ptr, first + n, sem="relaxed")
        if not ENVS:
            tl.store(head_ptr, (head + n) % ring)


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
    reward, terminated, truncated = (_bits(storage.get(name)) for name in ("reward", "terminated", "truncated"))
    levels, log_fanout = _shape(state)
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
        _bits(out["terminated"]) if windows else None,
        _bits(out["truncated"]) if windows else None,
        tuple(storage[origin] for _, origin in plain),
        tuple(out[name] for name, _ in plain),
        tuple(storage[origin] for _, origin in seen),
        tuple(out[name] for name, _ in seen),
        tuple(out[f"next_{name}"] for name, _ in seen),
        gamma,
        n,
        layout.ring,
        layout.slots,
        SHAPES=tuple(_words_of(storage[origin]) for _, origin in plain),
        SEEN_SHAPES=tuple(_words_of(storage[origin]) for _, origin in seen),
        LONGEST=_BLOCK // 8,
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
        THREADS=32 * _WARPS,
        num_warps=_WARPS,
    )


def add(
    state: State,
    n: int,
    given: dict[str, Tensor],
    next_given: dict[str, Tensor],
    storage: dict[str, Tensor],
    leaf: Tensor | None,
    alpha: float,
    valid: Tensor | None = None,
) -> Tensor:
    """Take in n items, or one step of each environment; their slots (n,), -1 where none was taken in.

    Args:
        given, next_given: rows for the items' own slots, and for the slots after them.
        valid: (n,) bool, environments that took a step. None: all.
        leaf: 0-d float32, of each new item. None: the largest priority so far, raised to alpha.
    """
    layout, tree = state.layout, state.tree
    slots = torch.empty(n, dtype=torch.int64, device=tree.storage.device)
    width = triton.next_power_of_2(layout.span + layout.frames) if layout.envs else 1
    touched = torch.empty(n * width, dtype=torch.int64, device=slots.device) if tree.extrema is not None else None
    own = [(x.contiguous(), storage[name]) for name, x in given.items() if storage[name][0].numel()]
    ahead = [(x.contiguous(), storage[name]) for name, x in next_given.items() if storage[name][0].numel()]
    levels, log_fanout = _shape(state)
    _add_kernel[(min(n, MAX_PROGRAMS),)](
        tree.storage,
        tree.nodes,
        state.generation,
        state.step,
        state.counters,
        state.head,
        state.episode_step,
        state.max_priority,
        leaf,
        _bits(given["terminated"].contiguous()) if layout.envs else None,
        _bits(given["truncated"].contiguous()) if layout.envs else None,
        None if valid is None else _bits(valid.contiguous()),
        slots,
        touched,
        tuple(x for x, _ in own),
        tuple(x for _, x in own),
        tuple(x for x, _ in ahead),
        tuple(x for _, x in ahead),
        alpha,
        n,
        layout.ring,
        layout.slots,
        SHAPES=tuple(_words_of(x) for _, x in own),
        NEXT_SHAPES=tuple(_words_of(x) for _, x in ahead),
        LONGEST=_BLOCK // 8,
        ENVS=layout.envs > 0,
        SPAN=layout.span,
        SHORT=layout.short,
        PERIOD=layout.period,
        FRAMES=layout.frames,
        WIDTH=width,
        LEVELS=levels,
        LOG_FANOUT=log_fanout,
        num_warps=_WARPS,
    )
    if tree.extrema is not None and touched is not None:
        refresh_extrema(tree.storage, tree.extrema, touched, layout.slots, tree.fanout)
    return slots


def _words_of(field: Tensor) -> tuple[int, int, int]:
    """A row of a field as (words in flight, words, bytes a word), in the widest words that divide it."""
    size = field[0].numel() * field.element_size()
    word = next(x for x in (8, 4, 2, 1) if size % x == 0)
    return min(triton.next_power_of_2(size // word), _BLOCK), size // word, word


def _bits(x: Tensor | None) -> Tensor | None:
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def _shape(state: State) -> tuple[int, int]:
    offsets = level_offsets(state.layout.slots, state.tree.fanout)
    return len(offsets) - 1, state.tree.fanout.bit_length() - 1
