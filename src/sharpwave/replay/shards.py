"""A buffer in shards, one on each rank: what is drawn of one stands for what would be drawn of all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group = ProcessGroup | Callable[[Tensor], Tensor]


class Union(NamedTuple):
    """A shard's draw as a part of the union's; see `join`."""

    weights: Tensor
    probabilities: Tensor
    """(n,) float64."""
    max_priority: Tensor
    """0-d float64, over all shards."""


def gathering(group: Any) -> Callable[[Tensor], Tensor]:
    """From a tensor to (R, ...), those of all ranks of a process group; a function that does so is taken as it is."""
    if not hasattr(group, "rank"):
        if not callable(group):
            raise TypeError(
                "group must be a torch.distributed process group, such as torch.distributed.group.WORLD, or a function "
                f"from a tensor to those of all ranks; got {group!r}"
            )
        return group
    import torch.distributed as dist

    def gather(x: Tensor) -> Tensor:
        every = x.new_zeros(group.size(), *x.shape)
        every[group.rank()] = x
        dist.all_reduce(every, group=group)
        return every

    return gather


def tell_nothing(gather: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Take part in `join` with an empty shard, so that no rank waits for this one."""
    gather(torch.zeros(4, dtype=torch.float64, device=device))


def join(
    gather: Callable[[Tensor], Tensor], probabilities: Tensor, beta: Tensor, total: Tensor, held: Tensor,
    max_priority: Tensor, smallest: Tensor | None,
) -> Union:  # fmt: skip
    """What n items drawn from one of R shards weigh in a draw of R n from all.

        P_i = P^r_i W_r / W;     w_i = (N P_i)^-beta / max w  *  R W_r / W

    The last factor is what a shard's draw counts for: rank r draws item i with P^r_i, not P_i, and

        1/R sum_r sum_{i in r} P^r_i  R W_r / W  f_i  =  sum_i P_i f_i,

    so that the average over the ranks of mean(w loss), and of its gradient, has the expectation of one buffer's.

    Args:
        gather: from a tensor to (R, ...), those of all ranks.
        probabilities: (n,) P^r_i, of the rank's own shard; 0 where nothing was drawn, whose weight is 0.
        beta: 0-d, the same on all ranks.
        total, held, max_priority: 0-d, the shard's W_r, its number of items (N is their sum), its largest priority.
        smallest: 0-d, the smallest P^r_i by which to divide, which gives the largest weight; None: not divided.
    """
    own = torch.stack([x.double() for x in (total, held, max_priority, total if smallest is None else smallest)])
    totals, counts, largest, least = gather(own).unbind(1)
    share = total.double() / totals.sum()
    p = probabilities.double() * share
    # A shard of which nothing can be drawn says nothing of the smallest.
    least = torch.where(totals > 0, least * totals / totals.sum(), torch.inf)
    base = counts.sum() if smallest is None else 1 / least.amin()
    weights = torch.where(p > 0, (base * p).pow(-beta.double()) * len(totals) * share, 0)
    return Union(weights, p, largest.amax())
