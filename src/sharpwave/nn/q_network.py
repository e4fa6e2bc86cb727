"""Networks from observations to the values of discrete actions."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpwave.envs.base import Observation
from sharpwave.nn.noisy import NoisyLinear, scaled_noise
from sharpwave.nn.normalize import ObservationNormalizer
from sharpwave.ops._backends import choose
from sharpwave.ops.bias_relu import bias_relu
from sharpwave.ops.patches import patches
from sharpwave.ops.q_mlp import WIDEST, q_mlp

NetworkKind = Literal["auto", "mlp", "nature", "impala"]


class QNetwork(nn.Module):
    """Observations to Q(s, a), or to the logits of its distribution over atoms.

        trunk:    "mlp": `layers` - 1 linear layers with ReLU. "nature": the three convolutions of Mnih et al. 2015, or
                  two of 3 x 3 below 36 pixels. "impala": the residual blocks of Espeholt et al. 2018, 16, 32, 32 wide.
        stream:   one linear layer of `hidden` with ReLU; of two with `dueling`
        head:     linear; with `dueling` (Wang et al. 2016) Q = V + A - mean_a A

    Head and sum are float32 also under autocast. uint8 is divided by 255; any other dtype keeps its value.

    Args:
        observation: of one frame: any shape for "mlp"; for the others (H, W), (C, H, W) or (H, W, C), the smaller of
            the outer two being C.
        actions: A, how many.
        kind: "auto" takes "nature" for images of at least 8 x 8, else "mlp".
        hidden, layers: as above; layers >= 1 counts the stream.
        frames: how many frames an observation shows; inputs are then (B, frames, *shape), and frames become channels.
        dueling, noisy: as above; with `noisy` stream and head are `NoisyLinear`s.
        atoms: 1, or the atoms of a distribution.
        normalize: shift and scale observations by the running moments in `normalizer`, which whoever trains updates.

    Raises:
        ValueError: a network of convolutions for an observation that is no image of at least 8 x 8.

    Weights are drawn from the global generator, as PyTorch's layers draw them.
    """

    def __init__(
        self,
        observation: Observation,
        actions: int,
        kind: NetworkKind = "auto",
        hidden: int = 128,
        layers: int = 2,
        *,
        frames: int = 1,
        dueling: bool = True,
        noisy: bool = False,
        atoms: int = 1,
        normalize: bool = False,
    ):
        super().__init__()
        if kind not in get_args(NetworkKind):
            raise ValueError(f"network must be one of {', '.join(get_args(NetworkKind))}; got {kind!r}")
        self.observation, self.actions, self.frames, self.atoms = observation, actions, frames, atoms
        self.dueling, self.noisy = dueling, noisy
        self.normalizer = ObservationNormalizer(observation.shape) if normalize else None
        self.is_bytes = observation.dtype == torch.uint8 and not normalize
        image = _image(observation.shape)
        if kind == "auto":
            kind = "mlp" if image is None else "nature"
        self.kind = kind
        self.is_image = kind != "mlp"
        if not self.is_image:
            self.trunk, features = _mlp(observation.size * frames, hidden, layers - 1)
        elif image is None:
            raise ValueError(
                f"network {kind!r} needs an image of at least 8 x 8; observations are {observation.shape}: use 'mlp'"
            )
        else:
            channels, height, pixels = image
            make = _nature if kind == "nature" else _impala
            scale = 1 / 255 if self.is_bytes else 1.0
            self.trunk, features = make(channels * frames, (height, pixels), scale)
        linear = NoisyLinear if noisy else nn.Linear
        streams = 2 if dueling else 1
        self.stream = linear(features, hidden * streams)
        self.advantage = linear(hidden, actions * atoms)
        self.value = linear(hidden, atoms) if dueling else None
        self._noisy = [m for m in self.modules() if isinstance(m, NoisyLinear)]
        self.hidden = hidden
        # What `q_mlp` computes, which on a GPU takes a fifth of the layers' time; its weights are then this network's
        # parameters in their order.
        widths = (observation.size * frames, hidden, actions)
        self.is_narrow = kind == "mlp" and layers == 2 and atoms == 1 and not noisy and max(widths) <= WIDEST

    def forward(self, obs: Tensor) -> Tensor:
        """(B, *shape) or (B, frames, *shape) -> (B, A) float32, or (B, A, atoms) logits."""
        return self.output(self.prepare(obs))

    def output(self, x: Tensor) -> Tensor:
        """What `forward` gives, of observations that `prepare` has made ready: for two networks of one shape, once."""
        if self.is_narrow and choose("q_mlp", x.device.type) == "triton" and not torch.is_autocast_enabled("cuda"):
            return self._narrow(x)
        x = self.trunk(x)
        x = F.relu(self.stream(x.flatten(1)))
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.advantage.weight.dtype)
            value = None
            if self.value is not None:
                value, x = self.value(x[:, : self.hidden]), x[:, self.hidden :]
            q = self.advantage(x)
            if self.atoms > 1:
                q = q.unflatten(1, (self.actions, self.atoms))
                value = None if value is None else value.unsqueeze(1)
            return q if value is None else q + (value - q.mean(1, keepdim=True))

    def _narrow(self, x: Tensor) -> Tensor:
        """The same network in a few launches."""
        weights: list[Any] = []
        for layer in (self.trunk[0], self.stream, self.advantage, self.value):
            weights += [] if layer is None else [layer.weight, layer.bias]
        return q_mlp(x, *weights)

    def draw_noise(self, rows: int, generator: torch.Generator) -> None:
        """New noise for the next forwards, one for each of `rows` observations (1: shared); nothing if not `noisy`."""
        if self._noisy:
            block = scaled_noise(rows, sum(m.noise_size for m in self._noisy), generator)
            for m, part in zip(self._noisy, block.split([m.noise_size for m in self._noisy], 1), strict=True):
                m.set_noise(part)

    def drop_noise(self) -> None:
        """Be the mean network from here on."""
        for m in self._noisy:
            m.set_noise(None)

    @torch.no_grad()
    def prepare(self, obs: Tensor) -> Tensor:
        """Observations as the trunk reads them: (B, entries) float32, or images as `FirstConv2d` has them.

        Images keep their values: whole numbers up to 255 are exact in bfloat16, and the first layer divides bytes.
        """
        if self.normalizer is not None:
            obs = self.normalizer(obs)
        if not self.is_image:
            x = obs.reshape(len(obs), -1)
            return x.float() / 255 if self.is_bytes else x.to(self.stream.weight.dtype)
        shape = self.observation.shape
        x = obs if self.frames > 1 else obs.unsqueeze(1)  # (B, frames, *shape)
        if len(shape) == 2:
            x = x.unsqueeze(2)
        elif _channels_last(shape):
            x = x.movedim(-1, 2)
        x = x.flatten(1, 2)
        dtype = self.stream.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        first: Any = self.trunk[0]
        return first.prepare(x, dtype)


class FirstConv2d(nn.Conv2d):
    """A convolution on images as the environment gives them.

    Where its kernel is twice its stride, and the image whole strides wide and high, patches of stride x stride pixels
    become channels and the kernel 2 x 2. The sums are the same, and of 16 times as many channels, which tensor cores
    want in eights: four frames are too few.

    Args:
        scale: of the pixels; 1 / 255 for bytes.
    """

    def __init__(
        self, channels: int, out: int, kernel: int, stride: int, size: tuple[int, int], scale: float, **options
    ):
        super().__init__(channels, out, kernel, stride, **options)
        self.scale = scale
        self.patch = stride if kernel == 2 * stride and not any(pixels % stride for pixels in size) else 1

    def prepare(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, C, H, W) -> (B, C patch patch, H / patch, W / patch), channels last in memory."""
        return patches(x, self.patch, dtype)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight, p = weight if self.scale == 1 else weight * self.scale, self.patch
        if p == 1:
            return super()._conv_forward(input, weight, bias)
        weight = weight.unflatten(3, (2, p)).unflatten(2, (2, p)).permute(0, 2, 4, 1, 3, 5)  # (out, 2, 2, C, p, p)
        return F.conv2d(input, weight.flatten(3).permute(0, 3, 1, 2), bias)


