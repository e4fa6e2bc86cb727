"""From an environment's observation to the vector that the recurrent layers read."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sharpwave.envs.base import Observation
from sharpwave.nn.linear import AlignedLinear

EncoderKind = Literal["linear", "mlp", "cnn"]


class _Cast(nn.Module):
    """(B, *shape) of any dtype -> float32 or lower: uint8 is divided by 255, everything else keeps its value."""

    def forward(self, obs: Tensor) -> Tensor:
        if obs.dtype == torch.uint8:
            return obs.float() / 255
        narrow = torch.is_autocast_enabled(obs.device.type) and obs.dtype == torch.bfloat16
        return obs if narrow else obs.float()


class _Flatten(nn.Module):
    """(B, *shape) -> (B, entries), for no dimension as for many."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs.reshape(obs.shape[0], -1)


class _ChannelsFirst(nn.Module):
    """(B, H, W, C) -> (B, C, H, W)."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs.permute(0, 3, 1, 2)


def _linear(n_in: int, n_out: int, bias: bool = True) -> AlignedLinear:
    """Uniform weights of variance 2 / n_in (gain sqrt 2), zero bias."""
    layer = AlignedLinear(n_in, n_out, bias=bias)
    nn.init.uniform_(layer.weight, -math.sqrt(6 / n_in), math.sqrt(6 / n_in))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def make_encoder(kind: EncoderKind, observation: Observation, hidden: int) -> nn.Sequential:
    """(B, *observation.shape) -> (B, hidden); "linear" and "mlp" also read (B, D) padded as `AlignedLinear` says.

    "linear": one matrix on the flattened observation, no bias. "mlp": two layers with ReLU. "cnn": convolutions on an
    image (C, H, W) or (H, W, C), the smaller of the outer two being taken as C, with ReLU: the three layers of
    Mnih et al. 2015 from 36 pixels on, two of 3 x 3 below that.

    Raises:
        ValueError: unknown `kind`, or "cnn" for an observation that is not an image of at least 5 x 5.
    """
    if kind not in get_args(EncoderKind):
        raise ValueError(f"encoder must be one of {', '.join(get_args(EncoderKind))}; got {kind!r}")
    if kind == "linear":
        return nn.Sequential(_Cast(), _Flatten(), _linear(observation.size, hidden, bias=False))
    if kind == "mlp":
        return nn.Sequential(
            _Cast(), _Flatten(), _linear(observation.size, hidden), nn.ReLU(), _linear(hidden, hidden), nn.ReLU()
        )
    shape = observation.shape
    if len(shape) != 3 or min(sorted(shape)[1:]) < 5:
        raise ValueError(f"encoder 'cnn' needs an image of at least 5 x 5; observations are {shape}: use 'mlp'")
    channels_last = shape[2] < shape[0]
    channels, *size = (shape[2], *shape[:2]) if channels_last else shape
    if min(size) >= 36:
        convolutions = [nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
    else:
        convolutions = [nn.Conv2d(channels, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)]
    layers: list[nn.Module] = [_Cast()]
    if channels_last:
        layers.append(_ChannelsFirst())
    for convolution in convolutions:
        layers += [convolution, nn.ReLU()]
        size = [(s - k) // d + 1 for s, k, d in zip(size, convolution.kernel_size, convolution.stride, strict=True)]
    features = convolutions[-1].out_channels * math.prod(size)
    return nn.Sequential(*layers, _Flatten(), _linear(features, hidden), nn.ReLU())
