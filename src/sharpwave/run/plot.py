"""Learning curves: runs of one experiment, which differ in the seed alone, are one line with their spread around it."""

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sharpwave.run import rundir, runs
from sharpwave.run.config import closest
from sharpwave.run.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Spread = Literal["iqr", "minmax", "stderr", "none"]
XAxis = Literal["step", "time", "epoch"]

SUFFIXES = (".png", ".svg", ".pdf")
LABEL = 48  # characters
COLUMNS = 3  # panels side by side
POINTS = 400  # of a group's line: no more than a figure has pixels to tell apart
# Okabe and Ito's colours, which people who see colours differently tell apart; then the same ones dashed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
X_KEYS = {"step": "step", "time": "time/elapsed", "epoch": "epoch"}
X_LABELS = {"step": "environment steps", "time": "seconds", "epoch": "epochs"}
SPREADS = {
    "iqr": "median and interquartile range",
    "minmax": "median, smallest and largest",
    "stderr": "mean and its standard error",
    "none": "",
}


@dataclass(frozen=True)
class Curve:
    """One group's line. All arrays have one length; `low` and `high` bound the spread."""

    x: np.ndarray
    line: np.ndarray
    low: np.ndarray
    high: np.ndarray


def series(path: Path, metrics: Sequence[str], x: XAxis = "step") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(x, y) of each metric of the run at `path`, in float64: the log lines where both are finite, ascending in x.

    Lines that cannot be read are left out; a metric that was never logged gives empty arrays.
    """
    try:
        texts = (path / rundir.METRICS).read_bytes().split(b"\n")[:-1]
    except OSError:
        texts = []
    lines, _ = runs.decode(texts)
    found = {}
    for metric in metrics:
        points = np.array([(_float(line.get(X_KEYS[x])), _float(line.get(metric))) for line in lines]).reshape(-1, 2)
        points = points[np.isfinite(points).all(1)]
        points = points[np.argsort(points[:, 0], kind="stable")]
        found[metric] = points[:, 0], points[:, 1]
    return found


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and up to `window` - 1 before it."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    return (sums[last] - sums[first]) / (last - first)


def curve(lines: Sequence[tuple[np.ndarray, np.ndarray]], spread: Spread) -> Curve:
    """The middle and the spread over runs, where all of them have values.

    Runs are interpolated linearly to common x: those they log, or 400 evenly spaced ones where these are more. The
    curve begins where the last run begins and ends where the shortest ends, so that every point is of all runs.

        iqr:    median; quartiles (linear interpolation between runs)
        minmax: median; smallest and largest
        stderr: mean; mean -+ s / sqrt(n), s the sample's standard deviation; no spread for one run

    Args:
        lines: (x, y) of each run, each of at least one value, x ascending.
        spread: as above; "none" gives the median without spread.

    Returns:
        Empty where no x is common to all runs.
    """
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) > POINTS:
        grid = np.linspace(first, last, POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in lines])  # [runs, points]
    middle = np.median(values, 0)
    if spread == "iqr":
        low, high = np.quantile(values, [0.25, 0.75], axis=0)
    elif spread == "minmax":
        low, high = values.min(0), values.max(0)
    elif spread == "stderr":
        middle = values.mean(0)
        error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(middle)
        low, high = middle - error, middle + error
    else:
        low = high = middle
    return Curve(grid, middle, low, high)


def groups(found: Sequence[runs.Run]) -> dict[str, list[runs.Run]]:
    """Runs by experiment, labelled by what tells the experiments apart: {"hidden=64": [...], "hidden=128": [...]}."""
    members: dict[str, list[runs.Run]] = {}
    for run in found:
        members.setdefault(runs.experiment(run), []).append(run)
    heads = [group[0] for group in members.values()]
    several_algorithms = len({run.algorithm for run in heads}) > 1
    labelled: dict[str, list[runs.Run]] = {}
    for group in members.values():
        telling = runs.differences([run for run in heads if run.algorithm == group[0].algorithm])
        words = [_setting(name, group[0].settings.get(name)) for name in telling if name not in runs.FREE]
        if several_algorithms or not words:
            words.insert(0, group[0].algorithm or group[0].path.name)
        label = textwrap.shorten(" ".join(words), LABEL, placeholder=" ...")
        if label in labelled:  # cut short, or of settings that could not be read
            label = f"{textwrap.shorten(label, LABEL // 2, placeholder='')} ({group[0].path.name})"
        labelled[label] = group
    return labelled


def figure(
    found: Sequence[runs.Run],
    metrics: Sequence[str] = ("episode/return",),
    *,
    x: XAxis = "step",
    spread: Spread = "iqr",
    window: int = 1,
) -> "Figure":
    """A panel for each environment and metric, a line for each experiment in it, and each run thinly behind its line.

    Args:
        found: the runs, from `runs.read`.
        metrics: names in metrics.jsonl.
        x: what the horizontal axis counts.
        spread: see `curve`.
        window: log lines that a running mean takes in (>= 1).

    Raises:
        UserError: matplotlib is missing, or no run has a value of a metric.
    """
    Figure = matplotlib_figure()
    from matplotlib.ticker import EngFormatter

    data = {run.path: series(run.path, metrics, x) for run in found}
    for metric in metrics:
        if not any(len(values[metric][0]) for values in data.values()):
            raise UserError(_absent(metric, found))
    by_env: dict[str, list[runs.Run]] = {}
    for run in found:
        by_env.setdefault(run.env, []).append(run)
    columns = min(COLUMNS, len(by_env))
    blocks = -(-len(by_env) // columns)
    fig = Figure(figsize=(1.2 + 5.2 * columns, 0.6 + 3.4 * blocks * len(metrics)), layout="constrained")
    axes = fig.subplots(blocks * len(metrics), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for e, (env, group) in enumerate(by_env.items()):
        experiments = groups(group)
        for m, metric in enumerate(metrics):
            axis = axes[e // columns * len(metrics) + m, e % columns]
            axis.set_visible(True)
            for i, (label, members) in enumerate(experiments.items()):
                lines = [data[run.path][metric] for run in members]
                lines = [(xs, smooth(ys, window)) for xs, ys in lines if len(xs)]
                if lines:
                    _draw(axis, lines, label, COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)], spread)
            axis.set_ylabel(LABELS.get(metric, metric))
            axis.set_xlabel(X_LABELS[x])
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            if m == 0:
                axis.set_title(env, fontsize="medium")
                _legend(axis, spread if any(len(members) > 1 for members in experiments.values()) else "none", window)
    return fig


def pareto(
    points: Sequence[tuple[float, float, int]], front: Sequence[tuple[float, float, int]], cut: Sequence[tuple] = ()
) -> "Figure":
    """Score against training time: each trial a point, those that no other one beats in both joined by a line.

    Args:
        points, front: (seconds, score, number) of complete trials; those on the front are numbered.
        cut: of trials that were stopped early, at where they stood.

    Raises:
        UserError: matplotlib is missing.
    """
    fig = matplotlib_figure()(figsize=(6.4, 4.2), layout="constrained")
    axis = fig.subplots()
    for rows, style in ((cut, {"facecolors": "none", "edgecolors": "0.6"}), (points, {"color": COLORS[0]})):
        if rows:
            name = "stopped early" if rows is cut else "complete"
            axis.scatter([row[0] for row in rows], [row[1] for row in rows], s=22, label=name, **style)
    if front:
        xs, ys = [row[0] for row in front], [row[1] for row in front]
        axis.step(xs, ys, where="post", color=COLORS[1], linewidth=1.4, label="best for its time")
        for seconds, score, number in front:
            axis.annotate(str(number), (seconds, score), xytext=(4, 4), textcoords="offset points", fontsize="small")
    axis.set_xlabel("training time, seconds")
    axis.set_ylabel("score: mean return at the end")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small", frameon=False)
    return fig


def save(fig: "Figure", path: Path, *, force: bool = False) -> None:
    """Write a figure in the format that the name's suffix says.

    Raises:
        UserError: another suffix, `path` exists and `force` is false, or it cannot be written.
    """
    check_target(path, force=force)
    import matplotlib

    image = io.BytesIO()
    # Without dates and random names, so that the same runs give the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "sharpwave"}):
        fig.savefig(image, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)
    write(path, image.getvalue(), force=force)


def check_target(path: Path, suffixes: Sequence[str] = SUFFIXES, *, option: str = "--out", force: bool = False) -> None:
    """UserError where writing would be refused, before the work of making what is written."""
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} must end in {' or '.join(suffixes)}; got {path}")
    if path.exists() and not force:
        raise UserError(f"{path} exists: choose another {option}, or give --force to replace it")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another {option}")


def write(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file that does not exist yet, unless `force`.

    Raises:
        UserError: it exists, or cannot be written.
    """
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise UserError(f"{path} exists: choose another --out, or give --force to replace it") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def free_name(stem: str, suffix: str) -> Path:
    """stem.suffix in the working directory, or the first of stem-2.suffix, stem-3.suffix, ... that is not taken."""
    path, count = Path(stem + suffix), 1
    while path.exists():
        count += 1
        path = Path(f"{stem}-{count}{suffix}")
    return path


