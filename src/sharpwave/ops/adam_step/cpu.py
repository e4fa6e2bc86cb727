"""Adam on one flat vector for CPUs: a pass for the norm and one for the step."""

import math

import numba
import numpy as np
from torch import Tensor

LANES = 16  # of partial sums, so that the norm's loop is one of vectors; the order of additions is fixed


@numba.njit(cache=True, error_model="numpy")
def _norm(grad):
    lanes = np.zeros(LANES, np.float64)
    whole = len(grad) - len(grad) % LANES
    for start in range(0, whole, LANES):
        for k in range(LANES):
            g = np.float64(grad[start + k])
            lanes[k] += g * g
    total = 0.0
    for i in range(whole, len(grad)):
        total += np.float64(grad[i]) * np.float64(grad[i])
    for k in range(LANES):
        total += lanes[k]
    return math.sqrt(total)


@numba.njit(cache=True, error_model="numpy")
def _first_bad(grad):
    for i in range(len(grad)):
        if not np.isfinite(grad[i]):
            return i
    return 0


@numba.njit(cache=True, error_model="numpy")
def _step(param, grad, exp_avg, exp_avg_sq, scale, rate, root, rise1, rise2, eps):
    for i in range(len(param)):
        g = grad[i] * scale
        m = exp_avg[i] + rise1 * (g - exp_avg[i])
        v = exp_avg_sq[i] + rise2 * (g * g - exp_avg_sq[i])
        exp_avg[i] = m
        exp_avg_sq[i] = v
        param[i] -= rate * m / (np.sqrt(v) * root + eps)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    lr: Tensor,
    keep: Tensor,
    report: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    max_grad_norm: float,
) -> None:
    """As the reference, float32."""
    g = grad.numpy()
    norm = float(np.float32(_norm(g)))
    finite = math.isfinite(norm)
    kept = finite and (math.isfinite(keep) if keep.is_floating_point() else bool(keep))
    out = report.numpy()
    out[0], out[1] = norm, kept
    if not finite:
        out[2] = _first_bad(g)
    if not kept:
        return
    t = float(count) + 1
    count.fill_(t)
    scale = np.float32(min(1.0, max_grad_norm / (norm + 1e-6)))
    rate = np.float32(float(lr) / (1 - beta1**t))
    root = np.float32(1 / math.sqrt(1 - beta2**t))
    arrays = (x.numpy() for x in (param, grad, exp_avg, exp_avg_sq))
    _step(*arrays, scale, rate, root, np.float32(1 - beta1), np.float32(1 - beta2), np.float32(eps))
