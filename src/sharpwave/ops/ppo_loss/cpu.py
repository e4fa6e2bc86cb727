"""The PPO loss and its gradient for CPUs: one pass over the rows, in fixed chunks so that sums are deterministic."""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from sharpwave.ops.ppo_loss.reference import summary

CHUNK = 256  # rows summed by one thread, whatever the number of threads
SMALL = 1 << 14  # below this many logits or means, waking the threads costs more than it saves
_LOG_2PI = math.log(2 * math.pi)


@numba.njit(cache=True, error_model="numpy")
def _moments(advantage, valid):
    """(mean, standard deviation, count) of the valid entries; two passes in float64."""
    n = 0
    total = 0.0
    for i in range(advantage.shape[0]):
        if valid[i]:
            n += 1
            total += advantage[i]
    count = max(n, 1)
    mean = total / count
    square = 0.0
    for i in range(advantage.shape[0]):
        if valid[i]:
            square += (advantage[i] - mean) ** 2
    return mean, math.sqrt(square / count), count


@numba.njit(cache=True, error_model="numpy", inline="always")
def _row(logprob, value, old_logprob, old_value, advantage, a_hat, weight, clip, vf_clip, sums):
    """Surrogate of one row: adds its terms to `sums`; returns (ratio, d loss/d logprob, d value_loss/d value)."""
    log_ratio = logprob - old_logprob
    ratio = math.exp(log_ratio)
    wa = -weight * a_hat
    ratio_clipped = min(max(ratio, 1 - clip), 1 + clip)
    inside = ratio == ratio_clipped
    surrogate, surrogate_clipped = wa * ratio, wa * ratio_clipped
    use_clipped = surrogate_clipped > surrogate
    d_logprob = wa * ratio if inside or not use_clipped else 0.0

    ret = advantage + old_value
    step = value - old_value
    step_clipped = min(max(step, -vf_clip), vf_clip)
    error, error_clipped = value - ret, old_value + step_clipped - ret
    value_clipped = error_clipped * error_clipped > error * error
    d_value = error if not value_clipped else (error_clipped if step == step_clipped else 0.0)

    sums[0] += max(surrogate, surrogate_clipped)
    sums[1] += 0.5 * max(error * error, error_clipped * error_clipped)
    sums[3] -= log_ratio
    sums[4] += ratio - 1 - log_ratio
    sums[5] += 1.0 if abs(ratio - 1) > clip else 0.0
    # A NaN must show in the loss: max() of Python order drops it.
    sums[0] += surrogate * 0.0
    sums[1] += error * 0.0
    return ratio, d_logprob, d_value


@numba.njit(error_model="numpy")
def _categorical_chunk(
    chunk, moments, logits, offsets, mask, has_mask, value, action, old_logprob, old_value, advantage, weight, valid,
    clip, vf_clip, vf_coef, ent_coef, ratio_out, d_logits, d_value, partial,
):  # fmt: skip
    n_rows, width = logits.shape
    heads = offsets.shape[0] - 1
    mean, std, count = moments
    sums = np.zeros(6)
    logp = np.empty(width)
    prob = np.empty(width)
    head_entropy = np.empty(heads)
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n_rows)):
        logprob = 0.0
        for h in range(heads):
            lo, hi = offsets[h], offsets[h + 1]
            any_legal = not has_mask
            if has_mask:
                for k in range(lo, hi):
                    any_legal |= mask[i, k]
            top = -np.inf
            for k in range(lo, hi):
                legal = not has_mask or mask[i, k] or not any_legal
                if legal and not logits[i, k] <= top:
                    top = np.float64(logits[i, k])
            total = 0.0
            for k in range(lo, hi):
                legal = not has_mask or mask[i, k] or not any_legal
                prob[k] = math.exp(logits[i, k] - top) if legal else 0.0
                total += prob[k]
            log_total = math.log(total)
            entropy = 0.0
            for k in range(lo, hi):
                legal = not has_mask or mask[i, k] or not any_legal
                logp[k] = logits[i, k] - top - log_total if legal else -np.inf
                prob[k] /= total
                if legal:
                    entropy -= prob[k] * logp[k]
            head_entropy[h] = entropy
            logprob += logp[lo + action[i, h]]
        a_hat = (advantage[i] - mean) / (std + 1e-8)
        if not valid[i]:
            ratio_out[i] = math.exp(logprob - old_logprob[i])
            d_value[i] = 0.0
            d_logits[i, :] = 0.0
            continue
        ratio, d_logprob, d_v = _row(
            logprob, np.float64(value[i]), old_logprob[i], np.float64(old_value[i]), np.float64(advantage[i]),
            a_hat, weight[i], clip, vf_clip, sums,
        )  # fmt: skip
        ratio_out[i] = ratio
        d_value[i] = vf_coef * d_v / count
        for h in range(heads):
            lo, hi = offsets[h], offsets[h + 1]
            sums[2] += head_entropy[h]
            for k in range(lo, hi):
                legal = not has_mask or logp[k] > -np.inf
                d = 0.0
                if legal:
                    d = -d_logprob * prob[k] + ent_coef * prob[k] * (logp[k] + head_entropy[h])
                if k == lo + action[i, h]:
                    d += d_logprob
                d_logits[i, k] = d / count
    partial[chunk, :] = sums


