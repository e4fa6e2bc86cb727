"""The command `sharpwave`.

Nothing heavy is imported before a command needs it: `sharpwave --help` answers at once.
"""

import argparse
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import sharpwave
from sharpwave.run.errors import UserError

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, which Windows lacks


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code.

    0: done. 2: the input was wrong; one line on stderr says what and what to do. 130 and 143: stopped by Ctrl-C and by
    SIGTERM.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except UserError as error:
        print("sharpwave: error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `sharpwave ... | head`: the reader has gone, and what is left in the buffer with it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("sharpwave: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)


def _dispatch(args: list[str]) -> int:
    if not args:
        raise UserError(f"a command is missing: {', '.join(COMMANDS)} (see sharpwave --help)")
    name, *rest = args
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"sharpwave {sharpwave.__version__}")
        return 0
    if name not in COMMANDS:
        from sharpwave.run.config import closest

        raise UserError(f"unknown command {name!r}{closest(name, COMMANDS) or f': choose {_either(COMMANDS)}'}")
    return COMMANDS[name](rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sharpwave COMMAND [OPTIONS]",
            "",
            sharpwave.__doc__ or "",
            "",
            "commands:",
            *lines,
            "",
            "`sharpwave COMMAND --help` explains a command; `sharpwave --version` says which version this is.",
            "Start here: sharpwave train ppo --env CartPole-v1",
        ]
    )


def train(args: list[str]) -> int:
    """Train an agent: sharpwave train ppo --env CartPole-v1"""
    from sharpwave.run import config as configs
    from sharpwave.run import options, rundir

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
    trainer = _make_trainer(algorithm, config)
    run_dir = rundir.create(chosen.run_dir, algorithm, trainer.config, ["sharpwave", "train", *args])
    return _train(trainer, run_dir, algorithm, resume=False)


@dataclass
class Resume:
    """Continue a run that was stopped or killed, from its newest checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""


def resume(args: list[str]) -> int:
    """Continue a stopped run: sharpwave resume runs/x"""
    from sharpwave.run import options, rundir

    chosen = options.parse(Resume, args, "sharpwave resume")
    from sharpwave.run import loop

    algorithm, config = rundir.read(chosen.run_dir)
    loop.newest(chosen.run_dir)  # an error before the work of making a trainer
    trainer = _make_trainer(algorithm, config)
    return _train(trainer, chosen.run_dir, algorithm, resume=True)


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


def evaluate(args: list[str]) -> int:
    """Play episodes with a trained agent: sharpwave eval runs/x --episodes 100"""
    from sharpwave.run import config as configs
    from sharpwave.run import options, rundir

    chosen = options.parse(Evaluate, args, "sharpwave eval")
    from sharpwave.run import loop

    if chosen.episodes < 1:
        raise UserError(f"--episodes must be at least 1; got {chosen.episodes}")
    algorithm, config = rundir.read(chosen.run_dir)
    loop.newest(chosen.run_dir)  # an error before the work of making a trainer
    config = dataclasses.replace(config, seed=chosen.seed, device=chosen.device or config.device)
    trainer = _make_trainer(algorithm, configs.check(config))
    loop.restore_policy(trainer, chosen.run_dir)
    print(_play(trainer, chosen.episodes, chosen.seed, chosen.deterministic))
    return 0


@dataclass
class Info:
    """Versions, devices, and which backend serves each op on each device: what to send with a bug report."""


def info(args: list[str]) -> int:
    """Versions, devices, and the backend of every op"""
    from sharpwave.run import options

    options.parse(Info, args, "sharpwave info")
    from sharpwave.run import info as report

    print(report.text())
    return 0


@dataclass
class Parity:
    """Hold an op's kernels against their reference, bit for bit or to the stated tolerance."""

    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")]
    """Which op: cdf, mingru, sumtree, or any other whose folder has a parity.py."""

    device: str = "auto"
    """Where its kernels run: cpu, cuda, or auto (cuda where there is one)."""


def parity(args: list[str]) -> int:
    """Check kernels against their references: sharpwave parity mingru"""
    from sharpwave.run import options

    chosen = options.parse(Parity, args, "sharpwave parity")
    from sharpwave.run import parity as harness
    from sharpwave.run.info import check_device

    check_device(chosen.device)
    try:
        harness.cases(chosen.op)
    except ValueError as error:
        raise UserError(str(error)) from error
    return harness.main(chosen.op, None if chosen.device == "auto" else chosen.device)


