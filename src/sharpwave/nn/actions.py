"""What a policy's outputs mean: how actions are drawn from them, and their PPO loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from sharpwave.envs.base import Continuous, Discrete
from sharpwave.ops.ppo_loss import PPOGradient, ppo_gradient_categorical, ppo_gradient_decoded, ppo_gradient_gaussian
from sharpwave.ops.sample import sample_categorical, sample_gaussian


class Sample(NamedTuple):
    """Actions drawn for N environments."""

    action: Tensor
    """(N, heads) int64 or (N, dim) float32, as the rollout stores it; `to_env` gives the environment's shape."""
    logprob: Tensor
    """(N,) float32, summed over heads or dimensions."""


class CategoricalActions:
    """Discrete and multi-discrete actions from logits, the heads side by side.

    Args:
        nvec: number of choices of each head.
    """

    dtype = torch.int64

    def __init__(self, nvec: tuple[int, ...]):
        self.nvec = tuple(nvec)
        self.width = sum(self.nvec)
        """Number of logits."""
        self.columns = len(self.nvec)
        """Width of a stored action."""

    def sample(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Sample:
        """Draw each head by the Gumbel-max trick, or take its most probable choice.

        Args:
            logits: (N, sum(nvec)); computed with in float32.
            mask: (N, sum(nvec)) bool, true where a choice is legal. A head with no legal choice is read as all legal.
            generator: of the noise; on the logits' device.
            deterministic: take the first of the most probable choices; draws nothing.
        """
        noise = None
        if not deterministic:
            noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=generator)
        return Sample(*sample_categorical(logits, noise, nvec=self.nvec, mask=mask))

    def to_env(self, action: Tensor) -> Tensor:
        """(N,) for one head, (N, heads) for several."""
        return action.squeeze(1) if self.columns == 1 else action

    def gradient(self, output: Tensor, log_std: Tensor | None, mask: Tensor | None, *rows, **options) -> PPOGradient:
        """`ppo_gradient_categorical` of these heads."""
        return ppo_gradient_categorical(output, *rows, mask=mask, nvec=self.nvec, **options)

    def gradient_decoded(self, features: Tensor, decoder: Tensor, mask: Tensor | None, *rows, **options) -> PPOGradient:
        """`ppo_gradient_decoded` of these heads."""
        return ppo_gradient_decoded(features, decoder, *rows, mask=mask, nvec=self.nvec, **options)


class GaussianActions:
    """Continuous actions from a diagonal Gaussian, unbounded; the environment clips them.

    Args:
        dim: number of dimensions.
    """

    dtype = torch.float32

    def __init__(self, dim: int):
        self.dim = self.width = self.columns = dim

    def sample(
        self,
        mean: Tensor,
        log_std: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Sample:
        """Draw mean + std * noise, or take the mean.

        Args:
            mean: (N, dim). log_std: (dim,). Computed with in float32.
        """
        noise = None
        if not deterministic:
            noise = torch.empty(mean.shape, device=mean.device).normal_(generator=generator)
        return Sample(*sample_gaussian(mean, log_std, noise))

    def to_env(self, action: Tensor) -> Tensor:
        """(N, dim), as it is."""
        return action

    def gradient(self, output: Tensor, log_std: Tensor | None, mask: Tensor | None, *rows, **options) -> PPOGradient:
        """`ppo_gradient_gaussian`; there is no mask."""
        assert log_std is not None and mask is None
        return ppo_gradient_gaussian(output, log_std, *rows, **options)


def action_distribution(action: Discrete | Continuous) -> CategoricalActions | GaussianActions:
    """The distribution that serves an environment's actions."""
    return CategoricalActions(action.nvec) if isinstance(action, Discrete) else GaussianActions(action.dim)
