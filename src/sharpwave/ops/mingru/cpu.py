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


def _scan_body(combined, state, x, reset, save, out, next_state, checkpoints):
    n_rows, horizon, n_channels = x.shape
    n_blocks = (n_channels + BLOCK - 1) // BLOCK
    resets = reset.size > 0
    for task in numba.prange(n_rows * n_blocks):
        b, lo = task // n_blocks, task % n_blocks * BLOCK
        width = min(BLOCK, n_channels - lo)
        h = next_state[b, lo : lo + width]
        z, p = np.empty(BLOCK, F), np.empty(BLOCK, F)
        h[:] = state[b, lo : lo + width]
        for t in range(horizon):
            if save and t % CHECKPOINT == 0:
                checkpoints[b, t // CHECKPOINT, lo : lo + width] = h
            if resets and reset[b, t]:
                h[:] = ZERO
            hidden = combined[b, t, lo : lo + width]
            gate = combined[b, t, n_channels + lo : n_channels + lo + width]
            proj = combined[b, t, 2 * n_channels + lo : 2 * n_channels + lo + width]
            x_t, out_t = x[b, t, lo : lo + width], out[b, t, lo : lo + width]
            # Short loops over few arrays each: LLVM vectorises none where it would have to tell many apart at run time.
            for i in range(width):
                z[i] = _sigmoid(gate[i])
            for i in range(width):
                p[i] = _sigmoid(proj[i])
            for i in range(width):
                h[i] = _fma(z[i], _candidate(hidden[i]) - h[i], h[i])
            for i in range(width):
                out_t[i] = _fma(p[i], h[i] - x_t[i], x_t[i])


def _backward_body(dout, dnext_state, combined, x, reset, checkpoints, dcombined, dstate, dx):
    n_rows, horizon, n_channels = x.shape
    n_blocks = (n_channels + BLOCK - 1) // BLOCK
    resets = reset.size > 0
    for task in numba.prange(n_rows * n_blocks):
        b, lo = task // n_blocks, task % n_blocks * BLOCK
        width = min(BLOCK, n_channels - lo)
        # z, c and h of the chunk's steps; row s of states is the state carried into step s, before any reset.
        zs, cs = np.empty((CHECKPOINT, BLOCK), F), np.empty((CHECKPOINT, BLOCK), F)
        states = np.empty((CHECKPOINT + 1, BLOCK), F)
        p, zero_state = np.empty(BLOCK, F), np.zeros(BLOCK, F)
        dh = dstate[b, lo : lo + width]
        dh[:] = dnext_state[b, lo : lo + width]
        for back in range(checkpoints.shape[1]):
            chunk = checkpoints.shape[1] - 1 - back
            start = chunk * CHECKPOINT
            steps = min(CHECKPOINT, horizon - start)
            states[0, :width] = checkpoints[b, chunk, lo : lo + width]
            for s in range(steps):
                hidden = combined[b, start + s, lo : lo + width]
                gate = combined[b, start + s, n_channels + lo : n_channels + lo + width]
                z, c, h_t = zs[s], cs[s], states[s + 1]
                h = zero_state if resets and reset[b, start + s] else states[s]
                for i in range(width):
                    z[i] = _sigmoid(gate[i])
                for i in range(width):
                    c[i] = _candidate(hidden[i])
                for i in range(width):
                    h_t[i] = _fma(z[i], c[i] - h[i], h[i])
            for s in range(steps - 1, -1, -1):
                t = start + s
                hidden = combined[b, t, lo : lo + width]
                proj = combined[b, t, 2 * n_channels + lo : 2 * n_channels + lo + width]
                g, x_t = dout[b, t, lo : lo + width], x[b, t, lo : lo + width]
                dhidden = dcombined[b, t, lo : lo + width]
                dgate = dcombined[b, t, n_channels + lo : n_channels + lo + width]
                dproj = dcombined[b, t, 2 * n_channels + lo : 2 * n_channels + lo + width]
                dx_t = dx[b, t, lo : lo + width]
                z, c, h_t = zs[s], cs[s], states[s + 1]
                h = zero_state if resets and reset[b, t] else states[s]
                for i in range(width):
                    p[i] = _sigmoid(proj[i])
                for i in range(width):
                    dproj[i] = g[i] * (h_t[i] - x_t[i]) * (p[i] * (ONE - p[i]))
                for i in range(width):
                    dx_t[i] = g[i] * (ONE - p[i])
                for i in range(width):
                    dh[i] = _fma(g[i], p[i], dh[i])
                for i in range(width):
                    dgate[i] = dh[i] * (c[i] - h[i]) * (z[i] * (ONE - z[i]))
                for i in range(width):
                    slope = c[i] * (ONE - c[i])
                    dhidden[i] = dh[i] * z[i] * (ONE if hidden[i] >= ZERO else slope)
                for i in range(width):
                    dh[i] = dh[i] * (ONE - z[i])
                if resets and reset[b, t]:
                    dh[:] = ZERO


# error_model="numpy": a division that raises on 0 would keep the loops from being vectorised.
_scan = numba.njit(cache=True, error_model="numpy")(_scan_body)
_scan_parallel = numba.njit(cache=True, error_model="numpy", parallel=True)(_scan_body)
_scan_backward = numba.njit(cache=True, error_model="numpy")(_backward_body)
_scan_backward_parallel = numba.njit(cache=True, error_model="numpy", parallel=True)(_backward_body)
NO_RESET = np.empty((0, 0), np.bool_)


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


def mingru_step(combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `reference.mingru_step`."""
    flags = None if reset is None else reset[:, None]
    out, next_state, _ = mingru_scan(combined[:, None], state, x[:, None], flags)
    return out[:, 0], next_state


def mingru_scan_backward(
    dout: Tensor,
    dnext_state: Tensor,
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
    run = _scan_backward if x.numel() < SMALL else _scan_backward_parallel
    run(
        *(_array(v) for v in (dout, dnext_state, combined, x)),
        NO_RESET if reset is None else reset.contiguous().numpy(),
        *(v.numpy() for v in (checkpoints, dcombined, dstate, dx)),
    )
    return dcombined.to(combined.dtype), dstate, dx.to(x.dtype)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.float64:
        raise TypeError("the cpu backend of mingru takes float32 and narrower; got float64: use backend='reference'")
    return tensor.detach().contiguous().float().numpy()
