"""The recurrent actor-critic."""

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sharpwave.envs.base import Continuous, Discrete, Observation
from sharpwave.nn.actions import CategoricalActions, GaussianActions, Sample, action_distribution
from sharpwave.nn.encoders import EncoderKind, make_encoder
from sharpwave.nn.linear import (
    ALIGNMENT,
    AlignedLinear,
    WeightGradients,
    linear_float32,
    rounded_copy,
    weight_gradient,
)
from sharpwave.nn.mingru import MinGRU
from sharpwave.nn.normalize import ObservationNormalizer
from sharpwave.ops.gather import gather_rows, padded
from sharpwave.ops.ppo_loss import PPOGradient

if TYPE_CHECKING:
    from sharpwave.run.graphs import Branch


class PolicyOutput(NamedTuple):
    """What the network says about observations."""

    params: Tensor
    """(..., width): logits of the heads side by side, or the Gaussian's mean."""
    value: Tensor
    """(...): V, float32."""
    state: Tensor
    """(layers, B, H): the recurrent state after the last step read."""


class Policy(nn.Module):
    """Encoder, MinGRU layers, and one linear decoder to the action's parameters and the value.

    `forward` reads segments, `step` one time step of a rollout; with equal weights they agree to rounding.

    Args:
        observation, action: the environment's spaces.
        hidden: H.
        layers: number of MinGRU layers; 0 makes a policy without memory (its state is (0, B, H)).
        encoder: see `make_encoder`.
        normalize_obs: put an `ObservationNormalizer`, to be updated by the trainer, before the encoder. Its statistics
            are part of the `state_dict`.
    """

    def __init__(
        self,
        observation: Observation,
        action: Discrete | Continuous,
        hidden: int = 128,
        layers: int = 2,
        encoder: EncoderKind = "linear",
        normalize_obs: bool = False,
    ):
        super().__init__()
        self.hidden = hidden
        self.layers = layers
        self.actions = action_distribution(action)
        self.encoder_kind = encoder
        self.normalizer = ObservationNormalizer(observation.shape) if normalize_obs else None
        self.encoder = make_encoder(encoder, observation, hidden)
        self.recurrent = MinGRU(hidden, layers) if layers else None
        self.decoder = nn.Linear(hidden, self.actions.width + 1, bias=False)
        # A small gain for the action's rows makes the first policy near uniform; the value's row starts at gain 1.
        bound = math.sqrt(3 / hidden)
        nn.init.uniform_(self.decoder.weight, -bound, bound)
        with torch.no_grad():
            self.decoder.weight[:-1] *= 0.01
        self._decoder_rounded: Tensor | None = None
        self.log_std = nn.Parameter(torch.zeros(action.dim)) if isinstance(action, Continuous) else None

    def kept(self, observation: Observation, device: torch.device, dtype: torch.dtype) -> Observation:
        """What to keep of observations that are read again and again in `dtype`: themselves, or what is read of them.

        On a GPU the encoder reads flat rows of bfloat16, padded with zeros: float32 rounded once gives the same bits in
        half the memory.
        """
        if (
            device.type != "cuda"
            or not self._reads_flat
            or (observation.dtype, dtype) != (torch.float32, torch.bfloat16)
        ):
            return observation
        return Observation((padded(observation.size, ALIGNMENT),), dtype)

    def gather(self, obs: Tensor, index: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Rows `index` of (N, T, *observation.shape) as `forward` reads them best: in one pass, on a GPU in `dtype`."""
        if not self._reads_aligned(obs):
            return torch.index_select(obs, 0, index, out=out)
        return gather_rows(obs.flatten(2), index, dtype=dtype, multiple=ALIGNMENT, out=out)

    def keep_rounded(self, dtype: torch.dtype) -> dict[Tensor, Tensor]:
        """Compute from copies of the matrices in `dtype`, so that no step casts a weight; the copy of each.

        Whoever changes the weights writes the copies too, as `sharpwave.optim.Muon(copies=...)` does; `load_state_dict`
        does so by itself. Convolutions keep none.
        """
        copies: dict[Tensor, Tensor] = {}
        for module in self.modules():
            if isinstance(module, AlignedLinear):
                module.rounded = copies[module.weight] = rounded_copy(module.weight, dtype)
        if self.recurrent is not None:
            self.recurrent.rounded = [weight.detach().to(dtype) for weight in self.recurrent.weights]
            copies |= dict(zip(self.recurrent.weights, self.recurrent.rounded, strict=True))
        self._decoder_rounded = copies[self.decoder.weight] = rounded_copy(self.decoder.weight, dtype)

        def refresh(*_args) -> None:
            for weight, copy in copies.items():
                copy[: weight.shape[0], : weight.shape[1]].copy_(weight.detach())

        self.register_load_state_dict_post_hook(refresh)
        return copies

    def initial_state(self, batch: int) -> Tensor:
        """(layers, batch, H) zeros on the weights' device."""
        return torch.zeros(self.layers, batch, self.hidden, device=self.decoder.weight.device)

    def forward(self, obs: Tensor, state: Tensor, reset: Tensor | None = None) -> PolicyOutput:
        """Read segments.

        Args:
            obs: (B, T, *observation.shape). state: (layers, B, H), before each segment's first step.
            reset: (B, T) bool, true where obs is the first of an episode: the state is taken as 0 there.
        """
        x = self._encode_segments(obs)
        if self.recurrent is not None:
            x, state = self.recurrent(x, state, reset)
        return self._decode(x, state)

    def features(self, obs: Tensor, state: Tensor, reset: Tensor | None = None) -> Tensor:
        """(B, T, H), what the decoder reads: `forward` without it, for `loss` and `backward`."""
        x = self._encode_segments(obs)
        return x if self.recurrent is None else self.recurrent.layers_forward(x, state, reset)[0]

    @torch.no_grad()
    def loss(self, features: Tensor, mask: Tensor | None, *rows: Tensor, **options) -> PPOGradient:
        """The PPO loss of what `features` say, and its gradient in the dtype of `features`, for `backward`.

        Args:
            features: from `features`. mask: (B T, width) bool or None.
            rows, options: as of `ppo_gradient_categorical` and `ppo_gradient_gaussian`; (B T, ...).
        """
        flat, rounded = features.detach().flatten(0, 1), self._decoder_rounded
        if isinstance(self.actions, CategoricalActions) and rounded is not None and rounded.dtype == flat.dtype:
            return self.actions.gradient_decoded(flat, rounded, mask, *rows, **options)
        output = linear_float32(flat, self.decoder.weight, rounded)
        return self.actions.gradient(output, self.log_std, mask, *rows, dtype=features.dtype, **options)

    @torch.no_grad()
    def backward(self, features: Tensor, gradient: PPOGradient, beside: "Branch | None" = None) -> None:
        """Set the gradients of all weights, from that of `loss`.

        On `beside`, a `Branch`, the matrices that have rounded copies take theirs, while the chain goes on.
        """
        x, dy, dx = features.detach().flatten(0, 1), gradient.d_output, gradient.d_features
        with nullcontext() if beside is None else WeightGradients(beside):
            grad = weight_gradient(self.decoder.weight, dy, x)
            if grad is not None:
                self.decoder.weight.grad = grad
            if dx is None:
                # The copy is padded as `loss` padded its result, or not at all.
                weight = self.decoder.weight if self._decoder_rounded is None else self._decoder_rounded
                dx = torch.mm(dy, weight.to(dy.dtype)[: dy.shape[1]])
            features.backward(dx.view_as(features))
        if self.log_std is not None:
            self.log_std.grad = gradient.d_log_std

    def step(
        self, obs: Tensor, state: Tensor, reset: Tensor | None = None, out_state: Tensor | None = None
    ) -> PolicyOutput:
        """Read one step: obs (B, *observation.shape), whose rows may lie apart, state (layers, B, H), reset (B,) bool.

        Where no gradient is taken, the next state is written to `out_state` if given, which may be `state` itself.
        """
        x = self._encode(self._aligned(obs))
        if self.recurrent is not None:
            x, state = self.recurrent.step(x, state, reset, out_state)
        return self._decode(x, state)

    def sample(
        self,
        params: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Sample:
        """Actions and their log-probabilities from a step's `params`."""
        if isinstance(self.actions, GaussianActions):
            assert self.log_std is not None
            return self.actions.sample(params, self.log_std, generator, deterministic)
        return self.actions.sample(params, mask, generator, deterministic)

    def _reads_aligned(self, obs: Tensor) -> bool:
        return obs.is_cuda and self._reads_flat

    @property
    def _reads_flat(self) -> bool:
        return self.encoder_kind != "cnn" and self.normalizer is None

    def _aligned(self, obs: Tensor) -> Tensor:
        """One step's observations as the encoder reads them best: cast and padded in one pass, on a GPU."""
        if not self._reads_aligned(obs):
            return obs
        narrow = torch.is_autocast_enabled(obs.device.type)
        dtype = torch.get_autocast_dtype(obs.device.type) if narrow else self.decoder.weight.dtype
        if obs.dtype == torch.bfloat16 == dtype and obs.ndim == 2 and obs.shape[1] % ALIGNMENT == 0:
            return obs  # as `kept`
        return gather_rows(obs.reshape(obs.shape[0], -1), dtype=dtype, multiple=ALIGNMENT)

    def _encode(self, obs: Tensor) -> Tensor:
        return self.encoder(obs if self.normalizer is None else self.normalizer(obs))

    def _encode_segments(self, obs: Tensor) -> Tensor:
        return self._encode(obs.flatten(0, 1)).view(*obs.shape[:2], self.hidden)

    def _decode(self, x: Tensor, state: Tensor) -> PolicyOutput:
        y = linear_float32(x, self.decoder.weight, self._decoder_rounded)
        params, value, _ = y.split([self.actions.width, 1, y.shape[-1] - self.actions.width - 1], -1)
        return PolicyOutput(params, value.squeeze(-1), state)
