"""`sharpwave train ALGORITHM`."""

from dataclasses import dataclass
from pathlib import Path

from sharpwave.cli import _settings, _trainers
from sharpwave.run import config as configs
from sharpwave.run import rundir


@dataclass
class Train:
    """The command's own options."""

    run_dir: Path | None = None
    """Directory to make for the run; must not exist. None: runs/ALGORITHM-ENV-seedS-DATE-TIME."""
    config: Path | None = None
    """File of settings by name (TOML, or a run's config.json). It overrides the environment's preset, and the command
    line overrides it."""


def main(args: list[str]) -> int:
    algorithm, rest = _settings.algorithm(args, "train")
    about = configs.config_class(algorithm).__doc__ or ""
    config, own = _settings.parse(algorithm, rest, f"sharpwave train {algorithm}", Train, about)
    if own.run_dir is not None:
        rundir.refuse_existing(own.run_dir)  # before the work of making a trainer
    trainer = _trainers.make(algorithm, config)
    from sharpwave.run.info import backends

    command = ["sharpwave", "train", *args]
    run_dir = rundir.create(own.run_dir, algorithm, trainer.config, command, backends(trainer.device.type))
    return _trainers.train(trainer, run_dir, algorithm, resume=False)
