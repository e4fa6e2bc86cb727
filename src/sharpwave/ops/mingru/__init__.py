"""The MinGRU recurrence with a highway output: a scan over time, and one step of it."""

from typing import Literal, get_args

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register
from sharpwave.ops.mingru.reference import CHECKPOINT, accumulator

Backward = Literal["tiled", "serial", "fast"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _implementation(x, backend):
    if backend == "auto" and x.dtype == torch.float64:
        backend = "reference"
    return _backends.load("mingru", x.device, backend)


def _scan_kernel(combined, state, x, reset, save, backward, backend):
    del backward  # chooses the gradient's kernel; carried here for autograd alone
    return _implementation(x, backend).mingru_scan(combined, state, x, reset, save)


def _scan_fake(combined, state, x, reset, save, backward, backend):
    b, t, h = x.shape
    kept = (t + CHECKPOINT - 1) // CHECKPOINT if save else 0
    return x.new_empty(b, t, h), state.new_empty(b, h), state.new_empty(b, kept, h)


def _backward_kernel(dout, dnext_state, combined, x, reset, checkpoints, backward, backend):
    impl = _implementation(x, backend)
    return impl.mingru_scan_backward(dout, dnext_state, combined, x, reset, checkpoints, backward)


def _backward_fake(dout, dnext_state, combined, x, reset, checkpoints, backward, backend):
    b, t, h = x.shape
    return combined.new_empty(b, t, 3 * h), checkpoints.new_empty(b, h), x.new_empty(b, t, h)


def _setup_context(ctx, inputs, output):
    combined, _, x, reset, _, backward, backend = inputs
    checkpoints = output[2]
    ctx.mark_non_differentiable(checkpoints)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(combined, x, reset, checkpoints)
    ctx.choices = backward, backend


def _backward(ctx, dout, dnext_state, _dcheckpoints):
    combined, x, reset, checkpoints = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(x)
    dcombined, dstate, dx = _backward_op(dout, dnext_state, combined, x, reset, checkpoints, *ctx.choices)
    return dcombined, dstate, dx, None, None, None, None


_backward_op = register(
    "mingru_scan_backward(Tensor dout, Tensor? dnext_state, Tensor combined, Tensor x, Tensor? reset, "
    "Tensor checkpoints, str backward, str backend) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_scan_op = register(
    "mingru_scan(Tensor combined, Tensor state, Tensor x, Tensor? reset, bool save, str backward, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _scan_kernel,
    _scan_fake,
    _backward,
    _setup_context,
)


def _layer_kernel(x, weight, state, reset, save, backward, backend):
    combined = torch.nn.functional.linear(x, weight)
    return *_scan_kernel(combined, state, x, reset, save, backward, backend), combined


def _layer_fake(x, weight, state, reset, save, backward, backend):
    combined = x.new_empty(*x.shape[:2], weight.shape[0])
    return *_scan_fake(combined, state, x, reset, save, backward, backend), combined


def _layer_setup_context(ctx, inputs, output):
    x, weight, _, reset, _, backward, backend = inputs
    _, _, checkpoints, combined = output
    ctx.mark_non_differentiable(checkpoints, combined)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, reset, checkpoints, combined)
    ctx.choices = backward, backend


def _layer_backward(ctx, dout, dnext_state, _dcheckpoints, _dcombined):
    x, weight, reset, checkpoints, combined = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(x)
    dcombined, dstate, dx = _backward_op(dout, dnext_state, combined, x, reset, checkpoints, *ctx.choices)
    flat = dcombined.flatten(0, 1)
    dweight = flat.t() @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None
    if ctx.needs_input_grad[0]:  # the two paths into x meet in the GEMM's own addition
        dx.view(-1, x.shape[2]).addmm_(flat, weight)
    return dx, dweight, dstate, None, None, None, None


_layer_op = register(
    "mingru_layer(Tensor x, Tensor weight, Tensor state, Tensor? reset, bool save, str backward, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _layer_kernel,
    _layer_fake,
    _layer_backward,
    _layer_setup_context,
)


