"""What a run shows while it trains: a live table on a terminal, plain lines elsewhere.

Only this module and the command line print.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR = 24  # characters
REFRESH = 0.25  # seconds between two pictures: a table costs a millisecond to lay out
SMOOTH = 10.0  # seconds over which steps per second are averaged


HINT = "Ctrl-C stops after an epoch, with a checkpoint"
STOPPING = "stopping after this epoch, with a checkpoint; once more ends it at once"
BLOCKS = "▁▂▃▄▅▆▇█"
TREND = 24  # values of the return's trend

Histograms = Callable[[], Mapping[str, tuple[float, float, Sequence[float]]]]
"""{name: (lowest value, highest value, count of each bin)}, bins even in the logarithm."""


class Display(Protocol):
    """Where the loop shows its progress."""

    def start(self, step: int, epoch: int) -> None:
        """Called once, where training begins or goes on."""
        ...

    def update(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        phases: Mapping[str, float],
        histograms: Histograms | None = None,
    ) -> None:
        """Called after each logged epoch: `metrics` as logged, `phases` in seconds since the last call.

        `histograms` is called where they are shown, and only then, for it waits for the device.
        """
        ...

    def message(self, text: str) -> None:
        """A line that stays: where something was saved, that a stop was requested."""
        ...

    def stopping(self) -> None:
        """A stop was requested. Called from a signal's handler, maybe in the middle of another call."""
        ...

    def close(self) -> None: ...


