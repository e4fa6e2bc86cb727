"""Command-line options made from dataclasses by tyro, and its errors as one line."""

import contextlib
import dataclasses
import io
import json
import re
import types
from collections.abc import Sequence
from typing import Any

import tyro

from sharpwave.run import plain_json
from sharpwave.run.config import closest
from sharpwave.run.errors import UserError

REGISTRY = tyro.constructors.ConstructorRegistry()


def parse(cls: Any, args: Sequence[str], prog: str, default: Any = None) -> Any:
    """An instance of the dataclass `cls` from command-line arguments.

    `default` is an instance whose values replace the class's defaults. `--help` prints each field's docstring, type and
    default, and exits. A setting given twice takes the last value.

    Raises:
        UserError: an option that does not exist (the closest one is named), a missing value, or one of another type.
        SystemExit: with code 0, after --help.
    """
    given = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with REGISTRY, contextlib.redirect_stderr(printed):
            options, unknown = tyro.cli(
                cls, args=args, prog=prog, return_unknown_args=True, config=(tyro.conf.OmitArgPrefixes,), **given
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_first_section(printed.getvalue())} (see {prog} --help)") from None
    if unknown:
        stray = next((token for token in unknown if token.startswith("-")), unknown[0])
        if not stray.startswith("-"):
            raise UserError(f"unexpected argument {stray!r} (see {prog} --help)")
        name = stray.partition("=")[0].replace("_", "-")
        near = closest(name, [f"--{n}" for n in _option_names(cls)])
        raise UserError(f"unknown option {name}{near or f' (see {prog} --help)'}")
    return options


def _option_names(cls: Any) -> list[str]:
    """Names of all options, those of nested dataclasses included."""
    names = []
    for field in dataclasses.fields(cls):
        inner = getattr(field.type, "__origin__", field.type)  # Annotated[X, ...].__origin__ is X
        if dataclasses.is_dataclass(inner):
            names += _option_names(inner)
        else:
            names.append(field.name.replace("_", "-"))
    return names


def _first_section(box: str) -> str:
    """The message in what tyro printed: a title, then parts between rules, the first of which says what is wrong.

    The rules are a frame's, or dashes alone where the output cannot hold a frame's letters."""
    lines = []
    for line in box.splitlines()[1:]:
        content = line.strip("│ \t")
        if content.strip("─╰╯-"):
            lines.append(content)
        elif lines:
            break
    text = " ".join(" ".join(lines).split()).removeprefix("Error parsing ")
    text = re.sub(r"no type matching (\S+) could be instantiated from \[(.*)\]", r"expected \1, got \2", text)
    text = re.sub(r"^Missing from .*?: (\S+) .*", r"\1 is missing", text)
    return re.sub(r" ([.,])", r"\1", text).rstrip(".") or " ".join(box.split())


@REGISTRY.primitive_rule
def _int(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if info.type is not int:
        return None

    def read(args: list[str]) -> int:
        with contextlib.suppress(ValueError):
            return int(args[0])
        with contextlib.suppress(ValueError):
            if float(args[0]).is_integer():
                return int(float(args[0]))  # 1e6
        raise ValueError(f"expected an integer, got {args[0]!r}")

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, int) and not isinstance(x, bool),
        str_from_instance=lambda x: [str(x)],
    )


@REGISTRY.primitive_rule
def _float(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if info.type is not float:
        return None

    def read(args: list[str]) -> float:
        try:
            return float(args[0])
        except ValueError:
            raise ValueError(f"expected a number, got {args[0]!r}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, int | float) and not isinstance(x, bool),
        str_from_instance=lambda x: [str(x)],
    )


@REGISTRY.primitive_rule
def _none(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if info.type not in (None, types.NoneType):
        return None

    def read(args: list[str]) -> None:
        if args[0].lower() != "none":
            raise ValueError(f"expected none, got {args[0]!r}")

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="none",
        instance_from_str=read,
        is_instance=lambda x: x is None,
        str_from_instance=lambda x: ["none"],
    )


@REGISTRY.primitive_rule
def _table(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A dict with string keys is written k=4 delay=8; a value is JSON (4, 0.5, true, [1, 2]) or else a string."""
    if info.type_origin is not dict:
        return None

    def read(args: list[str]) -> dict[str, Any]:
        table = {}
        for arg in args:
            key, equals, text = arg.partition("=")
            if not equals or not key:
                raise ValueError(f"expected KEY=VALUE, got {arg!r}")
            table[key] = _value(text)
        return table

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda table: [f"{key}={json.dumps(value)}" for key, value in table.items()],
    )


def _value(text: str) -> Any:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return plain_json.loads(text)
    except ValueError:
        return text
