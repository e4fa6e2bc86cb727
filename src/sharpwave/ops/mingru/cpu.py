"""The MinGRU scan for CPUs: rows and blocks of channels in parallel, serial in time, vectorised over channels."""

from collections.abc import Callable

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from sharpwave.ops.mingru.reference import CHECKPOINT

BLOCK = 128  # channels a task; a chunk's scratch (4 x CHECKPOINT x BLOCK floats) then stays in the L2 cache
SMALL = 1 << 15  # below this many elements waking the threads costs more than it saves

F = np.float32
ZERO, HALF, ONE = F(0), F(0.5), F(1)
LIMIT, LOG2E, MAGIC = F(87), F(1.4426950408889634), F(12582912)  # MAGIC: 1.5 x 2^23 rounds to an integer by adding
LN2_HI, LN2_LO = F(-0.693359375), F(2.12194440e-4)  # -ln 2 in two parts (Cephes)
C6, C5, C4, C3, C2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3), F(4.1665795894e-2), F(1.6666665459e-1)


def _fma_ir(_typing, a, b, c):
    """a * b + c, rounded once: contraction is written, never left to the compiler."""
    return types.float32(a, b, c), lambda _context, builder, _signature, args: builder.fma(*args)


def _pow2_ir(_typing, t):
    """2^n, where t = n + MAGIC: its low bits are n, and become the exponent field."""

    def generate(_context, builder, _signature, args):
        i32 = ir.IntType(32)
        bits = builder.shl(builder.bitcast(args[0], i32), ir.Constant(i32, 23))
        return builder.bitcast(builder.add(bits, ir.Constant(i32, 0x3F800000)), ir.FloatType())

    return types.float32(t), generate


_fma: Callable = intrinsic(_fma_ir)
_pow2: Callable = intrinsic(_pow2_ir)


@numba.njit(inline="always")
def _sigmoid(x):
    """Within 3 ulps where |x| <= 87, and sigmoid(+-87) beyond; a polynomial, so that loops over it vectorise."""
    x = min(max(-x, -LIMIT), LIMIT)
    t = _fma(x, LOG2E, MAGIC)
    n = t - MAGIC
    r = _fma(n, LN2_LO, _fma(n, LN2_HI, x))
    e = _fma(C6, r, C5)
    e = _fma(e, r, C4)
    e = _fma(e, r, C3)
    e = _fma(e, r, C2)
    e = _fma(e, r, HALF)
    e = _fma(e, r * r, r) + ONE
    return ONE / (ONE + e * _pow2(t))


@numba.njit(inline="always")
def _candidate(hidden):
    squashed = _sigmoid(hidden)
    return hidden + HALF if hidden >= ZERO else squashed


# error_model="numpy": a division that raises on 0 would keep loops from being vectorised.
# And each loop touches few arrays: LLVM vectorises none where it would have to tell many of them apart at run time.
@numba.njit(error_model="numpy")
def _advance(hidden, gate, proj, x, h, out):
    """One step of some channels, h in place."""
    for i in range(h.size):
        h[i] = _fma(_sigmoid(gate[i]), _candidate(hidden[i]) - h[i], h[i])
    for i in range(h.size):
        out[i] = _fma(_sigmoid(proj[i]), h[i] - x[i], x[i])


@numba.njit(error_model="numpy")
def _states(hidden, gate, h_tm1, z, c, h):
    """One step of the states, keeping z and c."""
    for i in range(hidden.size):
        z[i] = _sigmoid(gate[i])
    for i in range(hidden.size):
        c[i] = _candidate(hidden[i])
        h[i] = _fma(z[i], c[i] - h_tm1[i], h_tm1[i])


@numba.njit(error_model="numpy")
def _retreat(hidden, proj, x, g, z, c, h_tm1, h, p, dh, dhidden, dgate, dproj, dx):
    """One step of the gradient, dh in place; p is scratch."""
    for i in range(dh.size):
        p[i] = _sigmoid(proj[i])
    for i in range(dh.size):
        dproj[i] = g[i] * (h[i] - x[i]) * (p[i] * (ONE - p[i]))
    for i in range(dh.size):
        dx[i] = g[i] * (ONE - p[i])
        dh[i] = _fma(g[i], p[i], dh[i])
    for i in range(dh.size):
        dgate[i] = dh[i] * (c[i] - h_tm1[i]) * (z[i] * (ONE - z[i]))
    for i in range(dh.size):
        slope = c[i] * (ONE - c[i])
        dhidden[i] = dh[i] * z[i] * (ONE if hidden[i] >= ZERO else slope)
        dh[i] = dh[i] * (ONE - z[i])


