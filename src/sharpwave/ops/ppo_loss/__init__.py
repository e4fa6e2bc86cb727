"""The PPO loss of a minibatch, with its gradient."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops.ppo_loss import reference
from sharpwave.ops.ppo_loss.reference import STATS

if TYPE_CHECKING:
    from sharpwave.run.graphs import Branch

__all__ = [
    "STATS",
    "PPOGradient",
    "PPOLoss",
    "advantage_moments",
    "ppo_gradient_categorical",
    "ppo_gradient_decoded",
    "ppo_gradient_gaussian",
    "ppo_loss_categorical",
    "ppo_loss_gaussian",
]


class PPOLoss(NamedTuple):
    """What a PPO loss returns."""

    loss: Tensor
    """0-d float32, differentiable with respect to the policy's outputs and the value."""
    ratio: Tensor
    """(n,) float32, pi(a|s) / pi_old(a|s); no gradient."""
    stats: Tensor
    """(6,) float32, the means named in STATS; no gradient."""


class PPOGradient(NamedTuple):
    """What a PPO loss comes to on a network's output, and its gradient there; nothing is differentiable."""

    loss: Tensor
    """0-d float32."""
    ratio: Tensor
    """(n,) float32, pi(a|s) / pi_old(a|s)."""
    stats: Tensor
    """(6,) float32, the means named in STATS."""
    d_output: Tensor
    """(n, K), d loss / d output; 0 in the columns past the value."""
    d_log_std: Tensor | None
    """d loss / d log_std, in its shape; None for categorical actions."""
    value: Tensor
    """(n,) float32, the output's value."""
    d_features: Tensor | None = None
    """(n, H), d loss / d features, where the loss was taken from a decoder's input; None elsewhere."""


def _categorical_kernel(
    logits, value, action, old_logprob, old_value, advantage, weight, mask, valid, ent_coef, nvec,
    clip, vf_clip, vf_coef, *, backend="auto",
):  # fmt: skip
    impl = _backends.load("ppo_loss", logits.device, backend)
    return impl.categorical(
        logits, value, action, old_logprob, old_value, advantage, weight, mask, valid, ent_coef, nvec,
        clip, vf_clip, vf_coef,
    )  # fmt: skip


def _categorical_fake(logits, value, *_args, **_kwargs):
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty(value.shape, dtype=torch.float32),
        logits.new_empty(len(STATS), dtype=torch.float32),
        logits.new_empty(logits.shape),
        value.new_empty(value.shape),
    )


def _save_gradients(ctx, inputs, output, **_keywords):
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _categorical_backward(ctx, grad, *_grads):
    d_logits, d_value = ctx.saved_tensors
    return grad * d_logits, grad * d_value, *[None] * 12


_categorical_op = register(
    "ppo_loss_categorical(Tensor logits, Tensor value, Tensor action, Tensor old_logprob, Tensor old_value, "
    "Tensor advantage, Tensor weight, Tensor? mask, Tensor? valid, Tensor ent_coef, int[] nvec, float clip, "
    "float vf_clip, float vf_coef, *, str backend='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _categorical_kernel,
    _categorical_fake,
    _categorical_backward,
    _save_gradients,
)


def _gaussian_kernel(
    mean, log_std, value, action, old_logprob, old_value, advantage, weight, valid, ent_coef,
    clip, vf_clip, vf_coef, *, backend="auto",
):  # fmt: skip
    impl = _backends.load("ppo_loss", mean.device, backend)
    return impl.gaussian(
        mean, log_std, value, action, old_logprob, old_value, advantage, weight, valid, ent_coef,
        clip, vf_clip, vf_coef,
    )  # fmt: skip


def _gaussian_fake(mean, log_std, value, *_args, **_kwargs):
    loss, ratio, stats, d_mean, d_value = _categorical_fake(mean, value)
    return loss, ratio, stats, d_mean, log_std.new_empty(log_std.shape), d_value


def _gaussian_backward(ctx, grad, *_grads):
    return *[grad * d for d in ctx.saved_tensors], *[None] * 10


_gaussian_op = register(
    "ppo_loss_gaussian(Tensor mean, Tensor log_std, Tensor value, Tensor action, Tensor old_logprob, "
    "Tensor old_value, Tensor advantage, Tensor weight, Tensor? valid, Tensor ent_coef, float clip, "
    "float vf_clip, float vf_coef, *, str backend='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gaussian_kernel,
    _gaussian_fake,
    _gaussian_backward,
    _save_gradients,
)


