"""Cumulative distributions: inclusive prefix sums of weights, and draws in proportion to the weights."""

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops._philox import as_signed


def _build(weights, out, serial, backend):
    impl = _backends.load("cdf", weights.device, backend)
    (impl.build_cdf_serial if serial else impl.build_cdf)(weights.contiguous(), out)


def _build_new(weights, serial, backend):
    out = torch.empty_like(weights, memory_format=torch.contiguous_format)
    _build(weights, out, serial, backend)
    return out


def _sample(cdf, n, seed, seed_tensor, offset, stratified, replacement, backend):
    impl = _backends.load("cdf", cdf.device, backend)
    key = seed if seed_tensor is None else seed_tensor
    return impl.sample_cdf(cdf.contiguous(), n, key, offset, stratified, replacement)


def _draw(weight, n, seed, seed_tensor, offset, beta, eps, backend):
    impl = _backends.load("cdf", weight.device, backend)
    return impl.draw_segments(weight.contiguous(), n, seed if seed_tensor is None else seed_tensor, offset, beta, eps)


def _draw_fake(weight, n, *_args):
    return (
        weight.new_empty(n, dtype=torch.int64),
        weight.new_empty(n),
        weight.new_empty((), dtype=torch.int64),
    )


_build_op = register(
    "build_cdf(Tensor weights, bool serial, str backend) -> Tensor",
    _build_new,
    lambda weights, *_: weights.new_empty(weights.shape),
)
_build_out_op = register(
    "build_cdf_out(Tensor weights, Tensor(a!) out, bool serial, str backend) -> ()", _build, lambda *_: None
)
_sample_op = register(
    "sample_cdf(Tensor cdf, int n, int seed, Tensor? seed_tensor, Tensor(a!) offset, bool stratified, "
    "bool replacement, str backend) -> Tensor",
    _sample,
    lambda cdf, n, *_: cdf.new_empty(n, dtype=torch.int64),
)
_draw_op = register(
    "draw_segments(Tensor weight, int n, int seed, Tensor? seed_tensor, Tensor(a!) offset, Tensor beta, float eps, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _draw,
    _draw_fake,
)


def build_cdf(weights: Tensor, out: Tensor | None = None, *, backend: _backends.Backend = "auto") -> Tensor:
    """Inclusive prefix sum of non-negative weights.

        cdf_i = w_0 + w_1 + ... + w_i

    Args:
        weights: (n,) float32, 1 <= n < 2^31, finite, >= 0; their sum below the largest float32 (it saturates there).
            float64 on `reference`.
        out: (n,), like `weights`, contiguous, `weights` itself or memory of its own; written and returned. Allocated if
            None.
        backend: "auto" follows the device.

    Returns:
        (n,), like `weights`. At most 2e-7 relative from the serial float64 sum at every element: a CPU rounds that sum
        once, a GPU adds four neighbours in float32 first. Never falls, and cdf_i = cdf_{i-1} exactly where w_i = 0, so
        that no draw can take such an i. The same bits on every run. Between backends they may differ in the last place.

    A negative, NaN or infinite weight raises on a CPU, and counts as 0 on a GPU, where raising would have to wait.
    There is no gradient: asking for it raises.

    On a GPU this is one pass: tiles publish their sums, and each reads those of the tiles before it (after Merrill and
    Garland 2016, "Single-pass parallel prefix scan with decoupled look-back"). Safe in a captured graph.

    Raises:
        ValueError: a wrong shape, an invalid weight (CPU).
        TypeError: a wrong dtype.
    """
    return _checked_build(weights, out, False, backend)


def build_cdf_serial(weights: Tensor, out: Tensor | None = None, *, backend: _backends.Backend = "auto") -> Tensor:
    """`build_cdf` by one thread, one weight after the other: slow, and what the parallel kernels are held to."""
    return _checked_build(weights, out, True, backend)


