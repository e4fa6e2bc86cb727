"""`sharpwave eval RUN`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from sharpwave.cli import _trainers
from sharpwave.run import config as configs
from sharpwave.run import options, rundir
from sharpwave.run.errors import UserError


@dataclass
class Evaluate:
    """Play whole episodes with a run's newest checkpoint, and print their mean return."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    episodes: int = 100
    """Episodes to play (>= 1)."""

    seed: int = 0
    """Seed of the environments and of drawn actions."""

    device: str | None = None
    """Where to play: cpu, cuda, ... None: where the run was trained."""

    deterministic: bool = True
    """Take the most likely action (the mean of a continuous one); otherwise draw."""


def main(args: list[str]) -> int:
    chosen = options.parse(Evaluate, args, "sharpwave eval")
    from sharpwave.run import loop

    if chosen.episodes < 1:
        raise UserError(f"--episodes must be at least 1; got {chosen.episodes}")
    algorithm, config = rundir.read(chosen.run_dir)
    loop.newest(chosen.run_dir)  # an error before the work of making a trainer
    config = dataclasses.replace(config, seed=chosen.seed, device=chosen.device or config.device)
    trainer = _trainers.make(algorithm, configs.check(config))
    loop.restore_policy(trainer, chosen.run_dir)
    print(_trainers.play(trainer, chosen.episodes, chosen.seed, chosen.deterministic))
    return 0
