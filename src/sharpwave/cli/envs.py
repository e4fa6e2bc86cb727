"""`sharpwave envs`."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import tyro

from sharpwave.run import options
from sharpwave.run.errors import UserError

STEPS = 8  # of a random policy, to look at an environment


@dataclass
class Envs:
    """Which environments can be used here, and what brings the others; or what one of them is like."""

    name: tyro.conf.Positional[str | None] = None
    """An environment to look at, as --env takes it."""

    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, e.g. k=4 delay=8."""

    all: bool = False
    """List every name that is registered."""

    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    chosen = options.parse(Envs, args, "sharpwave envs")
    from sharpwave import envs

    if chosen.name is not None:
        return _one(chosen.name, chosen.env_kwargs, chosen.json)
    if chosen.all:
        print(json.dumps(envs.names(), indent=2) if chosen.json else "\n".join(envs.names()))
        return 0
    families = envs.families()
    if chosen.json:
        print(json.dumps([dataclasses.asdict(family) for family in families], indent=2))
        return 0
    width = max(len(family.name) for family in families)
    for family in families:
        state = f"{family.version}" if family.installed else f"pip install 'sharpwave[{family.extra}]'"
        print(f"{family.name:{width}}  {state:9}  {', '.join(family.examples)}")
    print("and your own: --env my_module:MyEnv")
    return 0


def _one(name: str, env_kwargs: dict[str, Any], as_json: bool) -> int:
    from sharpwave import envs
    from sharpwave.envs import Discrete, EnvFault
    from sharpwave.run.environment import clipping

    try:
        with envs.make(name, 1, **env_kwargs) as env:
            _try(env)
            shape, dtype = env.observation.shape, str(env.observation.dtype).removeprefix("torch.")
            inexact = env.inexact_because
            capturable = env.capturable
            action, layout = env.action, env.layout
    except EnvFault as fault:
        raise UserError(str(fault)) from fault
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        raise UserError(f"{name} cannot be made: {' '.join(str(error).split())}") from error
    if isinstance(action, Discrete):
        acts = " x ".join(map(str, action.nvec)) + (" choices" if len(action.nvec) == 1 else " choices, one each")
        acts += ", with masks" if action.masked else ""
    else:
        acts = f"{action.dim} numbers from {min(action.low):g} to {max(action.high):g}"
    facts = {
        "environment": name,
        "observation": f"{' x '.join(map(str, shape)) or 'a number'} {dtype}",
        **({"flattened": "; ".join(layout)} if layout else {}),
        "action": acts,
        "runs": "on any device, inside the captured graph" if capturable else "on the host",
        "resume": "bit for bit" if inexact is None else f"with new episodes, for {inexact}",
    }
    if warnings := clipping(action):
        facts["warning"] = " ".join(warnings).removeprefix("warning: ")
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    for what, text in facts.items():
        print(f"{what:11}  {text}")
    return 0


def _try(env: Any) -> None:
    """A few random steps, so that what is wrong with an environment shows here and not in a training."""
    import torch

    from sharpwave.envs import Discrete

    generator = torch.Generator(env.device).manual_seed(0)
    mask = env.reset(0).action_mask
    for _ in range(STEPS):
        if isinstance(env.action, Discrete):
            legal = torch.ones(1, sum(env.action.nvec), device=env.device) if mask is None else mask.float()
            heads = [torch.multinomial(p, 1, generator=generator) for p in legal.split(env.action.nvec, dim=1)]
            action = torch.cat(heads, dim=1).reshape(1, *env.action.shape)
        else:
            action = torch.randn(1, env.action.dim, generator=generator, device=env.device)
        mask = env.step(action).action_mask
