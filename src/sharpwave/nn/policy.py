"""The recurrent actor-critic."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sharpwave.envs.base import Continuous, Discrete, Observation
from sharpwave.nn.actions import GaussianActions, Sample, action_distribution
from sharpwave.nn.encoders import EncoderKind, make_encoder
from sharpwave.nn.linear import ALIGNMENT, linear_float32
from sharpwave.nn.mingru import MinGRU
from sharpwave.nn.normalize import ObservationNormalizer
from sharpwave.ops.gather import gather_rows


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
        self.log_std = nn.Parameter(torch.zeros(action.dim)) if isinstance(action, Continuous) else None

    def gather(self, obs: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `index` of (N, T, *observation.shape) as `forward` reads them best: in one pass, on a GPU in `dtype`."""
        if not obs.is_cuda or self.encoder_kind == "cnn" or self.normalizer is not None:
            return obs.index_select(0, index)
        return gather_rows(obs.flatten(2), index, dtype=dtype, multiple=ALIGNMENT)

    def initial_state(self, batch: int) -> Tensor:
        """(layers, batch, H) zeros on the weights' device."""
        return torch.zeros(self.layers, batch, self.hidden, device=self.decoder.weight.device)

    def forward(self, obs: Tensor, state: Tensor, reset: Tensor | None = None) -> PolicyOutput:
        """Read segments.

        Args:
            obs: (B, T, *observation.shape). state: (layers, B, H), before each segment's first step.
            reset: (B, T) bool, true where obs is the first of an episode: the state is taken as 0 there.
        """
        b, t = obs.shape[:2]
        x = self._encode(obs.flatten(0, 1)).view(b, t, self.hidden)
        if self.recurrent is not None:
            x, state = self.recurrent(x, state, reset)
        return self._decode(x, state)

    def step(self, obs: Tensor, state: Tensor, reset: Tensor | None = None) -> PolicyOutput:
        """Read one step: obs (B, *observation.shape), state (layers, B, H), reset (B,) bool."""
        x = self._encode(obs)
        if self.recurrent is not None:
            x, state = self.recurrent.step(x, state, reset)
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

    def _encode(self, obs: Tensor) -> Tensor:
        return self.encoder(obs if self.normalizer is None else self.normalizer(obs))

    def _decode(self, x: Tensor, state: Tensor) -> PolicyOutput:
        y = linear_float32(x, self.decoder.weight)
        params, value, _ = y.split([self.actions.width, 1, y.shape[-1] - self.actions.width - 1], -1)
        return PolicyOutput(params, value.squeeze(-1), state)
