"""The MinGRU recurrence and its gradient, step by step."""

import torch
from torch import Tensor

# The scan keeps the state it carries into every step t with t % CHECKPOINT = 0; the backward starts again from there.
CHECKPOINT = 8


def gates(combined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, c, the slope of c in hidden, and p = sigmoid(proj), from (..., 3H)."""
    hidden, gate, proj = combined.chunk(3, dim=-1)
    squashed = torch.sigmoid(hidden)
    c = torch.where(hidden >= 0, hidden + 0.5, squashed)
    slope = torch.where(hidden >= 0, torch.ones_like(hidden), squashed * (1 - squashed))
    return torch.sigmoid(gate), c, slope, torch.sigmoid(proj)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def mingru_scan(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, save: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """out, next_state and checkpoints; differentiable. The contract is `sharpwave.ops.mingru.mingru_scan`.

    Checkpoints (B, ceil(T / CHECKPOINT), H) are the carried states; without `save` there are none.
    """
    z, c, _, p = gates(combined.to(state.dtype))
    wide_x = x.to(state.dtype)
    h = state
    states, checkpoints = [], []
    for t in range(x.shape[1]):
        if save and t % CHECKPOINT == 0:
            checkpoints.append(h)
        if reset is not None:
            h = h.masked_fill(reset[:, t, None], 0)
        h = h + z[:, t] * (c[:, t] - h)
        states.append(h)
    out = wide_x + p * (torch.stack(states, dim=1) - wide_x)
    kept = torch.stack(checkpoints, dim=1) if save else state.new_empty(x.shape[0], 0, x.shape[2])
    return out.to(combined.dtype), h.clone(), kept


def mingru_step(
    combined: Tensor, state: Tensor, x: Tensor, reset: Tensor | None, out_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of the scan: (B, 3H), (B, H), (B, H), (B,) -> out, next_state."""
    flags = None if reset is None else reset[:, None]
    out, next_state, _ = mingru_scan(combined[:, None], state, x[:, None], flags)
    return out[:, 0], next_state if out_state is None else out_state.copy_(next_state)


def mingru_scan_backward(
    dout: Tensor,
    dnext_state: Tensor | None,
    combined: Tensor,
    x: Tensor,
    reset: Tensor | None,
    checkpoints: Tensor,
    backward: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dcombined, dstate, dx, by the formulas in the contract. One order serves every `backward`."""
    del backward
    wide = checkpoints.dtype
    z, c, slope, p = gates(combined.to(wide))
    g, wide_x = dout.to(wide), x.to(wide)
    h = checkpoints[:, 0]
    previous, states = [], []
    for t in range(x.shape[1]):
        h_tm1 = h if reset is None else h.masked_fill(reset[:, t, None], 0)
        h = h_tm1 + z[:, t] * (c[:, t] - h_tm1)
        previous.append(h_tm1)
        states.append(h)

    dproj = g * (torch.stack(states, dim=1) - wide_x) * p * (1 - p)
    dx = g * (1 - p)
    dh = torch.zeros_like(h) if dnext_state is None else dnext_state.to(wide)
    dhidden, dgate = torch.empty_like(g), torch.empty_like(g)
    for t in reversed(range(x.shape[1])):
        dh = dh + g[:, t] * p[:, t]
        dhidden[:, t] = dh * z[:, t] * slope[:, t]
        dgate[:, t] = dh * (c[:, t] - previous[t]) * z[:, t] * (1 - z[:, t])
        dh = dh * (1 - z[:, t])
        if reset is not None:
            dh = dh.masked_fill(reset[:, t, None], 0)
    dcombined = torch.cat([dhidden, dgate, dproj], dim=-1)
    return dcombined.to(combined.dtype), dh.clone(), dx.to(x.dtype).contiguous()
