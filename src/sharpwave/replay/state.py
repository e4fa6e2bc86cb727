"""What a buffer knows besides its transitions: tensors that change in place, so that a captured graph can go on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sharpwave.ops.sumtree import Tree, sum_tree

# Words of State.counters.
HELD, WRITTEN, DRAWN, AGE = range(4)
# Generations that no written item has: nothing there; nothing drawn.
NOTHING, NOT_DRAWN = -1, -2


@dataclass(frozen=True)
class Layout:
    """How slots are used.

    A buffer without environments is one ring of `ring` unrelated items. With environments, each has a ring of its own,
    slots e ring to (e + 1) ring - 1, written one step after the other. A step's next observation is written ahead
    into the slot after it, where the next step's own observation then lies; at an episode's end that slot keeps the
    true final observation, holds no item, and the next episode begins one slot later. So `slot + 1` always holds the
    next observation, whatever ended, and no observation is stored twice.
    """

    ring: int
    envs: int
    """0: unrelated items."""
    span: int = 1
    """Steps a window needs from its first on: n of n-step returns, or a sequence's length."""
    short: bool = True
    """Whether a window may be cut short by its episode's end."""
    period: int = 1
    """A window may start at every `period`-th step of an episode."""
    frames: int = 1
    """Observations a stack reaches back over, the newest included."""

    @property
    def slots(self) -> int:
        return self.ring * max(self.envs, 1)


@dataclass(frozen=True)
class State:
    """All of it on one device, but for the layout."""

    layout: Layout
    tree: Tree
    generation: Tensor
    """(slots,) int64: the number of the item that lies there, counted from 0 since the start; or NOTHING."""
    step: Tensor
    """(slots,) int32: the step of its episode that lies there; with environments only."""
    head: Tensor
    """(max(envs, 1),) int64: position in the ring that is written next."""
    episode_step: Tensor
    """(envs,) int64: the step of its episode that is written next."""
    counters: Tensor
    """(4,) int64: items that can be drawn now; numbers given to items so far (a step of all environments takes one for
    each, also for those that skip it); draws so far; sum of the ages of all draws."""
    max_priority: Tensor
    """(1,) float32: the largest priority so far, alpha not applied."""
    beta: Tensor
    """(3,) float32: beta at first, at last, and the number of draws in between."""
    offset: Tensor
    """(1,) int64: the number of the next draw of the random stream."""
    seed: Tensor
    """0-d int64."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a saved buffer holds; the tree's sums follow from its leaves."""
        names = ("generation", "step", "head", "episode_step", "counters", "max_priority", "beta", "offset", "seed")
        return {name: getattr(self, name) for name in names} | {"leaves": self.tree.leaves, "status": self.tree.status}


def new_state(layout: Layout, device: torch.device, extrema: bool, max_priority: float) -> State:
    """An empty buffer's state; beta and seed are still 0."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return State(
        layout=layout,
        tree=sum_tree(layout.slots, device, extrema=extrema),
        generation=torch.full((layout.slots,), NOTHING, device=device),
        step=zeros(layout.slots if layout.envs else 0, dtype=torch.int32),
        head=zeros(max(layout.envs, 1)),
        episode_step=zeros(layout.envs),
        counters=zeros(4),
        max_priority=torch.full((1,), max_priority, device=device),
        beta=zeros(3, dtype=torch.float32),
        offset=zeros(1),
        seed=zeros(),
    )
