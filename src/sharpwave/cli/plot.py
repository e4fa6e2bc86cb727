"""`sharpwave plot RUN...`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from sharpwave.run import options
from sharpwave.run.errors import UserError


@dataclass
class Plot:
    """Learning curves of runs. Runs that differ in nothing but the seed become one line with its spread."""

    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Runs, and folders that hold runs up to three levels below."""

    out: Path | None = None
    """File to write: .png, .svg or .pdf. None: plot.png, or plot-2.png and so on where that is taken."""

    metric: tuple[str, ...] = ("episode/return",)
    """What to draw, a panel each: names in metrics.jsonl, e.g. episode/return loss/value time/sps."""

    x: Literal["step", "time", "epoch"] = "step"
    """Horizontal axis: step (environment steps), time (seconds) or epoch."""

    spread: Literal["iqr", "minmax", "stderr", "none"] = "iqr"
    """Around a line: iqr (median, quartiles), minmax (median, extremes), stderr (mean, its standard error), or none
    (every run alone)."""

    smooth: int = 1
    """Log lines that a running mean takes in (>= 1)."""

    force: bool = False
    """Replace the file if it exists."""


def main(args: list[str]) -> int:
    chosen = options.parse(Plot, args, "sharpwave plot")
    from sharpwave.run import plot, runs

    if chosen.smooth < 1:
        raise UserError(f"--smooth must be at least 1; got {chosen.smooth}")
    if not chosen.metric:
        raise UserError("--metric must name at least one metric, e.g. --metric episode/return")
    if chosen.out is not None:
        plot.check_target(chosen.out, force=chosen.force)
    found = [runs.read(path) for path in runs.find(chosen.paths)]
    fig = plot.figure(found, chosen.metric, x=chosen.x, spread=chosen.spread, window=chosen.smooth)
    target = chosen.out or plot.free_name("plot", ".png")
    plot.save(fig, target, force=chosen.force)
    print(f"{target}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {', '.join(chosen.metric)}")
    return 0
