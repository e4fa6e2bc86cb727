"""The MinGRU network: a projection and a scan a layer."""

import math
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpwave.nn.linear import autocast, weight_gradient
from sharpwave.ops._backends import BACKENDS, Backend
from sharpwave.ops._library import first_order
from sharpwave.ops.linear import linear
from sharpwave.ops.mingru import Backward, mingru_layer, mingru_step


class MinGRU(nn.Module):
    """Layers of `sharpwave.ops.mingru.mingru_layer`, each fed the output of the one before.

    `forward` takes whole segments, `step` one time step; T steps give what one forward gives, to rounding. Each layer
    owns one weight (3H, H), rows in the order hidden, gate, proj, drawn from U(-1/sqrt(H), 1/sqrt(H)) as
    `torch.nn.Linear` draws it; no bias. Under autocast the projections run in its dtype, and the scan and its output
    with them; the state stays float32. Float64 it leaves alone. First-order gradients only: `create_graph=True` raises.

    Args:
        hidden: H, the width of input, state and output, which are all of one width: put a `torch.nn.Linear` before it
            where the input's is another.
        layers: at least 1.
        backward, backend: as `sharpwave.ops.mingru.mingru_scan` takes them.
        device, dtype: of the weights; inputs are of that dtype, or of autocast's.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> net = MinGRU(hidden=8, layers=2)
        >>> y, state = net(torch.randn(4, 16, 8))
        >>> y_t, state = net.step(torch.randn(4, 8), state)

    Source: Feng et al. 2024 (arXiv 2410.01201); the highway output is PufferLib 4.0's.
    """

    def __init__(
        self,
        hidden: int,
        layers: int = 1,
        *,
        backward: Backward = "tiled",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(hidden, int) or not isinstance(layers, int) or hidden < 1 or layers < 1:
            raise ValueError(f"hidden and layers must be integers >= 1; got hidden={hidden}, layers={layers}")
        if backward not in get_args(Backward):
            raise ValueError(f"backward must be one of {', '.join(get_args(Backward))}; got {backward!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
        self.hidden = hidden
        self.layers = layers
        self.backward = backward
        self.backend: Backend = backend
        self.rounded: list[Tensor] | None = None
        """Copies of the weights in the dtype to compute in, which whoever sets them keeps up to date; no state."""
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(3 * hidden, hidden, device=device, dtype=dtype)) for _ in range(layers)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every weight anew."""
        bound = 1 / math.sqrt(self.hidden)
        for weight in self.weights:
            nn.init.uniform_(weight, -bound, bound)

    def initial_state(self, batch: int, device: torch.device | str | None = None) -> Tensor:
        """Zeros (layers, batch, H), float32 (float64 for float64 weights), on `device` or the weights' own."""
        weight = self.weights[0]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros(self.layers, batch, self.hidden, device=device or weight.device, dtype=dtype)

    def forward(self, x: Tensor, state: Tensor | None = None, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A segment.

        Args:
            x: (B, T, H).
            state: (layers, B, H), as `initial_state` and this return it; None for zeros.
            reset: (B, T) bool; true where step t is the first of an episode.

        Returns:
            y (B, T, H), and the state (layers, B, H) after the last step.

        Raises:
            ValueError, TypeError: as `mingru_scan`; also where `state` has another number of layers.
        """
        x, carried = self.layers_forward(x, self._states(state, x), reset)
        return x, torch.stack(carried)

    def layers_forward(self, x: Tensor, states: Tensor, reset: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """`forward` with the layers' states apart, for callers that do not want them."""
        carried = []
        if self.rounded is not None:
            x = x.to(self.rounded[0].dtype)
            for i, (weight, rounded, state) in enumerate(zip(self.weights, self.rounded, states, strict=True)):
                # Before a layer's projection comes the scan of the one below, which writes no weight.
                choices = i > 0, self.backward, self.backend
                x, next_state = _RoundedLayer.apply(x, weight, rounded, state, reset, *choices)
                carried.append(next_state)
            return x, carried
        weights = list(self.weights)  # which Dynamo of PyTorch 2.11 does not unpack by *
        x, *weights = autocast(x, *weights)  # a custom op casts nothing by itself
        for weight, layer_state in zip(weights, states, strict=True):
            x, next_state = mingru_layer(x, weight, layer_state, reset, backward=self.backward, backend=self.backend)
            carried.append(next_state)
        return x, carried

    def step(
        self, x: Tensor, state: Tensor | None = None, reset: Tensor | None = None, out_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One time step: x (B, H), state (layers, B, H) or None, reset (B,) bool -> y (B, H), next state.

        Where no gradient is taken, the next state is written to `out_state` if given, which may be `state` itself.
        """
        states = self._states(state, x)
        if out_state is None and not torch.is_grad_enabled():
            out_state = states.new_empty(states.shape)
        elif out_state is not None and out_state.shape != states.shape:
            raise ValueError(
                f"out_state must be (layers, B, H) = {tuple(states.shape)}; got shape {tuple(out_state.shape)}"
            )
        written = [None] * self.layers if out_state is None else out_state
        carried = []
        for weight, layer_state, out in zip(self.rounded or self.weights, states, written, strict=True):
            x = x.to(weight.dtype) if self.rounded is not None else x
            combined = F.linear(x, weight)
            x = x.to(combined.dtype)
            x, next_state = mingru_step(combined, layer_state, x, reset, out_state=out, backend=self.backend)
            carried.append(next_state)
        return x, torch.stack(carried) if out_state is None else out_state

    def _states(self, state: Tensor | None, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.hidden,):
            raise ValueError(f"x must end in H = {self.hidden} channels; got shape {tuple(x.shape)}")
        if state is None:
            return self.initial_state(x.shape[0], x.device)
        if state.ndim != 3 or state.shape[0] != self.layers:
            raise ValueError(
                f"state must be (layers, B, H) with layers = {self.layers}; got shape {tuple(state.shape)}"
            )
        return state

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, backward={self.backward!r}, backend={self.backend!r}"


class _RoundedLayer(torch.autograd.Function):
    """`mingru_layer` for a float32 weight and its copy: no operand is cast, and the weight's gradient may be taken
    beside the backward pass (`WeightGradients`)."""

    @staticmethod
    def forward(ctx: Any, x, weight, rounded, state, reset, settled, backward, backend):
        combined = linear(x, rounded, settled=settled)
        out, next_state, checkpoints = torch.ops.sharpwave.mingru_scan(
            combined, state, x, reset, True, backward, backend
        )
        ctx.save_for_backward(x, rounded, reset, checkpoints, combined)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.choices = weight, (backward, backend)
        return out, next_state

    @staticmethod
    @partial(first_order, "MinGRU")
    def backward(ctx: Any, dout, dnext_state):
        x, rounded, reset, checkpoints, combined = ctx.saved_tensors
        dout = torch.zeros_like(x) if dout is None else dout
        dcombined, dstate, dx = torch.ops.sharpwave.mingru_scan_backward(
            dout, dnext_state, combined, x, reset, checkpoints, *ctx.choices
        )
        flat = dcombined.flatten(0, 1)
        dweight = weight_gradient(ctx.weight, flat, x.flatten(0, 1))
        dx.view(-1, x.shape[2]).addmm_(flat, rounded)  # the two paths into x meet in the GEMM's own addition
        return dx, dweight, None, dstate, None, None, None, None