def bench(args: list[str]) -> int:
    """Measure speed: sharpwave bench train"""
    from sharpwave.run import options
    from sharpwave.run.bench_train import TrainBenchmark

    if args and args[0] in ("-h", "--help"):
        print("usage: sharpwave bench train [OPTIONS]\n\n`sharpwave bench train --help` lists them.")
        return 0
    if not args or args[0] != "train":
        raise UserError(f"what to measure is missing: sharpwave bench train; got {args[0] if args else 'nothing'!r}")
    chosen = options.parse(TrainBenchmark, args[1:], "sharpwave bench train")
    from sharpwave.run import bench_train
    from sharpwave.run.info import check_device

    check_device(chosen.device)
    return bench_train.main(chosen)


def _algorithm(args: list[str]) -> tuple[str, list[str]]:
    from sharpwave.run.config import ALGORITHMS, closest

    if args and args[0] in ("-h", "--help"):
        print(f"usage: sharpwave train ALGORITHM --env NAME [OPTIONS]\n\nalgorithms: {', '.join(ALGORITHMS)}\n")
        print("`sharpwave train ALGORITHM --help` lists its settings.")
        raise SystemExit(0)
    if not args or args[0].startswith("-"):
        raise UserError(f"an algorithm is missing: sharpwave train {next(iter(ALGORITHMS))} --env NAME")
    if args[0] not in ALGORITHMS:
        near = closest(args[0], ALGORITHMS) or f": choose {_either(ALGORITHMS)}"
        raise UserError(f"unknown algorithm {args[0]!r}{near}")
    return args[0], args[1:]


def _make_trainer(algorithm: str, config: Any) -> Any:
    """The trainer; what its settings and its environment's name and options make impossible is the user's to mend."""
    from sharpwave.envs.base import EnvFault
    from sharpwave.run.config import trainer_class
    from sharpwave.run.info import check_device

    check_device(config.device)
    try:
        return trainer_class(algorithm)(config)
    except (ValueError, EnvFault) as error:
        raise UserError(str(error)) from error


def _train(trainer: Any, run_dir: Path, algorithm: str, resume: bool) -> int:
    from sharpwave.run import display as displays
    from sharpwave.run import loop
    from sharpwave.run.info import backends
    from sharpwave.run.signals import StopRequest

    config, here = trainer.config, shlex.quote(str(run_dir))
    header = [
        f"sharpwave {sharpwave.__version__}: {algorithm} {config.env} seed {config.seed} on {trainer.device}",
        "backends: " + ", ".join(f"{op} {name}" for op, name in backends(trainer.device.type).items()),
        f"run directory: {run_dir}",
    ]
    if trainer.device.type == "cpu" and not any(Path(sharpwave.__file__).parent.rglob("*.nbc")):
        header.append("compiling the CPU's kernels: this once, the first epoch takes up to a minute longer")
    display = displays.make(displays.SurvivingConsole(), trainer.num_epochs, header)
    with StopRequest(_say_stopping) as stop:
        try:
            complete = loop.run(trainer, run_dir, resume=resume, display=display, stop=stop)
        finally:
            display.close()
    print(f"checkpoint: {loop.newest(run_dir)}")
    if not complete:
        print(f"stopped at epoch {trainer.epoch} of {trainer.num_epochs}; continue with: sharpwave resume {here}")
        return 128 + (stop.signal or signal.SIGINT)
    print(f"evaluate again with: sharpwave eval {here}", flush=True)
    if config.eval_episodes:
        print(_play(trainer, config.eval_episodes, config.seed, deterministic=True))
    return 0


def _say_stopping() -> None:
    # A signal may arrive in the middle of a print, whose stream then refuses another: this goes past it.
    os.write(2, b"sharpwave: stopping after this epoch, with a checkpoint; once more ends it at once\n")


def _play(trainer: Any, episodes: int, seed: int, deterministic: bool) -> str:
    """The line that `train` and `eval` end with."""
    from sharpwave.run import evaluate, threads
    from sharpwave.run.seeding import stream_seed

    # The trainer's own environments: it is done with them, and another vector may cost processes and memory.
    env_seed = stream_seed(seed, 0, "evaluation")
    with threads.use(trainer.config.threads):
        returns = evaluate.evaluate(trainer, trainer.env, episodes, env_seed, deterministic=deterministic)
    trainer.close()
    return evaluate.summary(returns)


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "info": info,
    "parity": parity,
    "bench": bench,
}
