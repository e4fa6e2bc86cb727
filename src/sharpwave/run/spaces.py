"""What a sweep searches: ranges and choices of settings, from a TOML file or an algorithm's defaults."""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpwave.run import config as configs
from sharpwave.run import runs
from sharpwave.run.errors import UserError

KEYS = ("low", "high", "log", "choices")

# What matters most, each range around the default and as wide as tasks differ.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "lr": {"low": 0.002, "high": 0.05, "log": True},
        "gamma": {"choices": [0.95, 0.98, 0.99, 0.995, 0.998]},
        "gae_lambda": {"low": 0.8, "high": 0.98},
        "ent_coef": {"low": 1e-4, "high": 0.03, "log": True},
        "reward_scale": {"low": 0.003, "high": 1.0, "log": True},
        "replay_ratio": {"low": 0.5, "high": 4.0, "log": True},
    },
    "dqn": {
        "lr": {"low": 5e-5, "high": 5e-3, "log": True},
        "gamma": {"choices": [0.95, 0.98, 0.99, 0.995]},
        "n_step": {"choices": [1, 3, 5]},
        "target_interval": {"low": 50, "high": 5000, "log": True},
        "epsilon_end": {"low": 0.01, "high": 0.1, "log": True},
        "reward_scale": {"low": 0.01, "high": 1.0, "log": True},
        "updates_per_step": {"low": 0.1, "high": 1.0, "log": True},
    },
}


@dataclass(frozen=True)
class Dimension:
    """One setting that is searched: a range (`low` to `high`, even in the logarithm if `log`), or `choices`."""

    name: str
    low: float = math.nan
    high: float = math.nan
    log: bool = False
    whole: bool = False
    """Integers alone."""
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        """A value from an Optuna trial."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and self.low <= value <= self.high


def read(algorithm: str, file: Path | None) -> dict[str, dict[str, Any]]:
    """The search space as tables by setting: the file's, or the algorithm's default one.

    Raises:
        UserError: the file cannot be read, or the algorithm has no default space.
    """
    if file is not None:
        return configs.read_file(file)
    if algorithm not in DEFAULTS:
        raise UserError(f"there is no default search space for {algorithm}: give --space FILE")
    return DEFAULTS[algorithm]


def build(algorithm: str, tables: Mapping[str, Any], source: str) -> list[Dimension]:
    """The dimensions that `tables` describe. `source` is named in errors.

    Raises:
        UserError: an unknown setting, one that cannot be searched, or a table that is neither a range nor choices.
    """
    cls = configs.config_class(algorithm)
    hints = typing.get_type_hints(cls)
    searchable = [name for name in hints if name in cls.__dataclass_fields__ and name not in (*runs.FREE, "env")]
    if not tables:
        raise UserError(f"{source}: the search space is empty: give a table for each setting, e.g. [lr] low, high")
    dimensions = []
    for key, table in tables.items():
        name = key.replace("-", "_")
        if name not in searchable:
            what = "cannot be searched" if name in hints else "is unknown"
            raise UserError(f"{source}: setting {key!r} {what}{configs.closest(name, searchable)}")
        if not isinstance(table, Mapping) or set(table) - set(KEYS) or ("choices" in table) == ("low" in table):
            raise UserError(f"{source}: [{key}] must hold low and high (and log = true), or choices; it holds {table}")
        make = _choices if "choices" in table else _range
        dimensions.append(make(cls, name, hints[name], table, f"{source}: [{key}]"))
    return dimensions


def _choices(cls: Any, name: str, hint: Any, table: Mapping[str, Any], where: str) -> Dimension:
    choices = table["choices"]
    if not isinstance(choices, list) or not choices or set(table) != {"choices"}:
        raise UserError(
            f"{where} choices must be a list of at least one value, and nothing else; it holds {dict(table)}"
        )
    values = tuple(configs.coerce_all(cls, {name: value}, where)[name] for value in choices)
    if not all(value is None or isinstance(value, bool | int | float | str) for value in values):
        raise UserError(f"{where} choices must be numbers, strings, true or false; it holds {choices}")
    return Dimension(name, choices=values)


def _range(cls: Any, name: str, hint: Any, table: Mapping[str, Any], where: str) -> Dimension:
    kinds = {kind for kind in (typing.get_args(hint) or (hint,)) if kind in (int, float)}
    if not kinds:
        raise UserError(f"{where} is no number: give choices")
    if "high" not in table:
        raise UserError(f"{where} has low but no high")
    low, high = (configs.coerce_all(cls, {name: table[key]}, where)[name] for key in ("low", "high"))
    log = table.get("log", False)
    if not isinstance(log, bool):
        raise UserError(f"{where} log must be true or false; got {log!r}")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UserError(f"{where} low must not be above high, and both be finite; got {low} and {high}")
    if log and low <= 0:
        raise UserError(f"{where} low must be above 0 with log = true; got {low}")
    return Dimension(name, low=low, high=high, log=log, whole=kinds == {int})