def sample_cdf(
    cdf: Tensor,
    n: int,
    seed: int | Tensor,
    offset: Tensor,
    *,
    stratified: bool = False,
    replacement: bool = True,
    backend: _backends.Backend = "auto",
) -> Tensor:
    """Draw n indices in proportion to the weights behind a CDF.

        u_k in [0, 1), of 53 bits             (stratified: u_k replaced by (k + u_k) / n)
        i_k = the first i with cdf_i > u_k cdf_{last}

    Args:
        cdf: (m,) float32, as `build_cdf` returns it: not falling, which is not checked.
        n: how many, >= 1; at most m without replacement.
        seed: the stream's key, an int or a 0-d int64 tensor (on cdf's device, read when the kernel runs, so a replayed
            graph can be reseeded).
        offset: int64 tensor of one element on cdf's device, in [0, 2^48): the number of the next draw. It is advanced
            by the draws taken (n; m without replacement), on the device, so a replayed graph draws anew. Out of range
            raises on a CPU; a GPU does not look.
        stratified: one draw in each n-th of the total instead of independent draws; indices come out sorted.
        replacement: False draws distinct indices, in the order of successive draws without replacement (exponential
            clocks of rate w_i, Efraimidis and Spirakis 2006); not together with `stratified`.

    Returns:
        (n,) int64. An index of weight 0 is never drawn, at any u. With replacement the same on every backend, given the
        same cdf, seed and offset; successive calls continue one stream, so draws of n and m equal a draw of n + m.

    A zero total raises on a CPU; on a GPU every index is then 0. Without replacement and with fewer than n positive
    weights a CPU raises; a GPU repeats the first index.

    Raises:
        ValueError: n, shapes or options out of range; a zero total (CPU).
        TypeError: a wrong dtype.
    """
    if cdf.ndim != 1 or cdf.numel() == 0:
        raise ValueError(f"cdf must be (m,) with m >= 1; got shape {tuple(cdf.shape)}")
    if cdf.dtype != torch.float32:
        raise TypeError(f"cdf must be float32; got {cdf.dtype}")
    n = _backends.integer("n", n, 1)
    if not replacement and n > cdf.numel():
        raise ValueError(f"n must be at most {cdf.numel()}, the cdf's length, when replacement=False; got {n}")
    if stratified and not replacement:
        raise ValueError("stratified=True draws with replacement; set replacement=True or stratified=False")
    seed, seed_tensor = split_seed(seed, cdf.device)
    check_offset(offset, cdf.device)
    return _sample_op(cdf, n, seed, seed_tensor, offset, stratified, replacement, backend)