class Rectified(nn.Sequential):
    """Convolutions, each with a ReLU after it; on a GPU that is one pass with the bias, and one backward."""

    def forward(self, input: Tensor) -> Tensor:
        if choose("bias_relu", input.device.type) != "triton":
            return super().forward(input)
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                input = bias_relu(layer._conv_forward(input, layer.weight, None), layer.bias)
        return input


def greedy(output: Tensor, atoms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The best action (B,) and its value (B,) of a network's output; the first of equal ones."""
    q = output if atoms is None else output.softmax(2) @ atoms
    value, action = q.max(1)
    return action, value


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] < shape[0]


def _image(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(C, H, W), or None where the observation is no image."""
    if len(shape) == 2:
        shape = (1, *shape)
    elif _channels_last(shape):
        shape = (shape[2], *shape[:2])
    return shape if len(shape) == 3 and min(shape[1:]) >= 8 else None


def _mlp(width: int, hidden: int, layers: int) -> tuple[nn.Sequential, int]:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*parts), width


def _nature(channels: int, size: tuple[int, int], scale: float) -> tuple[nn.Sequential, int]:
    if min(size) >= 36:
        convolutions = [FirstConv2d(channels, 32, 8, 4, size, scale), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
    else:
        convolutions = [FirstConv2d(channels, 32, 3, 1, size, scale), nn.Conv2d(32, 64, 3, 1)]
    parts: list[nn.Module] = []
    for convolution in convolutions:
        parts += [convolution, nn.ReLU()]
        size = (_after(size[0], convolution), _after(size[1], convolution))
    return _channels_last_weights(Rectified(*parts)), 64 * math.prod(size)


def _channels_last_weights(trunk: nn.Sequential) -> nn.Sequential:
    """Weights in the memory order of the images, which spares tensor cores a transposition of each."""
    for p in trunk.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return trunk


def _after(size: int, convolution: nn.Conv2d) -> int:
    return (size - convolution.kernel_size[0]) // convolution.stride[0] + 1


class _Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


def _impala(channels: int, size: tuple[int, int], scale: float) -> tuple[nn.Sequential, int]:
    parts: list[nn.Module] = []
    for out in (16, 32, 32):
        if not parts:
            parts.append(FirstConv2d(channels, out, 3, 1, size, scale, padding=1))
        else:
            parts.append(nn.Conv2d(channels, out, 3, padding=1))
        parts += [nn.MaxPool2d(3, 2, 1), _Residual(out), _Residual(out)]
        channels, size = out, ((size[0] + 1) // 2, (size[1] + 1) // 2)
    parts.append(nn.ReLU())
    return _channels_last_weights(nn.Sequential(*parts)), channels * math.prod(size)
