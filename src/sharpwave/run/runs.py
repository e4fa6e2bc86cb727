"""Finding runs on the disk and reading what became of them, without PyTorch and without writing anything.

A run may be half made, being written at this moment, cut short by a kill, or of another version. What can be read is
read; what cannot is said in `Run.problem`, and never hides the other runs.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpwave.run import config as configs
from sharpwave.run import plain_json, rundir
from sharpwave.run.config import RunConfig
from sharpwave.run.errors import UserError
from sharpwave.run.log import decode_line

DEPTH = 3  # how deep below a given folder runs are looked for
LAST = 10  # log lines whose episodes make the return that is shown
FREE = ("seed", "device", *(field.name for field in dataclasses.fields(RunConfig)))
"""Settings in which two runs of one experiment may differ."""
_STEP = re.compile(r"step-(\d{12,})")


@dataclass(frozen=True)
class Run:
    """What one run's directory says."""

    path: Path
    status: str
    """complete; running (a process trains in it); failed (an error ended it); stopped (resumable); new (nothing logged
    yet); or broken."""
    problem: str
    """What could not be read, or what ended it, or ""."""
    algorithm: str
    env: str
    seed: int | None
    device: str
    created: str
    """Local time, ISO 8601."""
    epoch: int
    num_epochs: int | None
    """Epochs of the whole run, where its settings say."""
    step: int
    """Environment steps done."""
    elapsed: float
    """Seconds trained."""
    last_return: float
    """Mean undiscounted return of the episodes in the last 10 log lines; NaN where none ended."""
    checkpoint: int | None
    """Step of the newest checkpoint."""
    settings: Mapping[str, Any] = dataclasses.field(repr=False)
    """config.json, with today's defaults for settings that it does not have."""

    @property
    def sps(self) -> float:
        """Environment steps per second over the whole run; NaN before the first log line."""
        return self.step / self.elapsed if self.elapsed > 0 else math.nan


def find(paths: Sequence[Path]) -> list[Path]:
    """The run directories among `paths` and up to three folders below them, each once, by name.

    Raises:
        UserError: a path does not exist, or there is no run in any.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"no run at {path}: give a run's directory, or a folder that holds runs")
        for run in _walk(path, DEPTH):
            found.setdefault(run)
    if not found:
        where = ", ".join(map(str, paths))
        raise UserError(f"no run in {where}: make one with `sharpwave train ppo --env CartPole-v1`")
    same: dict[Path, Path] = {}
    for run in found:
        same.setdefault(run.resolve(), run)
    return list(same.values())


def read(path: Path) -> Run:
    """What is known about the run at `path`; never raises for what is in it."""
    problems: list[str] = []
    record, settings = (_json(path / name, problems) for name in (rundir.RUN, rundir.CONFIG))
    lines, bad = tail(path, LAST)
    if bad:
        problems.append(f"{rundir.METRICS} holds lines that sharpwave did not write")
    if os.path.lexists(path / rundir.METRICS) and not os.access(path / rundir.METRICS, os.R_OK):
        problems.append(f"{rundir.METRICS} cannot be read")
    elif (path / rundir.METRICS).is_dir():
        problems.append(f"{rundir.METRICS} cannot be read: it is a directory")
    last = lines[-1] if lines else {}
    step, epoch, elapsed = (_number(last.get(key)) for key in ("step", "epoch", "time/elapsed"))
    config = _built(record.get("algorithm"), settings)
    if config is not None:
        settings = {**settings, **json.loads(configs.to_json(config))}
    num_epochs, ranks = getattr(config, "num_epochs", None), record.get("ranks", 1)
    if (
        settings and isinstance(ranks, int) and ranks > 0
    ):  # which torchrun decides, not a setting; but runs differ by it
        settings = {**settings, "ranks": ranks}
        num_epochs = None if num_epochs is None else num_epochs // ranks
    newest = _newest_checkpoint(path / rundir.CHECKPOINTS)
    if not record or not settings:
        status = "broken"
    elif rundir.is_locked(path):
        status = "running"
    elif failure := _text(path / rundir.FAILURE):
        status = "failed"
        problems.append(failure)
    elif num_epochs is not None and epoch >= num_epochs and newest == step:
        status = "complete"
    else:
        status = "stopped" if lines else "new"
    seed = settings.get("seed")
    return Run(
        path=path,
        status=status,
        problem="; ".join(problems),
        algorithm=str(record.get("algorithm", "")),
        env=str(settings.get("env", "")),
        seed=seed if isinstance(seed, int) else None,
        device=str(settings.get("device", "")),
        created=str(record.get("created", "")),
        epoch=int(epoch),
        num_epochs=num_epochs,
        step=int(step),
        elapsed=elapsed,
        last_return=_mean_return(lines),
        checkpoint=newest,
        settings=settings,
    )


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings whose value is not the same in all runs that have them: {name: a value for each run}.

    A run without such a setting, for it is another algorithm's, has None there.
    """
    differing = {}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        having = [run.settings[name] for run in runs if name in run.settings]
        if any(value != having[0] for value in having):
            differing[name] = [run.settings.get(name) for run in runs]
    return differing


