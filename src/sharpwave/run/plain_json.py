"""JSON as the standard has it: without NaN and infinities, and with an error where a text is nested too deeply."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, indent: int | None = 2) -> str:
    """`value` as JSON; numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def loads(text: str | bytes, **options: Any) -> Any:
    """As `json.loads`; ValueError also where the text is nested too deeply to be read."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def nonfinite(value: Any, name: str) -> tuple[str, float] | None:
    """The first number in `value` that is NaN or infinite, and its place below `name`."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (name, value)
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = (nonfinite(inner, f"{name}.{key}") for key, inner in items)
    return next((odd for odd in found if odd is not None), None)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
