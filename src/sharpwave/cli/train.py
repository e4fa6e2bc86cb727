"""`sharpwave train ALGORITHM`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    from sharpwave.run.distributed import joined

    with joined(config.device) as world:
        if own.run_dir is not None and world.is_first:
            rundir.refuse_existing(own.run_dir)  # before the work of making a trainer
        trainer = _trainers.make(algorithm, config, world)
        run_dir = world.tell(
            str(_make_run_dir(own.run_dir, algorithm, trainer, args, world.size)) if world.is_first else ""
        )
        return _trainers.train(trainer, Path(run_dir), algorithm, resume=False, world=world)


def _make_run_dir(path: Path | None, algorithm: str, trainer: Any, args: list[str], ranks: int) -> Path:
    from sharpwave.run.info import backends

    command = ["sharpwave", "train", *args]
    return rundir.create(path, algorithm, trainer.config, command, backends(trainer.device.type), ranks)
