"""The steps of a buffer in plain PyTorch: any device, fixed shapes, nothing read back: fit for a CUDA graph."""

from typing import NamedTuple

import torch
from torch import Tensor

from sharpwave.ops.sumtree import tree_sample, tree_update
from sharpwave.replay import windows
from sharpwave.replay.state import AGE, DRAWN, HELD, NOT_DRAWN, NOTHING, WRITTEN, State


class Draw(NamedTuple):
    """(B,) each: slots int64, importance weights float32, probabilities float32, generations int64."""

    indices: Tensor
    weights: Tensor
    probabilities: Tensor
    generations: Tensor


def add_items(s: State, n: int, leaf: Tensor) -> Tensor:
    """Make room for n <= ring unrelated items with the given leaf (0-d float32): their slots (n,)."""
    count = torch.arange(n, device=leaf.device)
    slots = (s.head + count) % s.layout.ring
    s.counters[HELD].add_((s.tree.leaves[slots] == 0).sum())
    s.generation.index_copy_(0, slots, s.counters[WRITTEN] + count)
    tree_update(s.tree, slots, leaf.expand(n).contiguous())
    s.head.add_(n).remainder_(s.layout.ring)
    s.counters[WRITTEN].add_(n)
    return slots


def add_step(s: State, ended: Tensor, leaf: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Make room for one step of each environment, and let those windows be drawn that it completes.

    Args:
        ended: (N,) bool, whether the step ended its episode.
        leaf: 0-d float32, of each new window.
        valid: (N,) bool, environments that took a step; the others' state is written over itself. None: all.

    Returns:
        (N,) each: the step's slots, and those of its next observations.
    """
    ring, span, device = s.layout.ring, s.layout.span, leaf.device
    env = torch.arange(s.layout.envs, device=device)
    valid = torch.ones_like(ended) if valid is None else valid
    slot, step = env * ring + s.head, s.episode_step.clone()
    # Writing ahead takes the next slot; the frames-1 items after that have lost part of their stack.
    dead = windows.move(slot[:, None], torch.arange(s.layout.frames + 1, device=device), ring)  # (N, frames + 1)
    back = torch.arange(span, device=device)
    complete = (back == span - 1) & (back <= step[:, None])
    if s.layout.short:
        complete = complete | (ended[:, None] & (back <= step[:, None]))
    complete = complete & ((step[:, None] - back) % s.layout.period == 0) & valid[:, None]  # (N, span)
    start = torch.where(complete, windows.move(slot[:, None], -back, ring), dead[:, 1:2])

    kept = torch.where(valid[:, None], 0, s.tree.leaves[dead])
    s.counters[HELD].add_(complete.sum() - ((s.tree.leaves[dead] > 0) & valid[:, None]).sum())
    numbers = torch.where(valid, s.counters[WRITTEN] + env, s.generation[slot])
    s.generation.index_copy_(0, dead.flatten(), torch.where(valid[:, None], NOTHING, s.generation[dead]).flatten())
    s.generation.index_copy_(0, slot, numbers)
    s.step.index_copy_(0, slot, torch.where(valid, step.int(), s.step[slot]))
    indices = torch.cat([dead.flatten(), start.flatten()])
    values = torch.cat([kept.flatten(), torch.where(complete, leaf, kept[:, 1:2]).flatten()])
    tree_update(s.tree, indices, values)

    s.head.add_(valid).add_(ended & valid).remainder_(ring)
    s.episode_step.add_(valid).mul_(~(ended & valid))
    s.counters[WRITTEN].add_(s.layout.envs)
    return slot, dead[:, 1]


def draw(s: State, n: int, beta: Tensor, norm: str | None, smallest: Tensor | None, stratified: bool) -> Draw:
    """Draw n windows. `beta`: 0-d float32. `norm`: as `weight_norm`; "buffer" needs its `smallest` positive leaf."""
    drawn = tree_sample(s.tree, n, s.seed, s.offset, stratified=stratified)
    positive = drawn.values > 0
    generations = torch.where(positive, s.generation[drawn.indices], NOT_DRAWN)
    s.counters[DRAWN].add_(positive.sum())
    s.counters[AGE].add_(torch.where(positive, s.counters[WRITTEN] - 1 - generations, 0).sum())
    if norm == "batch":
        smallest = drawn.values.amin()
    weights = windows.importance_weights(drawn.values, drawn.total, s.counters[HELD], beta, smallest)
    probabilities = torch.where(positive, drawn.values / drawn.total, 0).float()
    return Draw(drawn.indices, weights, probabilities, generations)


def current_beta(s: State) -> Tensor:
    """Beta after the draws so far, 0-d: linear between its ends, then constant."""
    first, last, draws = s.beta.unbind()
    done = torch.where(draws > 0, (s.offset[0] / draws.clamp(min=1)).clamp(max=1), 0)
    return first + (last - first) * done.float()


def known_generation(s: State, indices: Tensor) -> Tensor:
    """Generations for an update that names none: whatever lies there now."""
    return s.generation[indices.clamp(0, s.layout.slots - 1)]
