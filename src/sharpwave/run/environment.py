"""The environment that a trainer's settings name."""

import math
from typing import Any

import torch

from sharpwave import envs
from sharpwave.envs.base import Continuous, Discrete, VectorEnv
from sharpwave.run.errors import UserError


def make_env(config: Any, device: torch.device, groups: int = 1) -> VectorEnv:
    """`config.num_envs` copies of `config.env`, in groups. Whatever their making raises is the user's to mend, in one
    line."""
    reserved = {"name", "num_envs", "device"} & config.env_kwargs.keys()
    if reserved:
        option = next(iter(reserved)).replace("_", "-").replace("name", "env")
        raise UserError(f"--env-kwargs cannot hold {', '.join(sorted(reserved))}: use --{option}")
    each = config.num_envs // groups
    made = []
    try:
        for _ in range(groups):
            made.append(envs.make(config.env, each, device, **config.env_kwargs))
        return envs.Grouped(made) if groups > 1 else made[0]
    except ValueError as error:
        if groups == 1:
            raise
        raise UserError(f"--env-groups {groups}, each of {each} environments: {error}") from error
    except (TypeError, ImportError, AttributeError, RuntimeError) as error:
        options = f" with --env-kwargs {config.env_kwargs}" if config.env_kwargs else ""
        raise UserError(f"--env {config.env}{options} cannot be made: {type(error).__name__}: {error}") from error


def clipping(action: Discrete | Continuous) -> list[str]:
    """A line for a person where a new policy's actions, N(0, 1) and clipped, do not explore what the bounds allow.

    That is where a range reaches beyond 3 or holds less than half of N(0, 1).
    """
    if isinstance(action, Discrete):
        return []
    for i, (low, high) in enumerate(zip(action.low, action.high, strict=True)):
        is_wide = math.isfinite(low) and math.isfinite(high) and max(-low, high) > 3
        share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        if is_wide or share < 0.5:
            return [
                "warning: actions are clipped to the environment's bounds, not rescaled: the policy begins with "
                f"N(0, 1), action {i} runs from {low:g} to {high:g}. If that does not explore it, make the environment "
                "gymnasium.wrappers.RescaleAction(env, -1, 1)"
            ]
    return []
