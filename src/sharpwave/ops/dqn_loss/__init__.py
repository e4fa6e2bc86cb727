"""The losses of Q-learning, with their gradients and with what becomes the priorities."""

from typing import NamedTuple

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops.dqn_loss import reference
from sharpwave.ops.dqn_loss.reference import STATS

__all__ = ["STATS", "DQNLoss", "c51_loss", "dqn_loss"]


class DQNLoss(NamedTuple):
    """What a loss of Q-learning returns."""

    loss: Tensor
    """0-d float32, differentiable with respect to the network's output."""
    td_error: Tensor
    """(n,) float32, signed, not weighted: what `update_priorities` takes. For distributions the KL divergence."""
    gradient: Tensor
    """d loss / d output, like the output. `output.backward(gradient)` saves what `loss.backward()` adds to it."""
    stats: Tensor
    """(5,), named in STATS: loss, mean |td_error|, mean Q of the actions taken, largest Q, mean of max - min."""


def _dqn_kernel(q, action, next_q, next_target_q, reward, discount, weight, huber, backend):
    impl = _backends.load("dqn_loss", q.device, backend)
    return impl.dqn_loss(q, action, next_q, next_target_q, reward, discount, weight, huber)


def _c51_kernel(logits, action, next_logits, next_target_logits, reward, discount, weight, atoms, backend):
    impl = _backends.load("dqn_loss", logits.device, backend)
    impl = impl if hasattr(impl, "c51_loss") else reference
    return impl.c51_loss(logits, action, next_logits, next_target_logits, reward, discount, weight, atoms)


def _fake(output, action, *_args):
    n, dtype = output.shape[0], torch.promote_types(output.dtype, torch.float32)
    return (
        output.new_empty((), dtype=dtype),
        output.new_empty(n, dtype=dtype),
        output.new_empty(output.shape),
        output.new_empty(len(STATS), dtype=torch.float32),
    )


def _save_gradient(ctx, inputs, output):
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_grads):
    return grad * ctx.saved_tensors[0], *[None] * 8


_dqn_op = register(
    "dqn_loss(Tensor q, Tensor action, Tensor? next_q, Tensor next_target_q, Tensor reward, Tensor discount, "
    "Tensor weight, float huber, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _dqn_kernel,
    _fake,
    _backward,
    _save_gradient,
)
_c51_op = register(
    "c51_loss(Tensor logits, Tensor action, Tensor? next_logits, Tensor next_target_logits, Tensor reward, "
    "Tensor discount, Tensor weight, Tensor atoms, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _c51_kernel,
    _fake,
    _backward,
    _save_gradient,
)


def dqn_loss(
    q: Tensor,
    action: Tensor,
    next_q: Tensor | None,
    next_target_q: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    *,
    huber: float = 1.0,
    backend: _backends.Backend = "auto",
) -> DQNLoss:
    """Huber loss of the one-step or n-step TD error, of Double Q-learning where `next_q` is given.

        a*     = argmax_a next_q(a)                     (argmax_a next_target_q(a) where next_q is None)
        target = reward + discount next_target_q(a*)
        td     = target - q(action)
        loss   = mean  w h(td),   h(x) = x^2 / 2 for |x| <= huber, else huber (|x| - huber / 2)

    Args:
        q: (n, A) float32, of the observations; float64 on `reference`.
        action: (n,) int64 in [0, A), taken there.
        next_q: (n, A), the online network's of the next observations, or None. No gradient flows to it.
        next_target_q: (n, A), the target network's.
        reward, discount: (n,); as `PrioritizedReplay.sample` gives them: n-step returns, and 0 after a termination.
        weight: (n,), importance weights; 0 leaves a row out of the loss. The TD error does not depend on it.
        huber: where the loss turns linear, > 0; infinity makes it squared.

    Returns:
        DQNLoss. Of equal values the first action is the best. Deterministic. A NaN or infinity in a row reaches the
        loss, and that row's TD error alone.

    Raises:
        ValueError: a shape does not fit, or huber is not above 0. TypeError: `action` is not int64.

    Source: Mnih et al. 2015; van Hasselt et al. 2016 (arXiv 1509.06461); weights as in Schaul et al. 2016.
    """
    if q.ndim != 2:
        raise ValueError(f"q must be (n, actions); got {tuple(q.shape)}")
    _check(q, action, next_q, next_target_q, "q", reward=reward, discount=discount, weight=weight)
    if not huber > 0:
        raise ValueError(f"huber must be above 0; got {huber}")
    return DQNLoss(*_dqn_op(q, action, next_q, next_target_q, reward, discount, weight, huber, backend))


def c51_loss(
    logits: Tensor,
    action: Tensor,
    next_logits: Tensor | None,
    next_target_logits: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    atoms: Tensor,
    *,
    backend: _backends.Backend = "auto",
) -> DQNLoss:
    """Cross-entropy to the projected distribution of the target (C51).

        p(a)   = softmax logits(a),   Q(a) = sum_k p_k(a) z_k,   a* = argmax_a Q(a) of next_logits (or the target's)
        m_j    = sum_k max(0, 1 - |clip(reward + discount z_k, z_1, z_K) - z_j| / dz) p_target,k(a*)
        loss   = mean  w  (-sum_j m_j log p_j(action));      td_error = KL(m || p(action))

    The priority is the KL divergence and not the cross-entropy, which is the entropy of m where nothing is left to
    learn, so that random rewards would be drawn for ever.

    Args:
        logits, next_logits, next_target_logits: (n, A, K), as `q` and the others of `dqn_loss`.
        atoms: (K,), z, equally spaced and rising.
        The rest: as in `dqn_loss`.

    Returns, raises: as `dqn_loss`; the statistics of Q are those of the expected values.

    Source: Bellemare et al. 2017 (arXiv 1707.06887), algorithm 1; the priority is that of Hessel et al. 2018
    (arXiv 1710.02298).
    """
    if logits.ndim != 3 or atoms.shape != logits.shape[2:] or len(atoms) < 2:
        raise ValueError(
            f"logits must be (n, actions, atoms) for atoms (K,), K >= 2; got {tuple(logits.shape)} and "
            f"{tuple(atoms.shape)}"
        )
    _check(logits, action, next_logits, next_target_logits, "logits", reward=reward, discount=discount, weight=weight)
    return DQNLoss(*_c51_op(logits, action, next_logits, next_target_logits, reward, discount, weight, atoms, backend))


def _check(
    output: Tensor, action: Tensor, following: Tensor | None, following_target: Tensor, name: str, **rows: Tensor
) -> None:
    n = output.shape[0]
    for x in (following, following_target):
        if x is not None and x.shape != output.shape:
            raise ValueError(f"next {name} must have {name}'s shape {tuple(output.shape)}; got {tuple(x.shape)}")
    for key, x in {"action": action, **rows}.items():
        if x.shape != (n,):
            raise ValueError(f"{key} must have shape ({n},), one entry a row; got {tuple(x.shape)}")
    if action.dtype != torch.int64:
        raise TypeError(f"action must be int64; got {action.dtype}")
