"""The options of commands that take a trainer's settings."""

import argparse
import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from sharpwave.run import config as configs
from sharpwave.run import options
from sharpwave.run.errors import UserError


def parse(algorithm: str, args: list[str], prog: str, own: Any, about: str) -> tuple[Any, Any]:
    """The algorithm's checked settings, and the command's own options.

    Settings come from defaults, the environment's preset, --config and the command line; later ones win.

    Args:
        algorithm: a key of config.ALGORITHMS.
        args: the command line behind the algorithm.
        prog: how the command is called, for messages.
        own: a dataclass of the command's own options; it must have `config`, the file of settings.
        about: the help's first line.
    """
    # These are looked up first: they decide the defaults that all other options start from.
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--env", nargs="?")
    scan.add_argument("--device", nargs="?")
    scan.add_argument("--config", nargs="?", type=Path)
    early, _ = scan.parse_known_args(args)
    below, env = configs.layers(algorithm, early.config, early.env, early.device)
    if env is None and not any(arg in ("-h", "--help") for arg in args):
        raise UserError("an environment is missing: give --env NAME, e.g. --env CartPole-v1")

    cls = configs.config_class(algorithm)
    default = dataclasses.replace(cls(env=""), **below)
    shown = _values(default) | ({"env": tyro.MISSING} if env is None else {})
    parts = {name: _part(cls, fields, shown) for name, fields in _groups(cls).items()}
    parts[prog.split()[1]] = _part(own, dataclasses.fields(own), _values(own()))
    whole = dataclasses.make_dataclass(
        "Options",
        [
            (f"part{i}", Annotated[part, tyro.conf.arg(name=name)], dataclasses.field(default_factory=part))
            for i, (name, part) in enumerate(parts.items())
        ],
    )
    whole.__doc__ = f"{about}\n\nLater ones win: defaults, preset of the environment, --config, command line."
    chosen = options.parse(whole, args, prog)
    *given, last = (_values(getattr(chosen, f"part{i}")) for i in range(len(parts)))
    return configs.check(cls(**configs.merge(_values(default), *given))), own(**last)


def algorithm(args: list[str], command: str) -> tuple[str, list[str]]:
    """The algorithm that the command line begins with, and the rest."""
    if args and args[0] in ("-h", "--help"):
        print(f"usage: sharpwave {command} ALGORITHM --env NAME [OPTIONS]\n")
        print(f"algorithms: {', '.join(configs.ALGORITHMS)}\n")
        print(f"`sharpwave {command} ALGORITHM --help` lists its settings.")
        raise SystemExit(0)
    if not args or args[0].startswith("-"):
        raise UserError(f"an algorithm is missing: sharpwave {command} {next(iter(configs.ALGORITHMS))} --env NAME")
    if args[0] not in configs.ALGORITHMS:
        near = configs.closest(args[0], configs.ALGORITHMS) or f": choose {' or '.join(configs.ALGORITHMS)}"
        raise UserError(f"unknown algorithm {args[0]!r}{near}")
    return args[0], args[1:]


def _groups(cls: Any) -> dict[str, list[dataclasses.Field]]:
    """The settings by group, in order. `cls.GROUPS` names each group by the field that it begins with."""
    starts = {first: name for base in reversed(cls.__mro__) for first, name in vars(base).get("GROUPS", {}).items()}
    groups: dict[str, list[dataclasses.Field]] = {}
    name = "settings"
    for field in dataclasses.fields(cls):
        name = starts.get(field.name, name)
        groups.setdefault(name, []).append(field)
    # What the loop around the trainer does is inherited, so that it stands first; it matters last.
    return dict(sorted(groups.items(), key=lambda item: item[0] == starts.get("log_interval")))


def _part(cls: Any, fields: Iterable[dataclasses.Field], values: Mapping[str, Any]) -> Any:
    """A dataclass of some fields of another, with their docstrings as help and `values` as defaults."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), _docstrings(cls)

    def default(name: str) -> Any:
        value = values[name]
        return dataclasses.field(default_factory=lambda: value) if isinstance(value, dict) else value

    made = dataclasses.make_dataclass(
        cls.__name__,
        [
            (f.name, Annotated[hints[f.name], tyro.conf.arg(help=docs.get(f.name, ""))], default(f.name))  # ty: ignore[invalid-type-form]
            for f in fields
        ],
        kw_only=True,
    )
    made.__doc__ = ""
    return made


@functools.cache
def _docstrings(cls: Any) -> dict[str, str]:
    """The string under each field of a dataclass and its bases."""
    found = {}
    for base in reversed(cls.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    found[name] = " ".join(doc.split())
    return found


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