class SurvivingConsole(Console):
    """A console whose reader may leave (`sharpwave train ... | head`): what it would print is dropped from then on.

    Rich's own would end the process, and a night's training with it.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Silent:
    """Shows nothing: what the loop uses when it is called from Python."""

    def start(self, step: int, epoch: int) -> None:
        return

    def update(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        phases: Mapping[str, float],
        histograms: Histograms | None = None,
    ) -> None:
        return

    def message(self, text: str) -> None:
        return

    def stopping(self) -> None:
        return

    def close(self) -> None:
        return


class Rate:
    """Steps per second over the last SMOOTH seconds, and the time left at that rate.

    The first epoch compiles and captures: from the second on it is left out.
    """

    def __init__(self, num_epochs: int, clock: Callable[[], float] = time.perf_counter):
        self._num_epochs = num_epochs
        self._clock = clock
        self._points: list[tuple[float, int, int]] = []
        self._has_start = True

    def update(self, step: int, epoch: int) -> None:
        now = self._clock()
        self._points.append((now, step, epoch))
        if self._has_start and len(self._points) == 3:
            self._points.pop(0)
            self._has_start = False
        while len(self._points) > 2 and self._points[1][0] < now - SMOOTH:
            self._points.pop(0)

    @property
    def per_second(self) -> float:
        """NaN before the second point."""
        return self._slope(1)

    @property
    def seconds_left(self) -> float:
        """NaN before the third point, for the second may hold what is done only once."""
        epochs_per_second = math.nan if self._has_start else self._slope(2)
        return (self._num_epochs - self._points[-1][2]) / epochs_per_second if epochs_per_second > 0 else math.nan

    def _slope(self, which: int) -> float:
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return math.nan
        first, last = self._points[0], self._points[-1]
        return (last[which] - first[which]) / (last[0] - first[0])


class Plain:
    """One line every `interval` seconds, and one at the first and the last update."""

    def __init__(self, console: Console, num_epochs: int, header: Sequence[str] = (), interval: float = 5.0):
        self._console = console
        self._num_epochs = num_epochs
        self._header = header
        self._interval = interval
        self._rate = Rate(num_epochs)
        self._last = -math.inf

    def start(self, step: int, epoch: int) -> None:
        for line in self._header:
            self.message(line)
        self._rate.update(step, epoch)

    def update(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        phases: Mapping[str, float],
        histograms: Histograms | None = None,
    ) -> None:
        self._rate.update(step, epoch)
        now = time.perf_counter()
        if now - self._last < self._interval and epoch < self._num_epochs:
            return
        self._last = now
        parts = [
            f"epoch {epoch}/{self._num_epochs}",
            f"step {step:,}",
            f"SPS {count(self._rate.per_second)}",
            *(
                f"{label} {number(metrics[name], name.partition('/')[0])}"
                for name, label in HEADLINE.items()
                if name in metrics
            ),
            _left(self._rate),
        ]
        self.message("  ".join(filter(None, parts)))

    def message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def stopping(self) -> None:
        # A print that the signal interrupted would refuse another: this goes past it.
        os.write(2, f"sharpwave: {STOPPING}\n".encode())

    def close(self) -> None:
        return


class Dashboard:
    """A picture that is redrawn in place: progress, numbers by group, memory, priorities, and phases as bars."""

    def __init__(self, console: Console, num_epochs: int, header: Sequence[str] = ()):
        self._console = console
        self._num_epochs = num_epochs
        self._header = header
        self._rate = Rate(num_epochs)
        self._phases: dict[str, float] = {}
        self._trend: deque[float] = deque(maxlen=TREND)
        self._is_stopping = False
        self._drawn = -math.inf
        # The cursor stays visible: a second Ctrl-C ends the process at once, with nobody left to bring it back.
        self._live = Live(console=console, auto_refresh=False)

    def start(self, step: int, epoch: int) -> None:
        for line in self._header:
            self.message(line)
        self._rate.update(step, epoch)
        self._live.start()
        self._console.show_cursor(True)

    def update(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        phases: Mapping[str, float],
        histograms: Histograms | None = None,
    ) -> None:
        self._rate.update(step, epoch)
        for name, seconds in phases.items():
            self._phases[name] = 0.8 * self._phases.get(name, seconds) + 0.2 * seconds
        if math.isfinite(metrics.get("episode/return", math.nan)):
            self._trend.append(metrics["episode/return"])
        now = time.perf_counter()
        if now - self._drawn >= REFRESH or epoch >= self._num_epochs:
            self._drawn = now
            found = histograms() if histograms is not None else {}
            self._live.update(self._picture(step, epoch, metrics, found), refresh=True)

    def message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def stopping(self) -> None:
        self._is_stopping = True
        # Over the picture's last line, where the cursor is, and not through the console, which may be printing now.
        line = f"\r\x1b[K\x1b[1;33m{STOPPING[: self._console.width - 1]}\x1b[0m"
        with contextlib.suppress(OSError, ValueError):
            os.write(self._console.file.fileno(), line.encode())

    def close(self) -> None:
        self._live.stop()

    def _picture(self, step: int, epoch: int, metrics: Mapping[str, float], histograms: Mapping[str, tuple]) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=self._num_epochs, completed=epoch, width=BAR),
            f"{100 * epoch / self._num_epochs:.0f}%",
            f"epoch {epoch}/{self._num_epochs}",
            f"step {step:,}",
            f"SPS {count(self._rate.per_second)}",
            _left(self._rate),
        )
        memory = {name: value for name, value in metrics.items() if name.startswith("memory/")}
        tables = [self._group(name, items) for name, items in groups(metrics).items() if name != "memory"]
        tables += [_histogram(name, *histogram) for name, histogram in histograms.items()]
        if {"memory/device_used_gib", "memory/device_gib"} <= memory.keys():
            tables.append(_memory(memory["memory/device_used_gib"], memory["memory/device_gib"]))
        # Last, for a stop is announced over it.
        last = Text(STOPPING, style="bold yellow") if self._is_stopping else Text(HINT, style="dim")
        last.truncate(self._console.width - 1)
        # Columns break into rows where the terminal is narrow.
        return Group(head, Columns([*tables, self._phase_bars()], padding=(1, 3)), Text(), last)

    def _group(self, name: str, items: Mapping[str, float]) -> Table:
        table = _grid(name, columns=2)
        for label, value in items.items():
            table.add_row(
                label, Text(number(value, name), justify="right", style="" if math.isfinite(value) else "bold red")
            )
        if name == "episode" and len(self._trend) > 1:
            table.add_row("trend", Text(bars(list(self._trend), min(self._trend)), style="green"))
        return table

    def _phase_bars(self) -> Table:
        table = _grid("phases", columns=3)
        whole = sum(self._phases.values()) or 1.0
        for name, seconds in self._phases.items():
            table.add_row(
                name, ProgressBar(total=whole, completed=seconds, width=BAR // 2), f"{100 * seconds / whole:3.0f}%"
            )
        return table


def _left(rate: Rate) -> str:
    return f"left {duration(rate.seconds_left)}" if math.isfinite(rate.seconds_left) else ""


def _histogram(name: str, low: float, high: float, counts: Sequence[float]) -> Table:
    table = _grid(name, columns=1)
    table.add_row(Text(bars(counts, 0.0), style="magenta"))
    table.add_row(f"{low:.1e} to {high:.1e}, log")
    return table


def _memory(used: float, whole: float) -> Table:
    table = _grid("GPU memory", columns=1)
    table.add_row(ProgressBar(total=whole, completed=used, width=BAR // 2))
    table.add_row(f"{used:.1f} of {whole:.0f} GiB")
    return table


def _grid(title: str, columns: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for _ in range(columns):
        table.add_column(no_wrap=True)
    table.add_row(Text(title, style="bold cyan"))
    return table


HEADLINE = {
    "episode/return": "return",
    "episode/length": "length",
    "loss/policy": "policy loss",
    "loss/value": "value loss",
    "loss/entropy": "entropy",
    "policy/approx_kl": "KL",
    "loss/td": "TD loss",
    "td/p90": "TD p90",
    "q/mean": "Q",
    "episode/overestimation": "over",
    "replay/mean_age": "age",
    "replay/priority_p50": "priority",
    "schedule/epsilon": "epsilon",
}
"""The metrics of a plain line and what they are called there, where a trainer has them."""


def make(console: Console, num_epochs: int, header: Sequence[str] = ()) -> Display:
    """A dashboard where the console is a terminal, plain lines where not; the header comes first, once it has begun."""
    if console.is_terminal:
        return Dashboard(console, num_epochs, header)
    return Plain(console, num_epochs, header)


def groups(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Metrics called "group/name" by group, the rest under "run". "episode" comes first; "time/..." is left out, for
    rate and phases show it."""
    grouped: dict[str, dict[str, float]] = {}
    for name, value in sorted(metrics.items(), key=lambda item: not item[0].startswith("episode/")):
        group, _, label = name.rpartition("/")
        if group != "time":
            grouped.setdefault(group or "run", {})[label] = value
    return grouped


def number(value: float, group: str = "") -> str:
    """Four significant digits. Of episodes, NaN is "-": none has ended yet, and nothing is wrong."""
    return "-" if group == "episode" and math.isnan(value) else f"{value:.4g}"


def bars(values: Sequence[float], low: float) -> str:
    """A letter for each value, its height from `low` to the largest: "▁▃█"."""
    high = max(values, default=low)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def count(value: float) -> str:
    """1234567 is "1.23M"."""
    if not math.isfinite(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """3725 is "1h02m", 65 is "1m05s"."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
