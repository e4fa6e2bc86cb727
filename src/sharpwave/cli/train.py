"""`sharpwave train ALGORITHM`."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from sharpwave.cli import _trainers
from sharpwave.run import config as configs
from sharpwave.run import options, rundir
from sharpwave.run.errors import UserError


def main(args: list[str]) -> int:
    algorithm, rest = _algorithm(args)
    prog = f"sharpwave train {algorithm}"
    helping = any(a in ("-h", "--help") for a in rest)

    # --env and --config are looked up first: they decide the defaults that all other options start from.
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--env", nargs="?")
    scan.add_argument("--config", nargs="?", type=Path)
    early, _ = scan.parse_known_args(rest)
    below, env = configs.layers(algorithm, early.config, early.env)
    if env is None and not helping:
        raise UserError("an environment is missing: give --env NAME, e.g. --env CartPole-v1")

    cls = configs.config_class(algorithm)
    default = dataclasses.replace(cls(env=""), **below)

    @dataclass
    class Train:
        settings: Annotated[cls, tyro.conf.arg(name="")]  # ty: ignore[invalid-type-form]
        run_dir: Path | None = None
        """Directory to make for the run; must not exist. None: runs/ALGORITHM-ENV-seedS-DATE-TIME."""
        config: Path | None = None
        """File of settings by name (TOML, or a run's config.json). It overrides the environment's preset, and the
        command line overrides it."""

    Train.__doc__ = (
        f"{cls.__doc__ or ''}\n\nLater ones win: defaults, preset of the environment, --config, command line."
    )
    shown = dataclasses.replace(default, env=tyro.MISSING) if env is None else default
    chosen = options.parse(Train, rest, prog, default=Train(settings=shown))
    merged = configs.merge(_fields(default), _fields(chosen.settings))
    config = configs.check(cls(**merged))
    if chosen.run_dir is not None:
        rundir.refuse_existing(chosen.run_dir)  # before the work of making a trainer
    trainer = _trainers.make(algorithm, config)
    run_dir = rundir.create(chosen.run_dir, algorithm, trainer.config, ["sharpwave", "train", *args])
    return _trainers.train(trainer, run_dir, algorithm, resume=False)


def _algorithm(args: list[str]) -> tuple[str, list[str]]:
    if args and args[0] in ("-h", "--help"):
        print(f"usage: sharpwave train ALGORITHM --env NAME [OPTIONS]\n\nalgorithms: {', '.join(configs.ALGORITHMS)}\n")
        print("`sharpwave train ALGORITHM --help` lists its settings.")
        raise SystemExit(0)
    if not args or args[0].startswith("-"):
        raise UserError(f"an algorithm is missing: sharpwave train {next(iter(configs.ALGORITHMS))} --env NAME")
    if args[0] not in configs.ALGORITHMS:
        near = configs.closest(args[0], configs.ALGORITHMS) or f": choose {' or '.join(configs.ALGORITHMS)}"
        raise UserError(f"unknown algorithm {args[0]!r}{near}")
    return args[0], args[1:]


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
