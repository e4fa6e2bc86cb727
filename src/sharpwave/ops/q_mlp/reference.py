"""A Q network of two hidden layers in plain PyTorch, with its gradients written out."""

import torch
from torch import Tensor
from torch.nn import functional as F


def q_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    wa: Tensor,
    ba: Tensor,
    wv: Tensor | None,
    bv: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, h1, h2). See `sharpwave.ops.q_mlp.q_mlp`."""
    h1 = F.relu(F.linear(x, w1, b1))
    h2 = F.relu(F.linear(h1, w2, b2))
    if wv is None or bv is None:
        return F.linear(h2, wa, ba), h1, h2
    hidden = wv.shape[1]
    advantage = F.linear(h2[:, hidden:], wa, ba)
    value = F.linear(h2[:, :hidden], wv, bv)
    return advantage + (value - advantage.mean(1, keepdim=True)), h1, h2


def q_mlp_backward(
    dq: Tensor,
    x: Tensor,
    h1: Tensor,
    h2: Tensor,
    w2: Tensor,
    wa: Tensor,
    wv: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of (w1, b1, w2, b2, wa, ba, wv, bv), the last two empty without a value stream."""
    da, dwv, dbv = dq, dq.new_empty(0), dq.new_empty(0)
    ha = h2
    d2 = da @ wa
    if wv is not None:
        hidden = wv.shape[1]
        dv = dq.sum(1, keepdim=True)
        da = dq - dv / dq.shape[1]
        ha = h2[:, hidden:]
        dwv, dbv = dv.t() @ h2[:, :hidden], dv.sum(0)
        d2 = torch.cat([dv @ wv, da @ wa], 1)
    d2 = d2 * (h2 > 0)
    d1 = (d2 @ w2) * (h1 > 0)
    return d1.t() @ x, d1.sum(0), d2.t() @ h1, d2.sum(0), da.t() @ ha, da.sum(0), dwv, dbv
