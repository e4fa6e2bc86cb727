"""How well a policy plays, over a fixed number of whole episodes."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sharpwave.envs.base import VectorEnv

CHECK_EVERY = 16  # steps between two looks at whether all episodes have ended: each makes the host wait for the device


class Agent(Protocol):
    """What can be evaluated."""

    def act(
        self,
        obs: Tensor,
        state: Tensor | None,
        reset: Tensor,
        *,
        deterministic: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Actions for N observations, and the recurrent state after them.

        Args:
            obs: (N, *observation.shape).
            state: what the last call returned; None at the first.
            reset: (N,) bool, true where `obs` begins an episode: its state is taken as zero.
            deterministic: the most likely action (the mean, if continuous) instead of a draw.
            mask: (N, sum(nvec)) bool, the legal choices; None where all are.
        """
        ...


@torch.no_grad()
def evaluate(
    agent: Agent,
    env: VectorEnv,
    episodes: int,
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int = 1_000_000,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """The undiscounted return of each of `episodes` episodes.

    The episodes are shared out beforehand: each environment plays its first floor(episodes / N), the first episodes mod
    N of them one more. Counting those that end first, wherever they do, would favour short ones.

    Args:
        agent: see `Agent`. It acts on `env.device`.
        env: N environments; they are reset, and left where the last step brought them.
        episodes: at least 1. With N <= episodes no environment idles.
        seed: of the environments, in [0, 2^63). Draws of actions come from the agent's own generator.
        deterministic: passed on to the agent.
        max_steps: steps after which an environment with an episode that has not ended is an error.
        progress: called now and then with the number of episodes ended.

    Returns:
        (episodes,) float64 on the CPU, environment by environment, in order of time. Summed in float64.

    Raises:
        ValueError: `episodes` is less than 1.
        RuntimeError: an episode did not end within `max_steps`.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1; got {episodes}")
    n, device = env.num_envs, env.device
    quota = torch.full((n,), episodes // n, dtype=torch.int64, device=device)
    quota[: episodes % n] += 1
    most = -(-episodes // n)
    index = torch.arange(n, device=device)
    # One column more than an environment may fill: what comes after its quota lands there.
    returns = torch.zeros(n, most + 1, dtype=torch.float64, device=device)
    running = torch.zeros(n, dtype=torch.float64, device=device)
    ended_count = torch.zeros(n, dtype=torch.int64, device=device)

    current = env.reset(seed)
    obs, mask, state = current.obs, current.action_mask, None
    begins = torch.ones(n, dtype=torch.bool, device=device)
    for step in range(1, max_steps + 1):
        action, state = agent.act(obs, state, begins, deterministic=deterministic, mask=mask)
        result = env.step(action)
        running += result.reward
        ended = result.terminated | result.truncated
        column = torch.where(ended & (ended_count < quota), ended_count, most)
        returns[index, column] = running
        running.masked_fill_(ended, 0.0)
        ended_count += ended
        obs, mask, begins = result.obs, result.action_mask, result.begins
        if step % CHECK_EVERY == 0 or device.type == "cpu":
            counted = torch.minimum(ended_count, quota)
            if progress is not None and step % CHECK_EVERY == 0:
                progress(int(counted.sum()))
            if bool((counted == quota).all()):
                break
    else:
        raise RuntimeError(
            f"{env.name}: an episode did not end within {max_steps} steps: give the environment a time limit, or raise "
            "max_steps"
        )
    wanted = torch.arange(most + 1, device=device) < quota[:, None]
    return returns[wanted].cpu()


def summary(returns: Tensor) -> str:
    """`mean return 487.3, std 12.1, 100 episodes`: the standard deviation is that of these episodes (divided by n)."""
    mean, std = returns.mean().item(), returns.std(correction=0).item()
    return f"mean return {mean:.1f}, std {std:.1f}, {returns.numel()} episodes"
