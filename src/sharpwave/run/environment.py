"""The environment that a trainer's settings name."""

from typing import Any

import torch

from sharpwave import envs
from sharpwave.envs.base import VectorEnv
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
