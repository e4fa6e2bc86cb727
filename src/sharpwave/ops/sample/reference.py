"""Drawing actions in plain PyTorch."""

import torch
from torch import Tensor

from sharpwave.ops.ppo_loss.reference import gaussian


def sample_categorical(
    logits: Tensor, noise: Tensor | None, nvec: tuple[int, ...], mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The contract is `sharpwave.ops.sample.sample_categorical`."""
    logits = logits.float()
    if mask is not None:
        legal = [head | ~head.any(1, keepdim=True) for head in mask.split(nvec, 1)]
        # A finite filler: the difference of two infinities would be NaN.
        logits = logits.masked_fill(~torch.cat(legal, 1), -1e30)
    noisy = logits if noise is None else logits - noise.clamp(min=torch.finfo(noise.dtype).tiny).log_()
    if len(nvec) == 1:
        action = noisy.argmax(1, keepdim=True)
        return action, torch.log_softmax(logits, 1).gather(1, action).squeeze(1)
    actions, logprob = [], torch.zeros_like(logits[:, 0])
    for head, head_noisy in zip(logits.split(nvec, 1), noisy.split(nvec, 1), strict=True):
        action = head_noisy.argmax(1, keepdim=True)
        actions.append(action)
        logprob = logprob + torch.log_softmax(head, 1).gather(1, action).squeeze(1)
    return torch.cat(actions, 1), logprob


def sample_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """The contract is `sharpwave.ops.sample.sample_gaussian`."""
    mean = mean.float()
    log_std = log_std.float().expand_as(mean)
    action = mean.clone() if noise is None else mean + log_std.exp() * noise
    return action, gaussian(mean, log_std, action)[0]