LABELS = {
    "episode/return": "episode return",
    "episode/length": "episode length",
    "time/sps": "environment steps per second",
}


def _draw(axis: Any, lines: list, label: str, color: str, dash: str, spread: Spread) -> None:
    seeds = f" ({len(lines)} runs)" if len(lines) > 1 else ""
    middle = curve(lines, spread)
    if spread == "none" or not len(middle.x):
        for i, (xs, ys) in enumerate(lines):
            axis.plot(xs, ys, color=color, linestyle=dash, linewidth=1.2, label=label + seeds if i == 0 else None)
        return
    if len(lines) > 1:
        for xs, ys in lines:
            axis.plot(xs, ys, color=color, linewidth=0.5, alpha=0.35)
        axis.fill_between(middle.x, middle.low, middle.high, color=color, alpha=0.18, linewidth=0)
    axis.plot(middle.x, middle.line, color=color, linestyle=dash, linewidth=1.6, label=label + seeds)


def _legend(axis: Any, spread: Spread, window: int) -> None:
    if not axis.get_legend_handles_labels()[0]:
        return
    note = ", ".join(filter(None, [SPREADS[spread], f"running mean of {window} log lines" if window > 1 else ""]))
    legend = axis.legend(title=note or None, fontsize="small", title_fontsize="small", frameon=False)
    legend.set_in_layout(False)  # a long name must not squeeze the panel


def _absent(metric: str, found: Sequence[runs.Run]) -> str:
    """What to say of a metric that no run has."""
    names: dict[str, None] = {}
    for run in found:
        for line in runs.tail(run.path, 1)[0]:
            names |= dict.fromkeys(name for name in line if name not in ("step", "epoch"))
    if not names:
        return "these runs have not logged anything yet: wait for their first epoch"
    if metric in names:
        return f"no run has a finite value of {metric} yet: episodes must end before they have a return"
    return f"no run has the metric {metric!r}{closest(metric, names)}; there are {', '.join(names)}"


def _setting(name: str, value: Any) -> str:
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def matplotlib_figure() -> Any:
    """matplotlib's Figure class, or a UserError that names the extra."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it wants a display and keeps figures alive
    except ImportError as error:
        raise UserError(f"plots need matplotlib: pip install 'sharpwave[plot]' ({error})") from error
    return Figure
