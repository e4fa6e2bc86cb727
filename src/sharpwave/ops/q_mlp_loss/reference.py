"""Double Q-learning of a narrow network, put together from the references of its parts."""

import torch
from torch import Tensor

from sharpwave.ops.dqn_loss.reference import dqn_loss
from sharpwave.ops.q_mlp.reference import q_mlp


def q_mlp_loss(
    params: Tensor,
    target_params: Tensor,
    x: Tensor,
    next_x: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    hidden: int,
    k: int,
    actions: int,
    dueling: bool,
    double: bool,
    huber: float,
) -> tuple[Tensor, ...]:
    """td_error; h1, h2; the gradients d1, d2 of what enters them; da, dv of the heads; sums of the statistics."""
    weights, target = (_views(w, x.shape[1], hidden, k, actions, dueling) for w in (params, target_params))
    q, h1, h2 = q_mlp(x, *weights)
    next_q = q_mlp(next_x, *weights)[0] if double else None
    next_target_q = q_mlp(next_x, *target)[0]
    _, td_error, da, stats = dqn_loss(q, action, next_q, next_target_q, reward, discount, weight, huber)
    _, _, w2, _, wa, _, wv, _ = weights
    dv = da.sum(1)
    if wv is None:
        d2 = da @ wa
    else:
        da = da - dv[:, None] / actions
        d2 = torch.cat([dv[:, None] * wv, da @ wa], 1)
    d2 = d2 * (h2 > 0)
    d1 = (d2 @ w2) * (h1 > 0)
    return td_error, h1, h2, d1, d2, da, dv, stats[None]


def q_mlp_gradient(
    x: Tensor,
    h1: Tensor,
    h2: Tensor,
    d1: Tensor,
    d2: Tensor,
    da: Tensor,
    dv: Tensor,
    sums: Tensor,
    hidden: int,
    k: int,
    actions: int,
    dueling: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient, stats). See `sharpwave.ops.q_mlp_loss.q_mlp_gradient`."""
    gradients = [d1.t() @ x, d1.sum(0), d2.t() @ h1, d2.sum(0), da.t() @ h2[:, -k:], da.sum(0)]
    if dueling:
        gradients += [dv @ h2[:, :k], dv.sum(0)]
    return torch.cat([g.reshape(-1) for g in gradients]), sums[0].clone()


def _views(flat: Tensor, d: int, hidden: int, k: int, actions: int, dueling: bool) -> list:
    """w1, b1, w2, b2, wa, ba, wv, bv in the vector that holds them."""
    wide = 2 * k if dueling else k
    shapes = [(hidden, d), (hidden,), (wide, hidden), (wide,), (actions, k), (actions,)]
    shapes += [(1, k), (1,)] if dueling else []
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)] + [None] * (8 - len(shapes))