def draw_segments(
    weight: Tensor,
    n: int,
    seed: int | Tensor,
    offset: Tensor,
    beta: Tensor,
    *,
    eps: float = 1e-6,
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Prioritized draw of segments with their importance weights: sanitise, normalise, CDF, draw, weigh, in one launch.

        w'_i = w_i if finite and >= 0, else 0;     P_i = (w'_i + eps) / sum_j (w'_j + eps)
        i_k ~ P;                                   importance_k = (N P_{i_k})^-beta

    Args:
        weight: (N,) float32, raw priorities already raised to alpha; 1 <= N < 2^31.
        n: how many, with replacement, >= 1.
        seed, offset: the random stream, as in `sample_cdf`; offset advances by n.
        beta: 0-d float32 tensor on weight's device: a schedule changes it without a new capture. A NaN raises on a
            CPU; on a GPU, where that would have to wait, importance is then NaN.
        eps: in [0, 1e30], added to every weight. All weights equal, or all 0 with eps > 0, is the uniform draw.

    Returns:
        indices (n,) int64; importance (n,) float32; the number of invalid weights, 0-d int64. The draw is exact:
        weights count in units of 2^-(52 - ceil(log2 N)) of the power of two above the largest (52 is 62 for N > 2^14),
        their sums are integers, and 64 random bits choose among them; so indices are the same on every backend and run.
        A positive weight is never lost: it counts one unit more than that.

    If eps = 0 and all weights are 0: raises on a CPU; on a GPU every index and importance is 0. Nothing is
    differentiable. A GPU takes one launch up to N = 16384, and the launches of the PyTorch reference above.

    Raises:
        ValueError: a wrong shape, n or eps; a beta of NaN, or nothing to draw from (CPU).
        TypeError: a wrong dtype.

    Source: Schaul et al. 2016 (arXiv 1511.05952), section 3.4.
    """
    _backends.require_tensors(weight=weight, beta=beta)
    if weight.ndim != 1 or weight.numel() == 0:
        raise ValueError(f"weight must be (N,) with N >= 1; got shape {tuple(weight.shape)}")
    if weight.dtype != torch.float32:
        raise TypeError(f"weight must be float32; got {weight.dtype}")
    n = _backends.integer("n", n, 1)
    if not 0 <= eps <= 1e30:  # which the largest float32 and this add up to the largest float32
        raise ValueError(f"eps must be in [0, 1e30]; got {eps}")
    if beta.numel() != 1 or beta.dtype != torch.float32 or beta.device != weight.device:
        raise ValueError(
            f"beta must be a float32 tensor of one element on {weight.device}; got {tuple(beta.shape)} {beta.dtype} on "
            f"{beta.device}"
        )
    seed, seed_tensor = split_seed(seed, weight.device)
    check_offset(offset, weight.device)
    return _draw_op(weight.detach(), n, seed, seed_tensor, offset, beta.detach(), eps, backend)


def split_seed(seed: int | Tensor, device: torch.device) -> tuple[int, Tensor | None]:
    """A seed as the pair (int, tensor or None) that op schemas take; the tensor wins."""
    if not isinstance(seed, Tensor):
        return as_signed(seed), None
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
        raise ValueError(
            f"seed must be an int or an int64 tensor of one element on {device}; got {tuple(seed.shape)} {seed.dtype} "
            f"on {seed.device}"
        )
    return 0, seed


def check_offset(offset: Tensor, device: torch.device) -> None:
    _backends.require_tensors(offset=offset)
    if offset.numel() != 1 or offset.dtype != torch.int64 or offset.device != device:
        raise ValueError(
            f"offset must be an int64 tensor of one element on {device}; got {tuple(offset.shape)} {offset.dtype} on "
            f"{offset.device}"
        )
    # A device would have to be waited for, and what is traced has no value yet.
    known = offset.is_cpu and type(offset) is Tensor and not torch.compiler.is_compiling()
    if known and not 0 <= offset.item() < 2**48:
        raise ValueError(f"offset must be in [0, 2^48), the number of the next draw; got {offset.item()}")


def _checked_build(weights: Tensor, out: Tensor | None, serial: bool, backend: str) -> Tensor:
    _backends.require_tensors(weights=weights)
    if weights.ndim != 1 or not 0 < weights.numel() < 2**31:
        raise ValueError(f"weights must be (n,) with 1 <= n < 2^31; got shape {tuple(weights.shape)}")
    if weights.dtype != torch.float32 and not (weights.dtype == torch.float64 and backend == "reference"):
        raise TypeError(f"weights must be float32 (or float64 with backend='reference'); got {weights.dtype}")
    if out is None:
        return _build_op(weights, serial, backend)
    if out.shape != weights.shape or out.dtype != weights.dtype or out.device != weights.device:
        raise ValueError(
            f"out must be like weights, {tuple(weights.shape)} {weights.dtype} on {weights.device}; got "
            f"{tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous; got strides {out.stride()}")
    if out.requires_grad:
        raise ValueError("out must not require a gradient, which prefix sums lack: pass out.detach()")
    _backends.require_apart(out, weights=weights)
    _build_out_op(weights, out, serial, backend)
    return out