def experiment(run: Run) -> str:
    """Equal for runs that differ in nothing but the seed and the settings in FREE."""
    kept = {name: value for name, value in run.settings.items() if name not in FREE}
    return json.dumps([run.algorithm, kept], sort_keys=True, default=str)


def tail(path: Path, count: int) -> tuple[list[dict[str, Any]], int]:
    """The last `count` log lines of a run, and how many of the file's last lines could not be read.

    A last line without its newline is still being written, and is left out without being counted.
    """
    try:
        with (path / rundir.METRICS).open("rb") as file:
            end, size = file.seek(0, os.SEEK_END), 4096 * count
            while True:
                start = max(0, end - size)
                file.seek(start)
                texts = file.read(end - start).split(b"\n")[:-1]
                texts = texts[1:] if start else texts  # the first is cut where reading began
                if start == 0 or len(texts) >= count:
                    break
                size *= 4
    except OSError:
        return [], 0
    return decode(texts[-count:])


def decode(texts: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Log lines as `log.read_metrics` gives them, without those that cannot be read, and how many these are."""
    lines, bad = [], 0
    for text in texts:
        try:
            lines.append(decode_line(text))
        except (ValueError, TypeError, AttributeError):
            bad += 1
    return lines, bad


def _walk(path: Path, depth: int) -> Iterator[Path]:
    if (path / rundir.RUN).exists() or (path / rundir.CONFIG).exists() or (path / rundir.METRICS).exists():
        yield path
        return
    if depth == 0:
        return
    try:
        below = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return  # a folder that may not be read holds nothing for this user
    for folder in below:
        yield from _walk(folder, depth - 1)


def _text(path: Path) -> str:
    try:
        return " ".join(path.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return ""


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = plain_json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"no {path.name}")
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        problems.append(f"{path.name} cannot be read: {reason}")
        return {}
    if not isinstance(data, dict):
        problems.append(f"{path.name} is not what sharpwave wrote")
        return {}
    return data


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _built(algorithm: Any, settings: Mapping[str, Any]) -> Any:
    """The settings as today's dataclass, with its defaults for what an older version did not have yet.

    None where they are of another version that does not fit, or the dataclass cannot tell how long the run is.
    """
    if algorithm not in configs.ALGORITHMS:
        return None
    try:
        config = configs.build(algorithm, settings, rundir.CONFIG)
        _ = config.num_epochs
    except (UserError, AttributeError, ArithmeticError, TypeError, AssertionError):
        return None
    return config


def _newest_checkpoint(directory: Path) -> int | None:
    try:
        names = [_STEP.fullmatch(p.name) for p in directory.iterdir()]
    except OSError:
        return None
    return max((int(match[1]) for match in names if match), default=None)


def _mean_return(lines: Sequence[Mapping[str, Any]]) -> float:
    """Weighted by the episodes of each line where their number was logged."""
    total, weight = 0.0, 0.0
    for line in lines:
        value, count = line.get("episode/return"), line.get("episode/count", 1.0)
        if isinstance(value, float | int) and math.isfinite(value) and isinstance(count, float | int) and count > 0:
            total, weight = total + value * count, weight + count
    return total / weight if weight else math.nan
