"""Actions drawn from a policy's outputs, and their log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpwave.ops import _backends


def sample_categorical(
    logits: Tensor,
    noise: Tensor | None = None,
    *,
    nvec: Sequence[int],
    mask: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """One choice of each of several heads by the Gumbel-max trick, or the most probable one.

        action_h = argmax_k (logit_hk - log e_hk) over legal k;    logprob = sum_h log softmax(logit_h)[action_h]

    An argmax of p / e, the e independent and exponential, is a draw from p; in logarithms the same, without overflow.

    Args:
        logits: (N, sum(nvec)), the heads side by side; rows may lie apart. Computed with in float32.
        noise: (N, sum(nvec)) float32, each drawn from the exponential distribution of mean 1; None takes the mode. An
            e below the smallest normal float32 is read as that, for at just 0 an illegal choice could win.
        nvec: choices of each head.
        mask: (N, sum(nvec)) bool, true where a choice is legal. A head with no legal choice is read as all legal. The
            probabilities are those of the legal choices alone.
        backend: see `sharpwave.ops`.

    Returns:
        action (N, heads) int64, always in range, and logprob (N,) float32. Of equal values the first wins, and NaN
        counts as the largest. Where a logit is NaN the log-probability is NaN. No gradient. Deterministic for its
        inputs; backends may differ in the last bit, and so in the action where two values are that close.

    Raises:
        ValueError: a shape does not fit. TypeError: noise or mask is of another dtype.
    """
    width = sum(nvec)
    if logits.ndim != 2 or logits.shape[1] != width:
        raise ValueError(f"logits must be (N, {width}), a column each choice of nvec; got {tuple(logits.shape)}")
    if noise is not None:
        _check("noise", noise, logits.shape, torch.float32)
    if mask is not None:
        _check("mask", mask, logits.shape, torch.bool)
    return _backends.load("sample", logits.device, backend).sample_categorical(logits, noise, tuple(nvec), mask)


def sample_gaussian(
    mean: Tensor, log_std: Tensor, noise: Tensor | None = None, *, backend: _backends.Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """A draw from independent normals, or their mean.

        action = mean + exp(log_std) noise
        logprob = sum_d -(noise_d^2) / 2 - log_std_d - log(2 pi) / 2,   noise_d = (action_d - mean_d) / exp(log_std_d)

    Args:
        mean: (N, D); rows may lie apart. log_std: (D,). Computed with in float32.
        noise: (N, D) float32, each from the standard normal distribution; None takes the mean.
        backend: see `sharpwave.ops`.

    Returns:
        action (N, D) float32 and logprob (N,) float32, of the action as it was rounded. No gradient. Deterministic.

    Raises:
        ValueError: a shape does not fit. TypeError: noise is not float32.
    """
    if mean.ndim != 2:
        raise ValueError(f"mean must be (N, D); got {tuple(mean.shape)}")
    if log_std.shape != mean.shape[1:]:
        raise ValueError(f"log_std must be {tuple(mean.shape[1:])}, one for each column; got {tuple(log_std.shape)}")
    if noise is not None:
        _check("noise", noise, mean.shape, torch.float32)
    return _backends.load("sample", mean.device, backend).sample_gaussian(mean, log_std, noise)


def _check(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}; got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}; got {x.dtype}")
