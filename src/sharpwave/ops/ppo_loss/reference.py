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
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ratio, stats) from the log-probability and entropy of the actions taken."""
    m = torch.ones_like(value) if valid is None else valid.to(value.dtype)
    n = m.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(m > 0, x, 0).sum() / n

    a_mean = mean(advantage)
    a_std = mean((advantage - a_mean).square()).sqrt()
    a_hat = (advantage - a_mean) / (a_std + 1e-8)

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
    return loss, ratio.detach(), stats.detach()
