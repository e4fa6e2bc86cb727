"""Double Q-learning of a narrow network: three forward passes, the loss and all gradients, in three launches."""

from typing import NamedTuple

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops.dqn_loss.reference import STATS
from sharpwave.ops.q_mlp import WIDEST

__all__ = ["QMLPLoss", "q_mlp_gradient", "q_mlp_loss"]

ROWS = 16  # of a program of the GPU's kernels: the fewest a tensor core takes


class QMLPLoss(NamedTuple):
    """What `q_mlp_loss` returns and `q_mlp_gradient` takes."""

    td_error: Tensor
    """(n,) float32, signed, not weighted: what `update_priorities` takes."""
    saved: tuple[Tensor, ...]
    """The observations; activations and their gradients; sums of the statistics."""
    shape: tuple[int, int, int, bool]
    """hidden, k, actions, dueling."""
    backend: _backends.Backend


def _loss(params, *args):
    *args, backend = args
    return _backends.load("q_mlp_loss", params.device, backend).q_mlp_loss(params, *args)


def _loss_fake(params, _target, x, _next_x, _action, _reward, _discount, _weight, hidden, k, actions, dueling, *rest):
    n, wide = x.shape[0], 2 * k if dueling else k
    parts = -(-n // ROWS) if _backends.choose("q_mlp_loss", x.device.type, rest[-1]) == "triton" else 1
    shapes = [(n,), (n, hidden), (n, wide), (n, hidden), (n, wide), (n, actions), (n,), (parts, len(STATS))]
    return tuple(params.new_empty(shape) for shape in shapes)


def _gradient(x, *args):
    *args, backend = args
    return _backends.load("q_mlp_loss", x.device, backend).q_mlp_gradient(x, *args)


def _gradient_fake(x, _h1, _h2, _d1, _d2, _da, _dv, _sums, hidden, k, actions, dueling, _backend):
    return x.new_empty(_size(x.shape[1], hidden, k, actions, dueling)), x.new_empty(len(STATS))


_loss_op = register(
    "q_mlp_loss(Tensor params, Tensor target_params, Tensor x, Tensor next_x, Tensor action, Tensor reward, "
    "Tensor discount, Tensor weight, int hidden, int k, int actions, bool dueling, bool double, float huber, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _loss,
    _loss_fake,
)
_gradient_op = register(
    "q_mlp_gradient(Tensor x, Tensor h1, Tensor h2, Tensor d1, Tensor d2, Tensor da, Tensor dv, Tensor sums, "
    "int hidden, int k, int actions, bool dueling, str backend) -> (Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)


def q_mlp_loss(
    params: Tensor,
    target_params: Tensor,
    x: Tensor,
    next_x: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    *,
    hidden: int,
    k: int,
    actions: int,
    dueling: bool = True,
    double: bool = True,
    huber: float = 1.0,
    backend: _backends.Backend = "auto",
) -> QMLPLoss:
    """`dqn_loss` of a network that `q_mlp` computes; `q_mlp_gradient` gives its gradient.

        loss = dqn_loss(Q(x), action, Q(next_x) if double else None, Q_target(next_x), reward, discount, weight)

    Two functions, so that priorities can be written, and the next batch drawn, beside the second.

    Args:
        params: (P,) float32, contiguous: w1, b1, w2, b2, wa, ba and, with `dueling`, wv, bv of `q_mlp` side by side.
        target_params: (P,), the target network's.
        x, next_x: (n, D) float32.
        action: (n,) int64 in [0, actions). reward, discount, weight, huber: as in `dqn_loss`.
        hidden, k, actions: H, K and A of `q_mlp`.
        backend: "triton" wants D, H, K and A of at most WIDEST.

    Deterministic; accuracy, ties and NaNs are those of `q_mlp` and `dqn_loss`. Nothing is differentiable.

    Raises:
        ValueError: a shape does not fit, huber is not above 0, or widths are too large for the backend.
        TypeError: `action` is not int64.

    Source: Wang et al. 2016 (arXiv 1511.06581); van Hasselt et al. 2016 (arXiv 1509.06461).
    """
    if x.ndim != 2 or next_x.shape != x.shape:
        raise ValueError(f"x and next_x must be (n, D); got {tuple(x.shape)} and {tuple(next_x.shape)}")
    n, d = x.shape
    size = _size(d, hidden, k, actions, dueling)
    for name, given in (("params", params), ("target_params", target_params)):
        if given.shape != (size,) or not given.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and ({size},) for D={d}, hidden={hidden}, k={k}, actions={actions}, "
                f"dueling={dueling}; got {tuple(given.shape)}"
            )
    for name, given in dict(action=action, reward=reward, discount=discount, weight=weight).items():
        if given.shape != (n,):
            raise ValueError(f"{name} must have shape ({n},), one entry a row; got {tuple(given.shape)}")
    if action.dtype != torch.int64:
        raise TypeError(f"action must be int64; got {action.dtype}")
    if not huber > 0:
        raise ValueError(f"huber must be above 0; got {huber}")
    widest = max(d, hidden, k, actions)
    if _backends.choose("q_mlp_loss", x.device.type, backend) == "triton" and widest > WIDEST:
        raise ValueError(f"backend='triton' takes widths of at most {WIDEST}; got {widest}: use backend='reference'")
    x = x.contiguous()
    shape = (hidden, k, actions, dueling)
    td_error, *saved = _loss_op(
        params, target_params, x, next_x, action, reward, discount, weight, *shape, double, huber, backend
    )
    return QMLPLoss(td_error, (x, *saved), shape, backend)


def q_mlp_gradient(loss: QMLPLoss) -> tuple[Tensor, Tensor]:
    """The gradient of a loss, and its statistics.

    Returns:
        (P,) float32, d loss / d params, laid out as they are; and (5,) float32, named in
        `sharpwave.ops.dqn_loss.STATS`, the first of them the loss.
    """
    return _gradient_op(*loss.saved, *loss.shape, loss.backend)


def _size(d: int, hidden: int, k: int, actions: int, dueling: bool) -> int:
    streams = 2 if dueling else 1
    return (d + 1) * hidden + (hidden + 1) * k * streams + (k + 1) * (actions + streams - 1)
