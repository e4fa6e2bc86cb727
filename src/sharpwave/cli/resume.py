"""`sharpwave resume RUN`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from sharpwave.cli import _trainers
from sharpwave.run import options, rundir


@dataclass
class Resume:
    """Continue a run that was stopped or killed, from its newest checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""


def main(args: list[str]) -> int:
    chosen = options.parse(Resume, args, "sharpwave resume")
    from sharpwave.run import loop
    from sharpwave.run.distributed import joined

    algorithm, config = rundir.read(chosen.run_dir)
    loop.newest(chosen.run_dir)  # an error before the work of making a trainer
    with joined(config.device) as world:
        trainer = _trainers.make(algorithm, config, world)
        return _trainers.train(trainer, chosen.run_dir, algorithm, resume=True, world=world)
