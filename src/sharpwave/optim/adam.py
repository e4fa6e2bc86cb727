"""Adam with a clipped gradient that skips what is not finite, without waiting for the device."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sharpwave.ops._backends import choose
from sharpwave.ops.adam_step import adam_step
from sharpwave.optim import _groups


def flatten_parameters(params: Iterable[Tensor]) -> Tensor:
    """One vector that holds all parameters, which become views of it, each in its own memory order.

    What is done to all of them at once is then one launch. Parameters must be float32 and of one device, and stay where
    they are from here on: `copy_` into them, as `load_state_dict` does.
    """
    params = list(params)
    flat = torch.cat([in_memory_order(p.data) for p in params])
    _become_views(params, flat)
    return flat


def _become_views(params: list[Tensor], flat: Tensor) -> None:
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.as_strided(p.shape, p.stride())


def in_memory_order(x: Tensor) -> Tensor:
    """The entries of a dense tensor as a vector, as they lie in memory."""
    return x.reshape(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


_OWN = (
    "flat",
    "eps",
    "max_grad_norm",
    "_exp_avg",
    "_exp_avg_sq",
    "_count",
    "_report",
    "grad_norm",
    "first_bad",
    "_always",
)


class FlatAdam(torch.optim.Optimizer):
    """`sharpwave.ops.adam_step` on a network's parameters, which it puts into one vector.

    torch.optim.Adam, fused and capturable, takes five times as long on a GPU for networks of some ten thousand weights,
    its clipping and checks not counted: it gives 65536 weights to one multiprocessor.

    Args:
        params: parameters, float32; they become views of one vector.
        lr: a 0-d tensor on the parameters' device, so that a captured graph follows a schedule.
        eps: added to the root of the second moment.
        max_grad_norm: > 0; infinity leaves the gradient as it is.

    Attributes:
        flat: the vector.
        grad_norm: 0-d, |g| before clipping at the last step.
        first_bad: 0-d, the place of the first entry that was not finite at the last step skipped for it, in `flat`.

    `step` is `sharpwave.optim.Muon`'s: one that would not be finite, or whose `keep` is false, changes nothing.
    """

    add_param_group = _groups.add_param_group

    def __init__(self, params: Iterable, lr: Tensor, eps: float = 1e-8, max_grad_norm: float = math.inf):
        params = list(params)
        super().__init__(params, dict(lr=lr))
        self.flat = flatten_parameters(params)
        self.eps, self.max_grad_norm = eps, max_grad_norm
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self._count = torch.zeros((), device=self.flat.device)
        self._report = torch.zeros(3, device=self.flat.device)
        self.grad_norm, _, self.first_bad = self._report.unbind()
        self._always = torch.ones((), dtype=torch.bool, device=self.flat.device)
        sizes = [p.numel() for p in params]
        for p, m, v in zip(params, self._exp_avg.split(sizes), self._exp_avg_sq.split(sizes), strict=True):
            self.state[p] = {"exp_avg": m, "exp_avg_sq": v, "count": self._count}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: torch.optim's leave out what a subclass adds."""
        return super().__getstate__() | {name: vars(self)[name] for name in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's parameters have left the vector: they go back into the copy's."""
        super().__setstate__(state)
        _become_views([p for group in self.param_groups for p in group["params"]], self.flat)

    @torch.no_grad()
    def step(self, closure=None, *, keep: Tensor | None = None, grad: Tensor | None = None):
        """One step, or none (without a host wait) where `keep` forbids it; returns the closure's loss.

        `keep` is a 0-d tensor: a bool, or a number (the loss) that must be finite. `grad` is the gradient laid out as
        `flat` is; None: what the parameters hold.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        if grad is None:
            grad = _side_by_side([in_memory_order(p.grad) for p in group["params"]])
        adam_step(
            self.flat, grad, self._exp_avg, self._exp_avg_sq, self._count, group["lr"],
            self._always if keep is None else keep, self._report, eps=self.eps, max_grad_norm=self.max_grad_norm,
        )  # fmt: skip
        return loss


def _side_by_side(parts: list[Tensor]) -> Tensor:
    if choose("adam_step", parts[0].device.type) == "triton":
        from sharpwave.optim._collect_triton import collect

        return collect(parts)
    return torch.cat(parts)