def mingru_scan(
    combined: Tensor,
    state: Tensor,
    x: Tensor,
    reset: Tensor | None = None,
    *,
    backward: Backward = "tiled",
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The MinGRU over T steps, with PufferLib's highway output.

        hidden, gate, proj = combined_t
        z_t = sigmoid(gate)        c_t = hidden + 1/2 where hidden >= 0, else sigmoid(hidden)
        h_t = h' + z_t (c_t - h'), h' = 0 where reset_t, else h_{t-1};   h_{-1} = state
        out_t = x_t + sigmoid(proj) (h_t - x_t)

    and, for the gradients g_t of out_t and dh_{T-1} of next_state, backwards in t,

        dh_t += g_t p_t                      dproj = g_t (h_t - x_t) p_t (1 - p_t),   dx_t = g_t (1 - p_t)
        dhidden = dh_t z_t dc_t/dhidden      dgate = dh_t (c_t - h') z_t (1 - z_t)
        dh_{t-1} = dh_t (1 - z_t), or 0 where reset_t

    Args:
        combined: (B, T, 3H), usually x @ W^T; float32, bfloat16 or float16 (float64 on `reference`, which
            "auto" takes for it). Any finite value.
        state: (B, H) float32 (float64 with float64 `combined`), whatever `combined` is: it is carried from call to
            call, and 8 bits would lose what many steps built up.
        x: (B, T, H), the layer's input, of `combined`'s dtype.
        reset: (B, T) bool; true where step t is the first of an episode. It cuts the gradient too, and what the
            state held before is never read there, NaN included.
        backward: the order of the gradient's sums on the `triton` backend. "serial" (one lane walks T) is the
            definition; "tiled" gives its very bits, faster. "fast" is "tiled" where rows and channels fill a GPU;
            where they do not, programs share T: each sums up its chunk as dh -> a dh + b, and those are composed. A
            product and a sum of float32 a chunk (32 at most) are then rounded otherwise: it is held to the bounds
            the other orders are held to against float64. The other backends have one order.
        backend: see `sharpwave.ops`; "auto" follows the device.

    Returns:
        out (B, T, H) of `combined`'s dtype, and next_state (B, H) of `state`'s dtype: h_{T-1}.

    Computed in `state`'s dtype and rounded once, when written. Deterministic. Rows and channels do not meet: NaN in
    one stays there. On one backend a scan of T steps, two scans of its parts and T calls of `mingru_step` carry the
    same states, bit for bit in float32. First-order gradients only: `create_graph=True` raises, and so do forward-mode
    derivatives. `torch.func.grad` and `jacrev` refuse every op registered with `torch.library` ("must override the
    setup_context"): take `torch.autograd.grad` instead.

    Raises:
        ValueError: shapes disagree, T is 0, `backward` or `backend` is unknown.
        TypeError: dtypes other than those above, or `reset` is not bool.
        RuntimeError: the backend asked for cannot serve the device.

    Source: Feng et al. 2024 (arXiv 2410.01201), section 3.1 and appendix B (the activation of `hidden`); the highway
    output is PufferLib 4.0's.
    """
    _check_order(x, backward)
    _check(combined, state, x, reset, x.shape[:2])
    save = torch.is_grad_enabled() and (combined.requires_grad or state.requires_grad or x.requires_grad)
    out, next_state, _ = _scan_op(combined, state, x, reset, save, backward, backend)
    return out, next_state


def mingru_layer(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
    *,
    backward: Backward = "tiled",
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """A layer: `mingru_scan(x @ weight^T, state, x, reset)`, the same numbers in fewer passes over memory.

    The gradient that reaches x past the scan is added within the projection's gradient GEMM, not after it.

    Args:
        x: (B, T, H). weight: (3H, H), rows in the order hidden, gate, proj, of x's dtype.
        state, reset, backward, backend: as for `mingru_scan`.

    Returns:
        out (B, T, H) and next_state (B, H). Determinism is that of the scan and of PyTorch's matrix products; errors
        and source are the scan's.
    """
    _check_order(x, backward)
    if weight.shape != (3 * x.shape[2], x.shape[2]):
        raise ValueError(f"weight must be (3H, H) = {(3 * x.shape[2], x.shape[2])}; got {tuple(weight.shape)}")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must have x's dtype {x.dtype}; got {weight.dtype}: pass weight.to(x.dtype)")
    _check(None, state, x, reset, x.shape[:2])
    save = torch.is_grad_enabled() and (weight.requires_grad or state.requires_grad or x.requires_grad)
    out, next_state, _, _ = _layer_op(x, weight, state, reset, save, backward, backend)
    return out, next_state


def mingru_step(
    combined: Tensor,
    state: Tensor,
    x: Tensor,
    reset: Tensor | None = None,
    *,
    out_state: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """One step of the MinGRU, for rollouts: `mingru_scan` with T = 1, bit for bit.

    Args:
        combined: (B, 3H). state: (B, H). x: (B, H). reset: (B,) bool. Dtypes as `mingru_scan` takes them.
        out_state: where next_state is written, contiguous, of `state`'s shape and dtype; `state` itself, or memory that
            no argument uses.
        backend: as for `mingru_scan`.

    Returns:
        out (B, H) of `combined`'s dtype, and next_state (B, H) of `state`'s dtype.

    Differentiable without `out_state`. Edge behaviour, errors and source: `mingru_scan`.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be (B, H); got shape {tuple(x.shape)}")
    _check(combined, state, x, reset, x.shape[:1])
    needs_grad = torch.is_grad_enabled() and (combined.requires_grad or state.requires_grad or x.requires_grad)
    if out_state is not None:
        if needs_grad:
            raise ValueError("out_state has no gradient: leave it out, or call under torch.no_grad()")
        if out_state.shape != state.shape or out_state.dtype != state.dtype or not out_state.is_contiguous():
            raise ValueError(
                f"out_state must be contiguous {state.dtype} of shape {tuple(state.shape)}; got {out_state.dtype}, "
                f"{tuple(out_state.shape)}, strides {out_state.stride()}"
            )
        # By their beginnings alone: more would cost as much as the step.
        if not torch.compiler.is_compiling() and out_state.data_ptr() in (x.data_ptr(), combined.data_ptr()):
            raise ValueError("out_state shares memory with x or combined: give it memory of its own, or state's")
    if needs_grad or torch.compiler.is_compiling():
        flags = None if reset is None else reset[:, None]
        out, last, _ = _scan_op(combined[:, None], state, x[:, None], flags, needs_grad, "tiled", backend)
        return out[:, 0], last if out_state is None else out_state.copy_(last)
    # A rollout calls this once a layer and step; at 64 x 128 the dispatcher would cost as much as the arithmetic.
    return _implementation(x, backend).mingru_step(combined, state, x, reset, out_state)


def _check_order(x: Tensor, backward: str) -> None:
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"x must be (B, T, H) with T >= 1; got shape {tuple(x.shape)}")
    if backward not in get_args(Backward):
        raise ValueError(f"backward must be one of {', '.join(get_args(Backward))}; got {backward!r}")


def _check(combined: Tensor | None, state: Tensor, x: Tensor, reset: Tensor | None, lead: tuple[int, ...]) -> None:
    """`lead` is (B, T) for a scan, (B,) for a step."""
    b, h = x.shape[0], x.shape[-1]
    if combined is not None:
        if combined.shape != (*lead, 3 * h):
            raise ValueError(f"combined must be {(*lead, 3 * h)}, 3 H channels beside x; got {tuple(combined.shape)}")
        if combined.dtype != x.dtype:
            raise TypeError(f"x must have combined's dtype {combined.dtype}; got {x.dtype}: cast one of them")
    if x.dtype not in STORAGE:
        raise TypeError(f"x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    if state.shape != (b, h):
        raise ValueError(f"state must be (B, H) = {(b, h)}; got {tuple(state.shape)}")
    wide = accumulator(x.dtype)
    if state.dtype != wide:
        raise TypeError(f"state must be {wide} where x is {x.dtype}; got {state.dtype}")
    if reset is not None:
        if reset.shape != lead:
            raise ValueError(f"reset must be {tuple(lead)}; got {tuple(reset.shape)}")
        if reset.dtype != torch.bool:
            raise TypeError(f"reset must be bool; got {reset.dtype}: pass reset > 0")
    for name, given in (("combined", combined), ("state", state), ("reset", reset)):
        if given is not None and given.device != x.device:
            raise ValueError(f"{name} must be on x's device, {x.device}; got {given.device}: move it with .to()")
