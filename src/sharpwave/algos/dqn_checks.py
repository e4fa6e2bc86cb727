"""What DQN needs of an environment and of the machine, checked before it is asked for."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from sharpwave.algos.dqn_config import DQNConfig
from sharpwave.envs.base import Discrete, VectorEnv
from sharpwave.replay import PrioritizedReplay
from sharpwave.run import seeding
from sharpwave.run.distributed import World
from sharpwave.run.errors import UserError


def make_replay(config: DQNConfig, env: VectorEnv, world: World, device: torch.device) -> PrioritizedReplay:
    """The replay of a run, or its shard on one of the ranks: steps of `env` in time order, on `device`.

    Raises:
        UserError: it does not fit into the device's memory.
    """
    fields: dict[str, Any] = {
        "obs": (env.observation.shape, env.observation.dtype),
        "action": ((), torch.int64),
        "reward": ((), torch.float32),
        "terminated": ((), torch.bool),
        "truncated": ((), torch.bool),
    }
    if env.may_skip:
        fields["valid"] = ((), torch.bool)
    require_memory(config.buffer_size, fields, device)
    return PrioritizedReplay(
        config.buffer_size, device, fields=fields, num_envs=config.num_envs, n_step=config.n_step, gamma=config.gamma,
        frame_stack=config.frame_stack, alpha=config.alpha,
        beta=(config.beta0, 1.0, config.num_updates // world.size * config.batch_size),
        seed=seeding.stream_seed(config.seed, world.rank, "replay"),
    )  # fmt: skip


def require_memory(items: int, fields: Mapping[str, Any], device: torch.device) -> None:
    """Raise where the replay cannot fit: a machine may kill the process instead of refusing the memory."""
    own = 4 + 8 + 4 + 4  # of an item: leaf, generation, step, and its share of the tree's nodes
    size = items * (own + sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()))
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if size > room:
        raise UserError(
            f"--buffer-size {items} takes {size / 2**30:.1f} GiB; {device} has {room / 2**30:.1f}: at most "
            f"{int(items * room / size * 0.8)} would leave room for the rest"
        )


def number_of_actions(env: VectorEnv) -> int:
    """How many actions there are, or an error that says why DQN cannot choose among them."""
    action = env.action
    if not isinstance(action, Discrete) or len(action.nvec) != 1 or action.masked:
        kind = "continuous actions" if not isinstance(action, Discrete) else f"{len(action.nvec)} heads of actions"
        kind = "action masks" if isinstance(action, Discrete) and action.masked else kind
        raise UserError(f"dqn needs one discrete action without masks; {env.name} has {kind}: use sharpwave train ppo")
    return action.nvec[0]
