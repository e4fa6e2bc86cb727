"""`add` on a GPU: one launch, a program an item or an environment's step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._overlap import after_previous, overlap
from sharpwave.ops._philox_triton import MAX_PROGRAMS
from sharpwave.ops.sumtree.reference import MAX_LEAF
from sharpwave.ops.sumtree.triton import add_change, refresh_extrema
from sharpwave.replay.kernels._rows_triton import (
    LOWER,
    WARPS,
    as_bytes,
    hold_each,
    put_each,
    shapes_of,
    tree_shape,
    wrapped,
)
from sharpwave.replay.state import HELD, NOTHING, WRITTEN, State

_HELD, _WRITTEN, _NOTHING = (tl.constexpr(x) for x in (HELD, WRITTEN, NOTHING))
_MAX_LEAF = tl.constexpr(MAX_LEAF)


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
    ENVS: tl.constexpr,
    SPAN: tl.constexpr,
    SHORT: tl.constexpr,
    PERIOD: tl.constexpr,
    FRAMES: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG_FANOUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Items (ENVS: environments) tl.program_id(0), + number of programs, ...: `reference.add_items` and `add_step`.

    An environment's step touches the leaves from SPAN - 1 slots before its own to FRAMES after it, each once.
    """
    after_previous(OVERLAP)
    first = tl.load(counters_ptr + _WRITTEN) & LOWER
    if leaf_ptr is None:
        leaf = tl.minimum(tl.exp2(alpha * tl.log2(tl.load(max_priority_ptr))), _MAX_LEAF)
    else:
        leaf = tl.load(leaf_ptr)
    reach = tl.arange(0, WIDTH) - (SPAN - 1)
    head = tl.load(head_ptr)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        k = tl.cast(i, tl.int64)
        ahead = hold_each(next_given, k, NEXT_SHAPES)
        own = hold_each(given, k, SHAPES)
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
        at = base + wrapped(position + reach, ring)
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
                tl.store(head_ptr + k, wrapped(position + 1 + ended.to(tl.int64), ring))
                tl.store(episode_step_ptr + k, tl.where(ended, 0, step + 1))
                put_each(ahead, next_given, k, next_fields, base + wrapped(position + 1, ring), NEXT_SHAPES)
                put_each(own, given, k, fields, slot, SHAPES)
            else:
                tl.store(slots_ptr + k, tl.full([], -1, tl.int64))
        else:
            tl.store(slots_ptr + k, slot)
            put_each(own, given, k, fields, slot, SHAPES)
    tl.debug_barrier()
    written_ptr = counters_ptr + _WRITTEN
    ticket = tl.atomic_add(written_ptr, 1 << 48, sem="relaxed") >> 48
    if ticket == tl.num_programs(0) - 1:
        tl.atomic_xchg(written_ptr, first + n, sem="relaxed")
        if not ENVS:
            tl.store(head_ptr, (head + n) % ring)


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
    levels, log_fanout = tree_shape(state)
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
        as_bytes(given["terminated"].contiguous()) if layout.envs else None,
        as_bytes(given["truncated"].contiguous()) if layout.envs else None,
        None if valid is None else as_bytes(valid.contiguous()),
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
        SHAPES=shapes_of([x for _, x in own]),
        NEXT_SHAPES=shapes_of([x for _, x in ahead]),
        ENVS=layout.envs > 0,
        SPAN=layout.span,
        SHORT=layout.short,
        PERIOD=layout.period,
        FRAMES=layout.frames,
        WIDTH=width,
        LEVELS=levels,
        LOG_FANOUT=log_fanout,
        num_warps=WARPS,
        **overlap(slots.device),
    )
    if tree.extrema is not None and touched is not None:
        refresh_extrema(tree.storage, tree.extrema, touched, layout.slots, tree.fanout)
    return slots
