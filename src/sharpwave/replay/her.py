"""Hindsight experience replay: transitions of an episode, with goals that the episode did reach."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sharpwave.ops._backends import integer
from sharpwave.replay.nest import Batch, as_tensor, flatten, put

Reward = Callable[[Tensor, Tensor], Tensor]


def relabel(
    episode: Mapping[str, Any],
    reward: Reward,
    copies: int = 4,
    *,
    success: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Batch:
    """Copies of an episode's transitions whose goal is what was achieved at a random later step ("future").

        t' ~ uniform{t, ..., T-1};    goal_t = achieved_{t'+1};    reward_t = R(achieved_{t+1}, goal_t)

    ```python
    import torch

    from sharpwave.replay.her import relabel

    def near(achieved, goal):
        return ((achieved - goal).norm(dim=-1) < 0.05).float() - 1

    path = torch.linspace(0, 1, 11)[:, None]
    goal = torch.full((10, 1), 5.0)
    obs = {"achieved_goal": path[:-1], "desired_goal": goal}
    next_obs = {"achieved_goal": path[1:], "desired_goal": goal}
    more = relabel(dict(obs=obs, next_obs=next_obs, action=torch.zeros(10), reward=-torch.ones(10)), near)
    ```

    Args:
        episode: T transitions of one episode in order, (T, ...) each, as Gymnasium's goal environments name them: obs
            and next_obs hold achieved_goal and desired_goal; reward (T,); anything else is copied.
        reward: achieved goals and desired goals (n, ...) to rewards (n,), as an environment's `compute_reward`.
        copies: relabelled copies of each transition, >= 1.
        success: rewards (n,) to `terminated` (n,) bool, where reaching a goal ends an episode. None leaves
            `terminated` as it is.
        generator: of the random steps.

    Returns:
        copies T transitions, to `add` after the episode's own; new tensors, the given ones are not changed.

    Raises:
        KeyError, ValueError, TypeError: a field is missing or of another length; `reward` or `success` returned
            anything but (n,).

    Source: Andrychowicz et al. 2017 (arXiv 1707.01495), section 4.5.
    """
    copies = integer("copies", copies, 1)
    flat = {k: as_tensor(x, k) for k, x in flatten(episode).items()}
    needed = {f"{o}.{g}" for o in ("obs", "next_obs") for g in ("achieved_goal", "desired_goal")} | {"reward"}
    if needed - flat.keys():
        raise KeyError(f"episode must hold {sorted(needed)}; missing {sorted(needed - flat.keys())}")
    steps = len(flat["reward"])
    if any(x.ndim == 0 or len(x) != steps for x in flat.values()):
        raise ValueError(f"every field of episode must be ({steps}, ...), as reward is")

    t = torch.arange(steps).repeat(copies)
    later = (t + (torch.rand(len(t), generator=generator) * (steps - t)).long()).clamp(max=steps - 1)
    out = {k: x[t.to(x.device)] for k, x in flat.items()}
    achieved = flat["next_obs.achieved_goal"]
    goal = achieved[later.to(achieved.device)]
    out["obs.desired_goal"], out["next_obs.desired_goal"] = goal, goal.clone()
    out["reward"] = _one_each("reward", reward(out["next_obs.achieved_goal"], goal), len(t))
    if success is not None:
        out["terminated"] = _one_each("success", success(out["reward"]), len(t))
        if out["terminated"].dtype != torch.bool:
            raise TypeError(f"success must return bool; got {out['terminated'].dtype}: compare, as in reward == 0")
    batch = Batch()
    for path, x in out.items():
        put(batch, path, x)
    return batch


def _one_each(name: str, values: Any, n: int) -> Tensor:
    values = as_tensor(values, name)
    if values.shape != (n,):
        raise ValueError(f"{name} must return one number a transition, ({n},); got {tuple(values.shape)}")
    return values