@numba.njit(cache=True, error_model="numpy")
def _categorical(moments, args, partial):
    for chunk in range(partial.shape[0]):
        _categorical_chunk(chunk, moments, *args, partial)


@numba.njit(cache=True, parallel=True, error_model="numpy")
def _categorical_parallel(moments, args, partial):
    for chunk in numba.prange(partial.shape[0]):
        _categorical_chunk(chunk, moments, *args, partial)


@numba.njit(error_model="numpy")
def _gaussian_chunk(
    chunk, moments, mean_, log_std, value, action, old_logprob, old_value, advantage, weight, valid,
    clip, vf_clip, vf_coef, ent_coef, ratio_out, d_mean, d_log_std, d_value, partial,
):  # fmt: skip
    n_rows, dim = mean_.shape
    a_mean, a_std, count = moments
    sums = np.zeros(6)
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n_rows)):
        logprob = 0.0
        entropy = 0.0
        for k in range(dim):
            z = (np.float64(action[i, k]) - mean_[i, k]) * math.exp(-log_std[i, k])
            logprob += -0.5 * z * z - log_std[i, k] - 0.5 * _LOG_2PI
            entropy += log_std[i, k] + 0.5 * (_LOG_2PI + 1.0)
        if not valid[i]:
            ratio_out[i] = math.exp(logprob - old_logprob[i])
            d_value[i] = 0.0
            d_mean[i, :] = 0.0
            d_log_std[i, :] = 0.0
            continue
        a_hat = (advantage[i] - a_mean) / (a_std + 1e-8)
        ratio, d_logprob, d_v = _row(
            logprob, np.float64(value[i]), old_logprob[i], np.float64(old_value[i]), np.float64(advantage[i]),
            a_hat, weight[i], clip, vf_clip, sums,
        )  # fmt: skip
        ratio_out[i] = ratio
        d_value[i] = vf_coef * d_v / count
        sums[2] += entropy
        for k in range(dim):
            inv_std = math.exp(-log_std[i, k])
            z = (np.float64(action[i, k]) - mean_[i, k]) * inv_std
            d_mean[i, k] = d_logprob * z * inv_std / count
            d_log_std[i, k] = (d_logprob * (z * z - 1.0) - ent_coef) / count
    partial[chunk, :] = sums


@numba.njit(cache=True, error_model="numpy")
def _gaussian(moments, args, partial):
    for chunk in range(partial.shape[0]):
        _gaussian_chunk(chunk, moments, *args, partial)


@numba.njit(cache=True, parallel=True, error_model="numpy")
def _gaussian_parallel(moments, args, partial):
    for chunk in numba.prange(partial.shape[0]):
        _gaussian_chunk(chunk, moments, *args, partial)


