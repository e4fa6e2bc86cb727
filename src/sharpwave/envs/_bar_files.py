"""OHLCV bars from CSV and Parquet files, checked row by row, or drawn at random."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sharpwave.envs.extras import needs

PRICES = ("open", "high", "low", "close")
NUMBERS = (*PRICES, "volume")
TIME_NAMES = ("time", "timestamp", "datetime", "date")


@dataclass(frozen=True)
class Instrument:
    """The bars of one instrument, in order of time.

    Attributes:
        name: from the symbol column, else of the file.
        bars: (B, 5) float64: open, high, low, close, volume.
        gaps: indices of bars that do not follow the one before after the usual time.
    """

    name: str
    bars: np.ndarray
    gaps: np.ndarray


def read_instruments(paths: str | list[str], allow_gaps: bool) -> list[Instrument]:
    """Every instrument in the files, which may be given as patterns ("data/*.parquet").

    A file has columns time (or timestamp, datetime, date), open, high, low, close, volume, in any order and case, and
    where it holds several instruments, symbol. Times are dates as text, dates, or integers of any unit.

    Raises:
        ValueError: no such file or a kind unknown; a column is missing; a value is no finite number, a price not above
            0, a volume below 0, high below or low above another price of its bar; times that cannot be read, repeat,
            go back, or, unless `allow_gaps`, leave something out. The message names file, row (from 1, after the
            header) and column.
        ImportError: polars is not installed.
    """
    files = [file for path in ([paths] if isinstance(paths, str) else paths) for file in _expand(path)]
    found: list[Instrument] = []
    for file in files:
        found += _read(file, allow_gaps)
    names = [instrument.name for instrument in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"instrument {twice!r} is in more than one of {', '.join(files)}: keep each in one file")
    return found


def generate_instruments(count: int, length: int, seed: int, momentum: float, volatility: float) -> list[Instrument]:
    """Random bars whose returns persist: there is something to find, and how much is known.

        r_t = momentum r_{t-1} + volatility sqrt(1 - momentum^2) e_t,   close_t = close_{t-1} exp(r_t),   e_t normal

    so that returns have standard deviation `volatility` and correlation `momentum` from bar to bar. Each bar opens at
    the last close; high and low are those of a bridge of 8 steps; volume is log-normal and grows with |r_t|.
    """
    found = []
    for i, child in enumerate(np.random.SeedSequence(seed).spawn(count)):
        rng = np.random.default_rng(child)
        noise = volatility * np.sqrt(1 - momentum**2) * rng.standard_normal(length)
        returns = np.empty(length)
        last = volatility * rng.standard_normal()
        for t in range(length):
            last = returns[t] = momentum * last + noise[t]
        close = np.log(100.0) + np.cumsum(returns)
        start = close - returns
        walk = np.cumsum(volatility / np.sqrt(8) * rng.standard_normal((length, 8)), axis=1)
        walk -= np.arange(1, 9) / 8 * (walk[:, -1] - returns)[:, None]  # ends at the bar's return
        high = start + np.maximum(walk.max(1), 0)
        low = start + np.minimum(walk.min(1), 0)
        volume = np.exp(7 + 0.3 * rng.standard_normal(length) + 0.5 * np.abs(returns) / volatility)
        prices = np.exp(np.stack([start, np.maximum(high, close), np.minimum(low, close), close], 1))
        bars = np.concatenate([prices, volume[:, None]], axis=1)
        found.append(Instrument(f"generated-{i}", bars, np.empty(0, dtype=np.int64)))
    return found


def _expand(path: str) -> list[str]:
    if Path(path).is_file():
        return [path]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise ValueError(f"path {path!r}: there is no such file; the working directory is {Path.cwd()}")
    return matches


def _fail(file: str, row: int, column: str, what: str) -> NoReturn:
    """`row` counts from 0 here, and from 1 for who reads it."""
    raise ValueError(f"{file}, row {row + 1}, column {column!r}: {what}")


def _read(file: str, allow_gaps: bool) -> list[Instrument]:
    with needs("bars"):
        import polars as pl
    kind = Path(file).suffix.lower()
    try:
        if kind == ".parquet":
            frame = pl.read_parquet(file)
        elif kind in (".csv", ".gz", ".txt"):
            frame = pl.read_csv(file, infer_schema=False)
        else:
            raise ValueError(f"{file}: bars are read from .csv (also .csv.gz) and .parquet")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error

    columns = {name.strip().lower(): name for name in frame.columns}
    time = next((name for name in TIME_NAMES if name in columns), None)
    missing = [name for name in NUMBERS if name not in columns] + ([] if time else ["time"])
    if time is None or missing:
        raise ValueError(f"{file}: column {', '.join(map(repr, missing))} is missing; there are {frame.columns}")
    if frame.height == 0:
        raise ValueError(f"{file} holds no bars")

    bars = np.stack([_numbers(file, name, frame[columns[name]]) for name in NUMBERS], 1)
    _check_bars(file, bars)
    times, as_text = _times(file, columns[time], frame[columns[time]])
    if "symbol" not in columns:
        groups = {Path(file).name.split(".")[0]: np.arange(frame.height)}
    else:
        symbols = frame[columns["symbol"]].cast(pl.String)
        if symbols.null_count():
            _fail(file, int(symbols.is_null().arg_true()[0]), columns["symbol"], "is empty")
        text = symbols.to_numpy()
        groups = {name: np.flatnonzero(text == name) for name in dict.fromkeys(text.tolist())}
    return [
        Instrument(name, bars[rows], _gaps(file, columns[time], times, as_text, rows, allow_gaps))
        for name, rows in groups.items()
    ]


def _numbers(file: str, column: str, series: Any) -> np.ndarray:
    import polars as pl

    values = series.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = int(bad[0])
        given = series[row]
        _fail(file, row, column, "is empty" if given is None else f"must be a finite number; got {given!r}")
    return values


def _check_bars(file: str, bars: np.ndarray) -> None:
    prices, volume = bars[:, :4], bars[:, 4]
    high, low = prices[:, 1], prices[:, 2]
    rules = [
        *((name, prices[:, i] > 0, "must be above 0") for i, name in enumerate(PRICES)),
        ("high", high >= prices.max(1), "must be the highest price of its bar"),
        ("low", low <= prices.min(1), "must be the lowest price of its bar"),
        ("volume", volume >= 0, "must be at least 0"),
    ]
    for column, ok, rule in rules:
        if not ok.all():
            row = int(np.argmin(ok))
            bar = ", ".join(f"{name} {value:g}" for name, value in zip(NUMBERS, bars[row], strict=True))
            _fail(file, row, column, f"{rule}; the bar is {bar}")


def _times(file: str, column: str, series: Any) -> tuple[np.ndarray, Any]:
    """int64 times, and a function that writes one for a reader."""
    import polars as pl

    if series.dtype == pl.String:
        numbers = series.cast(pl.Int64, strict=False)
        if not numbers.null_count():
            return numbers.to_numpy(), str
        try:
            parsed = series.str.to_datetime(strict=False, time_unit="ns")
        except pl.exceptions.PolarsError:
            parsed = pl.Series([None] * len(series), dtype=pl.Datetime("ns"))
    elif series.dtype.is_integer():
        parsed = series.cast(pl.Int64)
    elif series.dtype.is_temporal():
        parsed = series.cast(pl.Datetime("ns"))
    else:
        raise ValueError(f"{file}, column {column!r}: must hold dates or integers; it holds {series.dtype}")
    if parsed.null_count():
        row = int(parsed.is_null().arg_true()[0])
        given = series[row]
        what = "is empty" if given is None else f"must be a date such as 2024-01-31 09:30:00; got {given!r}"
        _fail(file, row, column, what)
    is_date = parsed.dtype != pl.Int64
    return parsed.cast(pl.Int64).to_numpy(), (lambda t: str(np.datetime64(int(t), "ns"))[:19]) if is_date else str


def _gaps(file: str, column: str, times: np.ndarray, as_text: Any, rows: np.ndarray, allowed: bool) -> np.ndarray:
    """Where a bar does not follow the one before after the commonest time; ValueError for times that do not rise."""
    own = times[rows]
    passed = np.diff(own)
    wrong = np.flatnonzero(passed <= 0)
    if len(wrong):
        i = int(wrong[0]) + 1
        what = (
            f"{as_text(own[i])} is there twice" if passed[i - 1] == 0 else f"{as_text(own[i])} is before the last bar"
        )
        _fail(file, int(rows[i]), column, f"{what} (row {rows[i - 1] + 1} has {as_text(own[i - 1])}): sort the bars")
    if not len(passed):
        return np.empty(0, dtype=np.int64)
    values, counts = np.unique(passed, return_counts=True)
    usual = values[counts.argmax()]
    gaps = np.flatnonzero(passed != usual) + 1
    if len(gaps) and not allowed:
        i = int(gaps[0])
        _fail(
            file,
            int(rows[i]),
            column,
            f"a gap: {as_text(own[i])} follows {as_text(own[i - 1])}, {passed[i - 1] / usual:g} times the usual step "
            "of time. Fill it, or give gaps='split' (no episode crosses one) or gaps='ignore' (bars are taken as "
            "consecutive, as over weekends)",
        )
    return gaps
