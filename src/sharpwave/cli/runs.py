"""`sharpwave runs`: list runs, and say in what they differ."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharpwave.run import options, plain_json, runs
from sharpwave.run.display import count, duration, number

STYLES = {"complete": "green", "running": "cyan", "failed": "red", "broken": "red"}


@dataclass
class Runs:
    """List runs: status, steps, speed, and the mean return of the episodes in their last ten log lines."""

    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Runs, and folders that hold runs up to three levels below."""

    compare: bool = False
    """Show the settings in which they differ, too."""

    sort: Literal["name", "created", "return", "step", "sps"] = "name"
    """Order: by name, oldest first, or the highest first."""

    json: bool = False
    """Print JSON, with all that is known of each run and its settings."""


def main(args: list[str]) -> int:
    chosen = options.parse(Runs, args, "sharpwave runs")
    found = [runs.read(path) for path in runs.find(chosen.paths)]
    found.sort(key=_key(chosen.sort))
    if chosen.json:
        print(plain_json.dumps([_plain(run) for run in found]))
        return 0
    parts = [_listing(found), *(Text(f"{run.path}: {run.problem}") for run in found if run.problem)]
    if chosen.compare:
        parts += [Text(), _comparison(found)]
    # Where the output is no terminal a row is a line, however long.
    console = Console(width=None if Console().is_terminal else 10_000)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0


def _listing(found: Sequence[runs.Run]) -> Table:
    table = _table("run", "status", "algo", "env", "seed")
    for name in ("steps", "done", "SPS", "time", "return"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        done = f"{100 * run.epoch / run.num_epochs:.0f}%" if run.num_epochs else "-"
        seed = "-" if run.seed is None else str(run.seed)
        table.add_row(
            *(Text(str(run.path)), Text(run.status, STYLES.get(run.status, "")), Text(run.algorithm or "-")),
            *(Text(run.env or "-"), seed, count(run.step), done),
            *(count(run.sps), duration(run.elapsed), number(run.last_return, "episode")),
        )
    return table


def _comparison(found: Sequence[runs.Run]) -> Table | Text:
    """A row for each run, a column for each setting that differs."""
    columns = runs.differences(found)
    if not columns:
        return Text("their settings are equal")
    table = _table("run", *columns)
    for i, run in enumerate(found):
        values = [column[i] for column in columns.values()]
        table.add_row(Text(run.path.name), *(Text("-" if v is None else json.dumps(v)) for v in values))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _key(sort: str) -> Any:
    if sort == "name":
        return lambda run: str(run.path)
    if sort == "created":
        return lambda run: run.created
    value = {"return": lambda r: r.last_return, "step": lambda r: r.step, "sps": lambda r: r.sps}[sort]
    return lambda run: (math.isnan(value(run)), -value(run) if not math.isnan(value(run)) else 0.0)


def _plain(run: runs.Run) -> dict[str, Any]:
    return {**dataclasses.asdict(run), "path": str(run.path), "sps": run.sps}