def _rows(value: Tensor, *rest: Tensor) -> list[np.ndarray]:
    if any(x.dtype == torch.float64 for x in (value, *rest)):
        raise TypeError("the cpu backend of the PPO loss takes no float64; use backend='reference'")
    return [x.detach().float().contiguous().numpy() for x in (value, *rest)]


def _valid(valid: Tensor | None, n: int) -> np.ndarray:
    return np.ones(n, dtype=np.bool_) if valid is None else valid.contiguous().numpy()


def _given(moments: Tensor) -> tuple[float, float, int]:
    """What `_moments` returns, from what others have taken."""
    count, mean, variance = (x.item() for x in summary(moments))
    return mean, math.sqrt(variance), max(int(count), 1)


def _finish(partial: np.ndarray, count: int, ent_coef: float, vf_coef: float) -> tuple[Tensor, Tensor]:
    stats = partial.sum(axis=0) / count
    loss = stats[0] + vf_coef * stats[1] - ent_coef * stats[2]
    return torch.tensor(loss, dtype=torch.float32), torch.from_numpy(stats.astype(np.float32))


def categorical(
    logits: Tensor, value: Tensor, action: Tensor, old_logprob: Tensor, old_value: Tensor, advantage: Tensor,
    weight: Tensor, mask: Tensor | None, valid: Tensor | None, ent_coef: Tensor, nvec: list[int],
    clip: float, vf_clip: float, vf_coef: float, moments: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, ratio, stats, d loss/d logits, d loss/d value)."""
    n = value.shape[0]
    x, v, lp, ov, adv, w = _rows(logits, value, old_logprob, old_value, advantage, weight)
    offsets = np.concatenate([[0], np.cumsum(nvec)]).astype(np.int64)
    legal = np.ones((1, 1), dtype=np.bool_) if mask is None else mask.contiguous().numpy()
    ratio, d_logits, d_value = np.empty_like(v), np.empty_like(x), np.empty_like(v)
    partial = np.empty((-(-n // CHUNK), 6))
    ent = float(ent_coef)
    rows_valid = _valid(valid, n)
    given = _moments(adv, rows_valid) if moments is None else _given(moments)
    args = (
        x, offsets, legal, mask is not None, v, action.contiguous().numpy(), lp, ov, adv, w, rows_valid,
        clip, vf_clip, vf_coef, ent, ratio, d_logits, d_value,
    )  # fmt: skip
    (_categorical if x.size < SMALL else _categorical_parallel)(given, args, partial)
    loss, stats = _finish(partial, given[2], ent, vf_coef)
    return (
        loss,
        torch.from_numpy(ratio),
        stats,
        torch.from_numpy(d_logits).to(logits.dtype),
        torch.from_numpy(d_value).to(value.dtype),
    )


def gaussian(
    mean: Tensor, log_std: Tensor, value: Tensor, action: Tensor, old_logprob: Tensor, old_value: Tensor,
    advantage: Tensor, weight: Tensor, valid: Tensor | None, ent_coef: Tensor,
    clip: float, vf_clip: float, vf_coef: float, moments: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, ratio, stats, d loss/d mean, d loss/d log_std, d loss/d value)."""
    n = value.shape[0]
    m, s, v, a, lp, ov, adv, w = _rows(mean, log_std, value, action, old_logprob, old_value, advantage, weight)
    ratio, d_mean, d_log_std, d_value = (np.empty_like(x) for x in (v, m, m, v))
    partial = np.empty((-(-n // CHUNK), 6))
    ent = float(ent_coef)
    rows_valid = _valid(valid, n)
    given = _moments(adv, rows_valid) if moments is None else _given(moments)
    args = (
        m, s, v, a, lp, ov, adv, w, rows_valid, clip, vf_clip, vf_coef, ent, ratio, d_mean, d_log_std, d_value,
    )  # fmt: skip
    (_gaussian if m.size < SMALL else _gaussian_parallel)(given, args, partial)
    loss, stats = _finish(partial, given[2], ent, vf_coef)
    grads = (torch.from_numpy(d_mean), torch.from_numpy(d_log_std), torch.from_numpy(d_value))
    inputs = (mean, log_std, value)
    return loss, torch.from_numpy(ratio), stats, *(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True))
