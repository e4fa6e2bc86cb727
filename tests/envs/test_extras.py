"""Families of environments: what is said to be installed can be made, and every extra exists."""

import tomllib
from pathlib import Path

import pytest

from sharpwave import envs
from sharpwave.envs import extras

KNOWN = {family.name: family for family in envs.families()}
SLOW = {"Craftax"}  # compiles for a minute


@pytest.mark.parametrize("family", KNOWN.values(), ids=KNOWN)
def test_what_is_installed_can_be_made(family):
    assert family.installed or (family.extra is not None and family.version is None)
    if not family.installed:
        pytest.skip(f"{family.extra} is not installed")
    assert family.version
    for name in family.examples if family.name not in SLOW else ():
        envs.make(name, 2).close()


def test_extras_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {family.extra for family in KNOWN.values()} - {None} <= project["optional-dependencies"].keys()


def test_what_is_missing_is_not_installed(monkeypatch):
    monkeypatch.setattr(extras, "_FAMILIES", [("x", "mine", ("no_such_module",), "none", ("x/y",))])
    assert envs.families() == [extras.Family("x", "mine", False, None, ("x/y",))]
    message = r"No module named 'no_such_module': pip install 'sharpwave\[mine\]'"
    with pytest.raises(ImportError, match=message), extras.needs("mine"):
        import no_such_module  # noqa: F401
