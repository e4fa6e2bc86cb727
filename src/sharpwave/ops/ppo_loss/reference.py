"""The PPO loss in plain, differentiable PyTorch."""

import math

import torch
from torch import Tensor

STATS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clip_fraction")


def categorical(logits: Tensor, action: Tensor, nvec: tuple[int, ...], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probability (n,) of `action` (n, heads) and entropy (n,), both summed over the heads."""
    logprob = torch.zeros_like(logits[:, 0])
    entropy = torch.zeros_like(logits[:, 0])
    start = 0
    for head, size in enumerate(nvec):
        x = logits[:, start : start + size]
        legal = torch.ones_like(x, dtype=torch.bool)
        if mask is not None:
            legal = mask[:, start : start + size]
            legal = legal | ~legal.any(1, keepdim=True)
        # A finite filler keeps 0 * log 0 and the gradients of illegal entries at 0 instead of NaN.
        logp = torch.log_softmax(x.masked_fill(~legal, -1e30), dim=1)
        logprob = logprob + logp.gather(1, action[:, head : head + 1]).squeeze(1)
        entropy = entropy - torch.where(legal, logp.exp() * logp, 0).sum(1)
        start += size
    return logprob, entropy


def gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density (n,) of `action` (n, D) under independent normals, and entropy (n,)."""
    z = (action - mean) * torch.exp(-log_std)
    logprob = (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(1)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(1)
    return logprob, entropy


def only(valid: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """0 in place of the rows that do not count: a NaN of theirs would reach the gradient as 0 NaN."""
    if valid is None:
        return rows
    return tuple(torch.where(valid, x, 0) for x in rows)


def quiet(valid: Tensor | None, x: Tensor) -> Tensor:
    """Rows that do not count: no gradient, and 0 for what is not finite, whose gradient would be 0 NaN."""
    if valid is None:
        return x
    return torch.where(valid[:, None], x, x.detach().nan_to_num(0, 0, 0))


def advantage_moments(advantage: Tensor, valid: Tensor | None, out: Tensor) -> None:
    """Write (4, 1) float64: the valid advantages' sum and sum of squares over the first of all, their count, and it."""
    first = advantage[0].double()
    first = torch.where(first.isfinite(), first, 0)
    over = advantage.double() - first
    if valid is not None:
        over = torch.where(valid, over, 0)
    count = torch.tensor(advantage.shape[0]) if valid is None else valid.sum()
    out.copy_(torch.stack([over.sum(), over.square().sum(), count.to(over), first])[:, None])


def summary(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and population variance, 0-d float64, of what `advantage_moments` has taken in parts."""
    total, square, count = moments[:3].sum(1)
    over = total / count.clamp(min=1)
    return count, moments[3, 0] + over, (square / count.clamp(min=1) - over.square()).clamp(min=0)


def surrogate(
    logprob: Tensor,
    entropy: Tensor,
    value: Tensor,
    old_logprob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    weight: Tensor,
    valid: Tensor | None,
    ent_coef: Tensor,
    clip: float,
    vf_clip: float,
    vf_coef: float,
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ratio, stats) from the log-probability and entropy of the actions taken; ratios of all rows."""
    every_ratio = (logprob - old_logprob).exp().detach()
    logprob, entropy, value, old_logprob, old_value, advantage, weight = only(
        valid, logprob, entropy, value, old_logprob, old_value, advantage, weight
    )
    m = torch.ones_like(value) if valid is None else valid.to(value.dtype)
    n = m.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(m > 0, x, 0).sum() / n

    wide = advantage.double()
    if moments is None:
        center = mean(wide)
        std = mean((wide - center).square()).sqrt()
    else:
        _, center, variance = summary(moments)
        std = variance.sqrt()
    a_hat = ((wide - center) / (std + 1e-8)).to(advantage.dtype)

    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    policy_loss = mean(torch.maximum(-weight * a_hat * ratio, -weight * a_hat * ratio.clamp(1 - clip, 1 + clip)))

    ret = advantage + old_value
    clipped = old_value + (value - old_value).clamp(-vf_clip, vf_clip)
    value_loss = 0.5 * mean(torch.maximum((value - ret).square(), (clipped - ret).square()))

    entropy = mean(entropy)
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip).to(value.dtype)
        kl = [mean(-log_ratio), mean(ratio - 1 - log_ratio), mean(outside)]
        stats = torch.stack([policy_loss, value_loss, entropy, *kl])
    return loss, every_ratio, stats.detach()
