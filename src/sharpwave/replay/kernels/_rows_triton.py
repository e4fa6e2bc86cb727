"""Rows of fields on a GPU, as words whatever their dtype; and what the kernels of a buffer share.

No load passes a store that may touch its memory, so rows are loaded before anything is stored, where there is room.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops.sumtree.reference import level_offsets
from sharpwave.replay.state import State

WARPS = 4
# Words of a row that a program has in flight.
_BLOCK = 1024
# Words a program holds, of rows that are loaded whole before any is stored.
_HELD = 8 * _BLOCK
# A word that programs count themselves in: the number in the lower 48 bits, arrivals above it.
LOWER = tl.constexpr(0xFFFFFFFFFFFF)


@triton.jit
def row_of(ptr, row, WORDS: tl.constexpr, SIZE: tl.constexpr):
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
    # Seldom read twice: the cache is for the tree.
    return tl.load(row_ptr + offs, mask=offs < WORDS, eviction_policy="evict_first")


@triton.jit
def _put(row_ptr, start, words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    tl.store(row_ptr + offs, words, mask=offs < WORDS)


@triton.jit
def hold(ptr, row, SHAPES: tl.constexpr, F: tl.constexpr):
    """A row of field F, if it is one to be held. SHAPES: what `shapes_of` returns."""
    if SHAPES[F][3]:
        return _words(row_of(ptr, row, SHAPES[F][1], SHAPES[F][2]), 0, SHAPES[F][1], SHAPES[F][0])
    else:
        return 0


@triton.jit
def put(held, from_ptr, from_row, to_ptr, to_row, SHAPES: tl.constexpr, F: tl.constexpr):
    """Store a row that `hold` took, or copy it block by block."""
    target = row_of(to_ptr, to_row, SHAPES[F][1], SHAPES[F][2])
    if SHAPES[F][3]:
        _put(target, 0, held, SHAPES[F][1], SHAPES[F][0])
    else:
        source = row_of(from_ptr, from_row, SHAPES[F][1], SHAPES[F][2])
        for start in tl.range(0, SHAPES[F][1], SHAPES[F][0]):
            _put(target, start, _words(source, start, SHAPES[F][1], SHAPES[F][0]), SHAPES[F][1], SHAPES[F][0])


@triton.jit
def hold_each(ptrs, row, SHAPES: tl.constexpr):
    held = ()
    for f in tl.static_range(len(SHAPES)):
        held = held + (hold(ptrs[f], row, SHAPES, f),)  # noqa: RUF005 (Triton's tuples)
    return held


@triton.jit
def put_each(held, from_ptrs, from_row, to_ptrs, to_row, SHAPES: tl.constexpr):
    for f in tl.static_range(len(SHAPES)):
        put(held[f], from_ptrs[f], from_row, to_ptrs[f], to_row, SHAPES, f)


@triton.jit
def wrapped(position, ring):
    """position % ring, for -ring <= position < 2 ring."""
    position = tl.where(position < 0, position + ring, position)
    return tl.where(position >= ring, position - ring, position)


def shapes_of(fields: list[Tensor], copies: int = 1, room: int = _HELD) -> tuple[tuple[int, int, int, bool], ...]:
    """A row of each field as (words in flight, words, bytes a word, held), in the widest words that divide it.

    Held are rows of one block, the shortest first, as long as `copies` of each fit into `room` words.
    """
    shapes = []
    for field in fields:
        size = field[0].numel() * field.element_size()
        word = next(x for x in (8, 4, 2, 1) if size % x == 0)
        shapes.append((min(triton.next_power_of_2(size // word), _BLOCK), size // word, word))
    held = [False] * len(shapes)
    for f in sorted(range(len(shapes)), key=lambda f: shapes[f][1]):
        block, words, _ = shapes[f]
        room -= copies * max(block, 32 * WARPS)
        held[f] = words <= block and room >= 0
    return tuple((*shape, kept) for shape, kept in zip(shapes, held, strict=True))


def as_bytes(x: Tensor | None) -> Tensor | None:
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def tree_shape(state: State) -> tuple[int, int]:
    offsets = level_offsets(state.layout.slots, state.tree.fanout)
    return len(offsets) - 1, state.tree.fanout.bit_length() - 1