def _check_rows(n: int, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.shape != (n,):
            raise ValueError(f"{name} must have shape ({n},), one entry a row; got {tuple(x.shape)}")
        if x is not None and (x.dtype != torch.bool if name == "valid" else not x.is_floating_point()):
            raise TypeError(f"{name} must be {'bool' if name == 'valid' else 'floating'}; got {x.dtype}")


def _check_heads(n: int, nvec: Sequence[int], action: Tensor, mask: Tensor | None) -> None:
    if not nvec or min(nvec) < 1:
        raise ValueError(f"nvec must name at least one head of at least one action; got {tuple(nvec)}")
    if action.shape != (n, len(nvec)):
        raise ValueError(f"action must be ({n}, {len(nvec)}), a column a head; got {tuple(action.shape)}")
    if action.dtype != torch.int64:
        raise TypeError(f"action must be int64; got {action.dtype}")
    if mask is not None and (mask.shape != (n, sum(nvec)) or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool of logits' shape {(n, sum(nvec))}; got {mask.dtype} {tuple(mask.shape)}")


def ppo_loss_categorical(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    old_logprob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    weight: Tensor,
    ent_coef: Tensor,
    *,
    nvec: Sequence[int],
    clip: float,
    vf_clip: float,
    vf_coef: float,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    moments: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> PPOLoss:
    """Clipped-surrogate loss of discrete and multi-discrete actions.

        A_hat = (A - mean A) / (std A + 1e-8)      mean, population std and every mean below: over the valid rows
        r     = exp(logprob - old_logprob)         logprob and entropy are summed over the heads
        pg    = mean max(-w A_hat r, -w A_hat clip(r, 1 - clip, 1 + clip))
        R     = A + v_old
        vf    = 0.5 mean max((v - R)^2, (v_old + clip(v - v_old, -vf_clip, vf_clip) - R)^2)
        loss  = pg + vf_coef vf - ent_coef mean entropy

    Args:
        logits: (n, sum(nvec)) float32, bf16 or fp16; the heads' logits side by side. float64 on `reference` only.
        value: (n,), like `logits`.
        action: (n, heads) int64, 0 <= action[:, h] < nvec[h]; legal under `mask`.
        old_logprob, old_value, advantage, weight: (n,) float32; weight is the importance weight of the row's segment.
        ent_coef: 0-d float32 tensor, so that a schedule can change it inside a captured graph.
        nvec: sizes of the heads.
        clip, vf_clip, vf_coef: > 0.
        mask: (n, sum(nvec)) bool, true where an action is legal. A head with no legal action is read as all legal.
        valid: (n,) bool; false rows enter no mean and get no gradient. No valid row at all gives loss 0.
        moments: `advantage_moments` to take in place of the rows' own; on `reference` only.
        backend: see `sharpwave.ops`.

    Returns:
        PPOLoss. Arithmetic in float32 or better. Deterministic: sums run in a fixed order. A NaN or infinity in a valid
        row reaches the loss. Gradients flow to `logits` and `value`.

    Raises:
        ValueError: a shape does not fit. TypeError: `action` is not int64, or `mask` not bool.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; the value clip is Engstrom et al. 2020 (arXiv 2005.12729);
    masks as in Huang and Ontanon 2022 (arXiv 2006.14171).
    """
    n = value.shape[0]
    if logits.shape != (n, sum(nvec)):
        raise ValueError(f"logits must be ({n}, {sum(nvec)}) for nvec {tuple(nvec)}; got {tuple(logits.shape)}")
    _check_heads(n, nvec, action, mask)
    _check_rows(
        n, value=value, old_logprob=old_logprob, old_value=old_value, advantage=advantage, weight=weight, valid=valid
    )
    if _backends.choose("ppo_loss", logits.device.type, backend) == "reference":
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprob, entropy = reference.categorical(reference.quiet(valid, logits.to(dtype)), action, tuple(nvec), mask)
        return PPOLoss(
            *reference.surrogate(
                logprob, entropy, value.to(dtype), old_logprob, old_value, advantage, weight, valid, ent_coef,
                clip, vf_clip, vf_coef, moments,
            )
        )  # fmt: skip
    if moments is not None:
        raise ValueError("moments are for ppo_gradient_categorical, or backend='reference'")
    return PPOLoss(
        *_categorical_op(
            logits, value, action, old_logprob, old_value, advantage, weight, mask, valid, ent_coef, list(nvec),
            clip, vf_clip, vf_coef, backend=backend,
        )[:3]
    )  # fmt: skip


def ppo_loss_gaussian(
    mean: Tensor,
    log_std: Tensor,
    value: Tensor,
    action: Tensor,
    old_logprob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    weight: Tensor,
    ent_coef: Tensor,
    *,
    clip: float,
    vf_clip: float,
    vf_coef: float,
    valid: Tensor | None = None,
    moments: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> PPOLoss:
    """Clipped-surrogate loss of continuous actions from a diagonal Gaussian.

    The loss is `ppo_loss_categorical`'s, with
    logprob = sum_d -(a_d - mean_d)^2 / (2 std_d^2) - log_std_d - log(2 pi) / 2 and
    entropy = sum_d log_std_d + log(2 pi e) / 2.

    Args:
        mean: (n, D) float32, bf16 or fp16.
        log_std: anything that broadcasts to (n, D); its gradient is summed back to its shape.
        action: (n, D) float32, as it was sampled, before any clipping to the environment's bounds.
        The rest: as in `ppo_loss_categorical`.

    Returns, raises: as `ppo_loss_categorical`.
    """
    n = value.shape[0]
    if mean.ndim != 2 or mean.shape[0] != n:
        raise ValueError(f"mean must be ({n}, D); got {tuple(mean.shape)}")
    if action.shape != mean.shape:
        raise ValueError(f"action must have mean's shape {tuple(mean.shape)}; got {tuple(action.shape)}")
    _check_rows(
        n, value=value, old_logprob=old_logprob, old_value=old_value, advantage=advantage, weight=weight, valid=valid
    )
    log_std = log_std.expand_as(mean)
    if _backends.choose("ppo_loss", mean.device.type, backend) == "reference":
        dtype = torch.promote_types(mean.dtype, torch.float32)
        mean, log_std = (reference.quiet(valid, v.to(dtype)) for v in (mean, log_std))
        logprob, entropy = reference.gaussian(mean, log_std, reference.quiet(valid, action))
        return PPOLoss(
            *reference.surrogate(
                logprob, entropy, value.to(dtype), old_logprob, old_value, advantage, weight, valid, ent_coef,
                clip, vf_clip, vf_coef, moments,
            )
        )  # fmt: skip
    if moments is not None:
        raise ValueError("moments are for ppo_gradient_gaussian, or backend='reference'")
    return PPOLoss(
        *_gaussian_op(
            mean, log_std, value, action, old_logprob, old_value, advantage, weight, valid, ent_coef,
            clip, vf_clip, vf_coef, backend=backend,
        )[:3]
    )  # fmt: skip


def ppo_gradient_categorical(
    output: Tensor,
    *rows: Tensor,
    nvec: Sequence[int],
    clip: float,
    vf_clip: float,
    vf_coef: float,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    dtype: torch.dtype | None = None,
    beside: "Branch | None" = None,
    moments: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> PPOGradient:
    """`ppo_loss_categorical` of a network's output as it is, and the gradient there: no graph, no copies around it.

    Args:
        output: (n, K) float32, K > W = sum(nvec): W logits, the value, and columns that mean nothing.
        rows: action, old_logprob, old_value, advantage, weight and ent_coef, as there. `weight` may be (m,), each entry
            for n / m consecutive rows.
        nvec, clip, vf_clip, vf_coef, mask, valid, backend: as there.
        dtype: of the gradient, output's by default.
        beside: a `sharpwave.run.graphs.Branch` on which a GPU sums up `loss` and `stats`, for nothing in the gradient
            waits for them.
        moments: `advantage_moments` of advantage and valid, where they were taken before.

    Returns, raises: see `PPOGradient` and `ppo_loss_categorical`.
    """
    action, old_logprob, old_value, advantage, weight, ent_coef = rows
    width, n = sum(nvec), output.shape[0]
    _check_gradient(output, width, weight, n)
    _check_heads(n, nvec, action, mask)
    _check_rows(n, old_logprob=old_logprob, old_value=old_value, advantage=advantage, valid=valid)
    logits, value = output[:, :width], output[:, width]
    dtype = dtype or output.dtype
    name = _backends.choose("ppo_loss", output.device.type, backend)
    if name == "reference":
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            out = ppo_loss_categorical(
                leaf[:, :width], leaf[:, width], action, old_logprob, old_value, advantage, _each_row(weight, n),
                ent_coef, nvec=nvec, clip=clip, vf_clip=vf_clip, vf_coef=vf_coef, mask=mask, valid=valid,
                moments=moments, backend=backend,
            )  # fmt: skip
            (d,) = torch.autograd.grad(out.loss, leaf)
        return PPOGradient(out.loss.detach(), out.ratio, out.stats, d.to(dtype), None, value)
    common = (action, old_logprob, old_value, advantage)
    rest = (mask, valid, ent_coef, list(nvec), clip, vf_clip, vf_coef)
    impl = _backends.load("ppo_loss", output.device, backend)
    if name == "triton":
        joint = torch.empty(output.shape, dtype=dtype, device=output.device)
        loss, ratio, stats, *_ = impl.categorical(
            logits, value, *common, weight, *rest, joint=joint, beside=beside, moments=moments
        )
        return PPOGradient(loss, ratio, stats, joint, None, value)
    loss, ratio, stats, d_logits, d_value = impl.categorical(
        logits, value, *common, _each_row(weight, n), *rest, moments=moments
    )
    return PPOGradient(loss, ratio, stats, _side_by_side(d_logits, d_value, output).to(dtype), None, value)


def ppo_gradient_decoded(
    features: Tensor,
    decoder: Tensor,
    *rows: Tensor,
    nvec: Sequence[int],
    clip: float,
    vf_clip: float,
    vf_coef: float,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    beside: "Branch | None" = None,
    moments: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> PPOGradient:
    """`ppo_gradient_categorical` of output = features decoder^T, and the gradient in the features as well.

        d_output = d loss / d output, rounded to features' dtype;     d_features = d_output decoder

    For 16-bit features a GPU does it in one pass over them, with float32 sums; the output is never written.

    Args:
        features: (n, H).
        decoder: (K, H), of features' dtype: rows of W logits, the value, and others that mean nothing.
        rows, the rest: as in `ppo_gradient_categorical`.
    """
    action, old_logprob, old_value, advantage, weight, ent_coef = rows
    if features.ndim != 2 or decoder.ndim != 2 or features.shape[1] != decoder.shape[1]:
        raise ValueError(
            f"features must be (n, H) and decoder (K, H); got {tuple(features.shape)} and {tuple(decoder.shape)}"
        )
    options = {"nvec": nvec, "clip": clip, "vf_clip": vf_clip, "vf_coef": vf_coef, "mask": mask, "valid": valid}
    if _backends.choose("ppo_loss", features.device.type, backend) == "triton":
        from sharpwave.ops.ppo_loss import _decoded_triton

        if _decoded_triton.usable(features, decoder):
            n = features.shape[0]
            _check_gradient(decoder.t(), sum(nvec), weight, n)
            _check_heads(n, nvec, action, mask)
            _check_rows(n, old_logprob=old_logprob, old_value=old_value, advantage=advantage, valid=valid)
            loss, ratio, stats, value, d_output, d_features = _decoded_triton.categorical(
                features, decoder, action, old_logprob, old_value, advantage, weight, mask, valid, ent_coef,
                list(nvec), clip, vf_clip, vf_coef, moments, beside,
            )  # fmt: skip
            return PPOGradient(loss, ratio, stats, d_output, None, value, d_features)
    wide = torch.promote_types(features.dtype, torch.float32)
    output = features.to(wide) @ decoder.to(wide).t()
    found = ppo_gradient_categorical(
        output, *rows, **options, dtype=features.dtype, beside=beside, moments=moments, backend=backend
    )
    used = sum(nvec) + 1
    return found._replace(d_features=found.d_output[:, :used] @ decoder[:used])


def advantage_moments(
    advantage: Tensor,
    valid: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> Tensor | None:
    """What the losses need to normalise advantages, for their `moments`: it can be taken before the network has run.

    Args:
        advantage: (n,) float32. valid: (n,) bool: the rows that count.
        out: an earlier result for the same n, to be written; away from a GPU any (4, 1) float64 tensor.

    Returns:
        (4, parts) float64: the parts' sums and sums of squares over an origin, their counts, and the origin. Away from
        a GPU None without `out`, which `moments` takes too: the loss then takes them itself.
    """
    if _backends.choose("ppo_loss", advantage.device.type, backend) != "triton":
        if out is not None:
            reference.advantage_moments(advantage, valid, out)
        return out
    return _backends.load("ppo_loss", advantage.device, backend).advantage_moments(
        advantage.float().contiguous(), None if valid is None else valid.contiguous(), out
    )


def ppo_gradient_gaussian(
    output: Tensor,
    log_std: Tensor,
    *rows: Tensor,
    clip: float,
    vf_clip: float,
    vf_coef: float,
    valid: Tensor | None = None,
    dtype: torch.dtype | None = None,
    beside: "Branch | None" = None,
    moments: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> PPOGradient:
    """`ppo_loss_gaussian` of a network's output as it is, and the gradient there and at log_std.

    Args:
        output: (n, K) float32: D means, the value, and columns that mean nothing; D is action's width.
        log_std: (D,).
        rows, the rest: as in `ppo_gradient_categorical`.
    """
    action, old_logprob, old_value, advantage, weight, ent_coef = rows
    n = output.shape[0]
    if action.ndim != 2 or action.shape[0] != n or not action.is_floating_point():
        raise ValueError(f"action must be ({n}, D), floating; got {tuple(action.shape)} {action.dtype}")
    width = action.shape[1]
    _check_gradient(output, width, weight, n)
    _check_rows(n, old_logprob=old_logprob, old_value=old_value, advantage=advantage, valid=valid)
    dtype = dtype or output.dtype
    common = (action, old_logprob, old_value, advantage)
    coefficients = {"clip": clip, "vf_clip": vf_clip, "vf_coef": vf_coef}
    if _backends.choose("ppo_loss", output.device.type, backend) == "reference":
        with torch.enable_grad():
            leaf, deviation = output.detach().requires_grad_(), log_std.detach().requires_grad_()
            out = ppo_loss_gaussian(
                leaf[:, :width], deviation, leaf[:, width], *common, _each_row(weight, n), ent_coef, valid=valid,
                moments=moments, backend=backend, **coefficients,
            )  # fmt: skip
            d, d_log_std = torch.autograd.grad(out.loss, (leaf, deviation))
        return PPOGradient(out.loss.detach(), out.ratio, out.stats, d.to(dtype), d_log_std, output[:, width])
    impl = _backends.load("ppo_loss", output.device, backend)
    mean, value, wide = output[:, :width], output[:, width], log_std.detach().expand(n, width)
    rest = (valid, ent_coef, clip, vf_clip, vf_coef)
    if _backends.choose("ppo_loss", output.device.type, backend) == "triton":
        joint = torch.empty(output.shape, dtype=dtype, device=output.device)
        loss, ratio, stats, _, d_log_std, _ = impl.gaussian(
            mean, wide, value, *common, weight, *rest, joint=joint, beside=beside, moments=moments
        )
        return PPOGradient(loss, ratio, stats, joint, d_log_std.sum(0), value)
    loss, ratio, stats, d_mean, d_log_std, d_value = impl.gaussian(
        mean, wide, value, *common, _each_row(weight, n), *rest, moments=moments
    )
    d_output = _side_by_side(d_mean, d_value, output).to(dtype)
    return PPOGradient(loss, ratio, stats, d_output, d_log_std.sum(0), value)


def _check_gradient(output: Tensor, width: int, weight: Tensor, n: int) -> None:
    if output.ndim != 2 or output.shape[1] <= width:
        raise ValueError(f"output must be (n, K) with K > {width}, the value's column; got {tuple(output.shape)}")
    if weight.ndim != 1 or weight.shape[0] == 0 or n % weight.shape[0]:
        raise ValueError(f"weight must be (m,) with m a divisor of n = {n}; got {tuple(weight.shape)}")


def _each_row(weight: Tensor, n: int) -> Tensor:
    return weight.repeat_interleave(n // weight.shape[0])


def _side_by_side(d_params: Tensor, d_value: Tensor, output: Tensor) -> Tensor:
    padding = output.new_zeros(output.shape[0], output.shape[1] - d_params.shape[1] - 1)
    return torch.cat([d_params, d_value[:, None], padding], 1)
