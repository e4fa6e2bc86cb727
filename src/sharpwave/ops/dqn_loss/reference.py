"""The losses of Q-learning in plain PyTorch: scalar values, and distributions over fixed atoms."""

import torch
from torch import Tensor

STATS = ("loss", "td_error", "q_mean", "q_max", "q_spread")


def dqn_loss(
    q: Tensor,
    action: Tensor,
    next_q: Tensor | None,
    next_target_q: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    huber: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, td_error, d loss / d q, stats). See `sharpwave.ops.dqn_loss.dqn_loss`."""
    best = (next_target_q if next_q is None else next_q).argmax(1, keepdim=True)
    target = reward + discount * next_target_q.gather(1, best)[:, 0]
    td_error = target - q.gather(1, action[:, None])[:, 0]
    size = td_error.abs()
    inside = size.clamp(max=huber)
    loss = (weight * inside * (size - 0.5 * inside)).mean()
    slope = -weight * td_error.clamp(-huber, huber) / len(q)
    d_q = torch.zeros_like(q).scatter_(1, action[:, None], slope[:, None].to(q.dtype))
    return loss, td_error, d_q, _stats(loss, size, q, action)


def c51_loss(
    logits: Tensor,
    action: Tensor,
    next_logits: Tensor | None,
    next_target_logits: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    atoms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, KL divergence, d loss / d logits, stats). See `sharpwave.ops.dqn_loss.c51_loss`."""
    n, rows = len(logits), torch.arange(len(logits), device=logits.device)
    following = next_target_logits.softmax(2)
    chooser = following if next_logits is None else next_logits.softmax(2)
    best = (chooser @ atoms).argmax(1)
    # Each atom of the target's distribution is shared out between the two atoms around where it moves to.
    moved = (reward[:, None] + discount[:, None] * atoms).clamp(atoms[0], atoms[-1])  # (n, K)
    width = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    share = (1 - (moved[:, None, :] - atoms[None, :, None]).abs() / width).clamp(min=0)  # (n, K, K)
    target = (share @ following[rows, best][:, :, None])[:, :, 0]  # (n, K)
    logp = logits.log_softmax(2)
    taken = logp[rows, action]
    entropy = -torch.where(target > 0, target * target.clamp(min=1e-30).log(), 0).sum(1)
    cross_entropy = -(target * taken).sum(1)
    loss = (weight * cross_entropy).mean()
    # The target's mass is 1 to rounding; what the softmax's gradient needs is exactly its sum.
    slope = (target.sum(1, keepdim=True) * taken.exp() - target) * (weight / n)[:, None]
    chosen = torch.arange(logits.shape[1], device=logits.device)[None, :, None] == action[:, None, None]
    d_logits = torch.where(chosen, slope[:, None, :], 0).to(logits.dtype)
    divergence = (cross_entropy - entropy).clamp(min=0)
    return loss, divergence, d_logits, _stats(loss, divergence, logp.exp() @ atoms, action)


def _stats(loss: Tensor, size: Tensor, q: Tensor, action: Tensor) -> Tensor:
    low, high = q.aminmax(dim=1)
    taken = q.gather(1, action[:, None])
    return torch.stack([loss, size.mean(), taken.mean(), high.amax(), (high - low).mean()]).float()