@numba.njit(error_model="numpy")
def _scan_task(task, combined, state, x, reset, save, out, next_state, checkpoints):
    """All steps of one row's block of channels."""
    _, horizon, n = x.shape
    n_blocks = (n + BLOCK - 1) // BLOCK
    b, lo = task // n_blocks, task % n_blocks * BLOCK
    hi = min(lo + BLOCK, n)
    h = next_state[b, lo:hi]
    h[:] = state[b, lo:hi]
    for t in range(horizon):
        if save and t % CHECKPOINT == 0:
            checkpoints[b, t // CHECKPOINT, lo:hi] = h
        if reset.size > 0 and reset[b, t]:
            h[:] = ZERO
        row = combined[b, t]
        _advance(row[lo:hi], row[n + lo : n + hi], row[2 * n + lo : 2 * n + hi], x[b, t, lo:hi], h, out[b, t, lo:hi])


@numba.njit(error_model="numpy")
def _backward_task(task, dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx):
    _, horizon, n = x.shape
    n_blocks = (n + BLOCK - 1) // BLOCK
    b, lo = task // n_blocks, task % n_blocks * BLOCK
    hi = min(lo + BLOCK, n)
    # z, c and h of a chunk's steps; row s of states is the state carried into step s, before any reset.
    z, c = np.empty((CHECKPOINT, BLOCK), F), np.empty((CHECKPOINT, BLOCK), F)
    states = np.empty((CHECKPOINT + 1, BLOCK), F)
    p, zero_state = np.empty(BLOCK, F), np.zeros(BLOCK, F)
    dh = dstate[b, lo:hi]
    dh[:] = dnext_state[b, lo:hi]
    for back in range(checkpoints.shape[1]):
        chunk = checkpoints.shape[1] - 1 - back
        start = chunk * CHECKPOINT
        steps = min(CHECKPOINT, horizon - start)
        states[0, : hi - lo] = checkpoints[b, chunk, lo:hi]
        for s in range(steps):
            row = combined[b, start + s]
            h_tm1 = zero_state if reset.size > 0 and reset[b, start + s] else states[s]
            _states(row[lo:hi], row[n + lo : n + hi], h_tm1, z[s], c[s], states[s + 1])
        for s in range(steps - 1, -1, -1):
            t = start + s
            row, drow = combined[b, t], dcombined[b, t]
            cut = reset.size > 0 and reset[b, t]
            h_tm1 = zero_state if cut else states[s]
            _retreat(
                *(row[lo:hi], row[2 * n + lo : 2 * n + hi], x[b, t, lo:hi], dout[b, t, lo:hi]),
                *(z[s], c[s], h_tm1, states[s + 1], p, dh),
                *(drow[lo:hi], drow[n + lo : n + hi], drow[2 * n + lo : 2 * n + hi], dx[b, t, lo:hi]),
            )
            if cut:
                dh[:] = ZERO


@numba.njit(error_model="numpy")
def _tasks(x):
    return x.shape[0] * ((x.shape[2] + BLOCK - 1) // BLOCK)


@numba.njit(cache=True)
def _scan(combined, state, x, reset, save, out, next_state, checkpoints):
    for task in range(_tasks(x)):
        _scan_task(task, combined, state, x, reset, save, out, next_state, checkpoints)


@numba.njit(cache=True, parallel=True)
def _scan_parallel(combined, state, x, reset, save, out, next_state, checkpoints):
    for task in numba.prange(_tasks(x)):
        _scan_task(task, combined, state, x, reset, save, out, next_state, checkpoints)


@numba.njit(cache=True)
def _backward(dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx):
    for task in range(_tasks(x)):
        _backward_task(task, dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx)


@numba.njit(cache=True, parallel=True)
def _backward_parallel(dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx):
    for task in numba.prange(_tasks(x)):
        _backward_task(task, dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx)


@numba.njit(cache=True, error_model="numpy")
def _step(combined, state, x, reset, out, next_state):
    n_rows, n = x.shape
    for b in range(n_rows):
        h, row = next_state[b], combined[b]
        if reset.size > 0 and reset[b]:
            h[:] = ZERO
        else:
            h[:] = state[b]
        _advance(row[:n], row[n : 2 * n], row[2 * n :], x[b], h, out[b])


NO_RESET, NO_RESETS = np.empty((0, 0), np.bool_), np.empty(0, np.bool_)


def mingru_scan(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, save: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.mingru_scan`; 16-bit tensors are widened first, and the outputs rounded once."""
    b, horizon, h = x.shape
    out = torch.empty(b, horizon, h)
    next_state = torch.empty(b, h)
    checkpoints = torch.empty(b, (horizon + CHECKPOINT - 1) // CHECKPOINT if save else 0, h)
    run = _scan if x.numel() < SMALL else _scan_parallel
    run(
        *(_array(v) for v in (combined, state, x)),
        NO_RESET if reset is None else reset.contiguous().numpy(),
        save,
        *(v.numpy() for v in (out, next_state, checkpoints)),
    )
    return out.to(combined.dtype), next_state, checkpoints


def mingru_step(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, out_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same as `reference.mingru_step`."""
    if x.numel() >= SMALL:
        flags = None if reset is None else reset[:, None]
        out, next_state, _ = mingru_scan(combined[:, None], state, x[:, None], flags)
        return out[:, 0], next_state if out_state is None else out_state.copy_(next_state)
    out, next_state = torch.empty(x.shape), torch.empty(x.shape) if out_state is None else out_state
    _step(
        *(_array(v) for v in (combined, state, x)),
        NO_RESETS if reset is None else reset.contiguous().numpy(),
        *(out.numpy(), next_state.numpy()),
    )
    return (out if combined.dtype == torch.float32 else out.to(combined.dtype)), next_state


def mingru_scan_backward(
    dout: Tensor,
    dnext_state: Tensor | None,
    combined: Tensor,
    x: Tensor,
    reset: Tensor | None,
    checkpoints: Tensor,
    backward: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `reference.mingru_scan_backward`."""
    del backward
    b, horizon, h = x.shape
    dcombined, dstate, dx = torch.empty(b, horizon, 3 * h), torch.empty(b, h), torch.empty(b, horizon, h)
    if dnext_state is None:
        dnext_state = torch.zeros(b, h)
    run = _backward if x.numel() < SMALL else _backward_parallel
    run(
        *(_array(v) for v in (dout, dnext_state, combined, x)),
        NO_RESET if reset is None else reset.contiguous().numpy(),
        *(v.numpy() for v in (checkpoints, dcombined, dstate, dx)),
    )
    return dcombined.to(combined.dtype), dstate, dx.to(x.dtype)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.float64:
        raise TypeError("the cpu backend of mingru takes float32 and narrower; got float64: use backend='reference'")
    if tensor.requires_grad or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        tensor = tensor.detach().float().contiguous()
    return tensor.numpy()
