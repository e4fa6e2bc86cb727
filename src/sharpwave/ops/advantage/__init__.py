"""Advantages of trajectory segments, off-policy corrected."""

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register


def _kernel(
    value, next_value, reward, terminated, truncated, ratio, gamma, lam, rho_clip=1.0, c_clip=1.0, *, backend="auto"
):
    impl = _backends.load("advantage", value.device, backend)
    return impl.puff_advantage(value, next_value, reward, terminated, truncated, ratio, gamma, lam, rho_clip, c_clip)


def _fake(value, *_args, **_kwargs):
    return value.new_empty(value.shape)


_op = register(
    "puff_advantage(Tensor value, Tensor next_value, Tensor reward, Tensor terminated, Tensor truncated, Tensor ratio, "
    "float gamma, float lam, float rho_clip=1.0, float c_clip=1.0, *, str backend='auto') -> Tensor",
    _kernel,
    _fake,
)


def puff_advantage(
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    ratio: Tensor,
    *,
    gamma: float,
    lam: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    backend: _backends.Backend = "auto",
) -> Tensor:
    """Generalised advantages of segments, with V-trace clipped importance ratios.

        n_t = 1 - terminated_t          k_t = 1 - (terminated_t or truncated_t)
        rho_t = min(ratio_t, rho_clip)  c_t = min(ratio_t, c_clip)
        v_{t+1} = next_value_t where truncated_t or t = T-1, else value_{t+1}
        delta_t = rho_t (reward_t + gamma n_t v_{t+1} - value_t)
        A_t = delta_t + gamma lam c_t k_t A_{t+1},   A_T = 0

    With all ratios 1 this is GAE exactly; with lam = 1 too it is return minus value.

    Args:
        value: (N, T) float32 (float64 on `reference`); V(obs_t), the latest known.
        next_value: (N, T), like `value`; V of the true next observation. Read only where an episode was truncated and
            at t = T-1, so other entries may hold anything finite.
        reward: (N, T), like `value`; the reward the action at t earned.
        terminated, truncated: (N, T) bool; both may be true, and then `terminated` decides the bootstrap.
        ratio: (N, T), like `value`; pi_new(a|s) / pi_old(a|s), >= 0.
        gamma, lam: in [0, 1].
        rho_clip, c_clip: > 0.
        backend: see `sharpwave.ops`; "auto" follows the device.

    Returns:
        (N, T), like `value`. Accumulated in the inputs' dtype, deterministic. NaN in gives NaN out, in that segment
        only.

    Raises:
        ValueError: shapes differ, or are not (N, T) with T >= 1.
        TypeError: a flag is not bool, or dtypes differ.

    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16; Espeholt et al. 2018 (arXiv 1802.01561), eq. 1.
    """
    _check(value, next_value, reward, terminated, truncated, ratio)
    return _op(value, next_value, reward, terminated, truncated, ratio, gamma, lam, rho_clip, c_clip, backend=backend)


def advantage_and_priority(
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    ratio: Tensor,
    *,
    gamma: float,
    lam: float,
    alpha: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    valid: Tensor | None = None,
    rows: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Advantages of segments, and how much each segment matters; in one launch on a GPU.

        A = puff_advantage(...), then 0 where a step is not valid;     w_i = (sum_t |A_it|)^alpha

    Args:
        alpha: in [0, 1]; 0 makes every finite w 1.
        valid: (N, T) bool, or None where every step is.
        rows: (M,) int64, in [0, N): the segments that are computed, to the bits that all at once give on `triton` (w to
            rounding on a CPU); None for all. It needs `out`, where the others stay as they are. A row may be there
            twice.
        out: A and w, contiguous, to write into and return.
        The rest: as in `puff_advantage`.

    Returns:
        A (N, T), and w (N,): NaN where a segment's sum is not finite, whatever alpha. No gradient.

    Raises: as `puff_advantage`; ValueError where `out` is missing or does not fit, TypeError where `rows` is not int64.
    """
    _check(value, next_value, reward, terminated, truncated, ratio)
    if rows is not None and rows.dtype != torch.int64:
        raise TypeError(f"rows must be int64; got {rows.dtype}")
    if out is None:
        if rows is not None:
            raise ValueError("rows needs out, which holds the other segments' advantages and priorities")
        out = value.new_empty(value.shape), value.new_empty(value.shape[0])
    for got, shape in zip(out, (value.shape, value.shape[:1]), strict=True):
        if got.shape != shape or got.dtype != value.dtype or not got.is_contiguous():
            raise ValueError(
                f"out must be contiguous {value.dtype} of shape {tuple(shape)}; got {got.dtype}, {tuple(got.shape)}"
            )
    inputs = (value, next_value, reward, terminated, truncated, ratio)
    if _backends.choose("advantage", value.device.type, backend) == "triton":
        impl = _backends.load("advantage", value.device, backend)
        impl.advantage_and_priority(*inputs, valid, gamma, lam, rho_clip, c_clip, alpha, rows, out)
        return out
    if rows is not None:
        inputs = [x.index_select(0, rows) for x in inputs]
        valid = None if valid is None else valid.index_select(0, rows)
    advantage = _kernel(*inputs, gamma, lam, rho_clip, c_clip, backend=backend)
    if valid is not None:
        advantage = torch.where(valid, advantage, 0)
    size = advantage.abs().sum(1)
    priority = torch.where(size.isfinite(), size.pow(alpha), torch.nan)
    for kept, fresh in zip(out, (advantage, priority), strict=True):
        kept.copy_(fresh) if rows is None else kept.index_copy_(0, rows, fresh)
    return out


def _check(
    value: Tensor, next_value: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, ratio: Tensor
) -> None:  # fmt: skip
    if value.ndim != 2 or value.shape[1] == 0:
        raise ValueError(f"value must be (N, T) with T >= 1; got shape {tuple(value.shape)}")
    for name, x in {"next_value": next_value, "reward": reward, "ratio": ratio}.items():
        if x.shape != value.shape:
            raise ValueError(f"{name} must have value's shape {tuple(value.shape)}; got {tuple(x.shape)}")
        if x.dtype != value.dtype:
            raise TypeError(f"{name} must have value's dtype {value.dtype}; got {x.dtype}")
    for name, x in {"terminated": terminated, "truncated": truncated}.items():
        if x.shape != value.shape:
            raise ValueError(f"{name} must have value's shape {tuple(value.shape)}; got {tuple(x.shape)}")
        if x.dtype != torch.bool:
            raise TypeError(f"{name} must be bool; got {x.dtype}: pass {name} > 0")
