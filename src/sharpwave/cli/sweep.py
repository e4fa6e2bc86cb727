"""`sharpwave sweep ALGORITHM` and `sharpwave sweep --resume DIR`."""

import json
import math
import os
import re
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sharpwave.cli import _settings
from sharpwave.run import options
from sharpwave.run.display import duration
from sharpwave.run.errors import UserError

if TYPE_CHECKING:
    from sharpwave.run.sweep import Result, Sweep

SHOWN = 5  # of the best trials, at the end


@dataclass
class New:
    """A new sweep."""

    trials: int = 20
    """Trials in all (>= 1)."""
    workers: int = 1
    """Trainings side by side (>= 1), each with --threads threads."""
    space: Path | None = None
    """TOML file of what to search: [lr] low, high, log = true; or [hidden] choices. None: the algorithm's own."""
    prune: bool = True
    """Stop trials whose return is below the median of the others' at the same point of their training."""
    dir: Path | None = None
    """Directory to make for the sweep; must not exist. None: sweeps/ALGORITHM-ENV-DATE-TIME."""
    config: Path | None = None
    """File of settings that all trials share (TOML, or a run's config.json)."""


@dataclass
class Resume:
    """Go on with a sweep that was stopped or killed, or give it more trials."""

    resume: Path
    """The sweep's directory."""
    trials: int | None = None
    """Trials in all, those that have ended included. None: as many as it was begun with."""
    workers: int = 1
    """Trainings side by side (>= 1)."""


def main(args: list[str]) -> int:
    from sharpwave.run import spaces, sweep

    if any(arg.partition("=")[0] == "--resume" for arg in args):
        chosen = options.parse(Resume, args, "sharpwave sweep")
        opened = sweep.Sweep(chosen.resume)
        return _conduct(opened, chosen.trials or opened.trials, chosen.workers)
    algorithm, rest = _settings.algorithm(args, "sweep")
    about = "Search for settings: each trial is a training, and the settings below are those that all trials share."
    config, own = _settings.parse(algorithm, rest, f"sharpwave sweep {algorithm}", New, about)
    _check(own.trials, own.workers)
    tables = spaces.read(algorithm, own.space)
    source = str(own.space or "the default search space")
    path = own.dir or _free(algorithm, config.env)
    made = sweep.create(path, algorithm, config, tables, source, own.prune, own.trials)
    return _conduct(made, own.trials, own.workers)


def _conduct(opened: "Sweep", trials: int, workers: int) -> int:
    from sharpwave.run.signals import StopRequest

    _check(trials, workers)
    here = shlex.quote(str(opened.path))
    print(f"sweep directory: {opened.path}")
    print(f"searching {', '.join(d.name for d in opened.space)}: {trials} trials, {workers} at a time", flush=True)
    best: list[float] = [r.score for r in opened.results() if r.state == "complete"]

    def report(result: "Result") -> None:
        if result.state == "complete":
            best.append(result.score)
        print(_line(result, max(best, default=math.nan)), flush=True)

    # Not by print: a signal may arrive in the middle of one.
    words = b"sharpwave: stopping the trainings, each with a checkpoint; once more ends this at once\n"
    with StopRequest(lambda: os.write(2, words)) as stop:
        complete = opened.run(trials, workers, report=report, stop=stop)
    _summary(opened)
    if not complete:
        print(f"stopped; continue with: sharpwave sweep --resume {here}")
        return 128 + (stop.signal or signal.SIGINT)
    return 0


def _line(result: "Result", best: float) -> str:
    settings = "  ".join(f"{name} {_value(value)}" for name, value in result.params.items())
    if result.state == "failed":
        return f"trial {result.number:3}  failed: {result.why}  {settings}"
    outcome = "return" if result.state == "complete" else "stopped early at"
    came_to = f"{outcome} {result.score:.4g} in {duration(result.seconds)} (best {best:.4g})"
    return f"trial {result.number:3}  {came_to}  {settings}"


def _summary(opened: "Sweep") -> None:
    from sharpwave.run import plot
    from sharpwave.run.sweep import PARETO, front

    results = opened.results()
    complete = sorted((r for r in results if r.state == "complete"), key=lambda r: -r.score)
    if not complete:
        return
    print(f"best of {len(complete)} complete trials:")
    for result in complete[:SHOWN]:
        settings = "  ".join(f"{name} {_value(value)}" for name, value in result.params.items())
        print(f"  trial {result.number:3}  return {result.score:.4g} in {duration(result.seconds)}  {settings}")

    def rows(some: "list[Result]") -> list[tuple[float, float, int]]:
        return [(r.seconds, r.score, r.number) for r in some if math.isfinite(r.seconds) and math.isfinite(r.score)]

    target = opened.path / PARETO
    try:
        fig = plot.pareto(rows(complete), rows(front(results)), rows([r for r in results if r.state == "pruned"]))
        plot.save(fig, target, force=True)
        print(f"score against time: {target}")
    except UserError as error:
        print(f"no picture of score against time: {error}")
    again = shlex.quote(str(opened.run_dir(complete[0].number) / "config.json"))
    print(f"train with the best settings: sharpwave train {opened.algorithm} --config {again} --eval-episodes 100")


def _check(trials: int, workers: int) -> None:
    for name, value in {"trials": trials, "workers": workers}.items():
        if value < 1:
            raise UserError(f"--{name} must be at least 1; got {value}")


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _free(algorithm: str, env: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", env).strip("-.")
    stem = f"{algorithm}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = Path("sweeps") / stem, 1
    while path.exists():
        count += 1
        path = Path("sweeps") / f"{stem}-{count}"
    return path
