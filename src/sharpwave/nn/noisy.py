"""Linear layers that explore by noise of learnt size."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise on weights and bias.

        y = (mu_w + sigma_w * e_out e_in^T) x + mu_b + sigma_b * e_out,     e = sign(n) sqrt(|n|),  n normal

    computed as mu_w x + e_out * (sigma_w (e_in * x) + sigma_b) + mu_b, so that every row can have noise of its own.

    Args:
        in_features, out_features: widths.
        sigma: of the noise at first, times 1 / sqrt(in_features) (0.5 in the paper).

    `noise` is None (none: the mean network) or the pair (e_in (rows, in), e_out (rows, out)), rows being 1, for noise
    that all rows share, or the number of them; `set_noise` cuts it out of a block.

    Source: Fortunato et al. 2018 (arXiv 1706.10295), section 3 (b).
    """

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma * bound))
        self.noise: tuple[Tensor, Tensor] | None = None

    @property
    def noise_size(self) -> int:
        """Columns of the block that `set_noise` takes."""
        return self.in_features + self.out_features

    def set_noise(self, block: Tensor | None) -> None:
        """Take e_in and e_out from a block (rows, noise_size) of numbers that are scaled already."""
        self.noise = None if block is None else (block[:, : self.in_features], block[:, self.in_features :])

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.noise is None:
            return y
        e_in, e_out = self.noise
        return y + e_out * F.linear(x * e_in, self.weight_sigma, self.bias_sigma)


def scaled_noise(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """(rows, size) float32 of sign(n) sqrt(|n|) for normal n, on the generator's device."""
    n = torch.empty(rows, size, device=generator.device).normal_(generator=generator)
    return n.sign() * n.abs().sqrt()
