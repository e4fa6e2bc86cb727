"""Modules of a package as its attributes, imported when they are first asked for (PEP 562)."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any


def submodules(package: str, path: Iterable[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package that holds nothing but modules; names with "_" are left out."""

    def names() -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))

    def get(name: str) -> Any:
        if not name.startswith("_") and name in names():
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, names
