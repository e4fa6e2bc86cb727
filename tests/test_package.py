"""The wheel and the source distribution: what is in them, and that the wheel works where it alone is installed."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sharpwave

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]


def run(*command, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True, **options
    ).stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def test_what_is_in_them(dist):
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert modules <= in_wheel and "sharpwave/py.typed" in in_wheel
    assert {name.split("/")[0] for name in in_wheel} == {"sharpwave", f"sharpwave-{sharpwave.__version__}.dist-info"}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CITATION.cff", "tests/test_package.py", "mkdocs.yml"} <= in_source
    kept = {"src", "tests", "docs", "examples", "benchmarks"}
    assert {name.split("/")[0] for name in in_source if "/" in name} == kept


def test_the_wheel_alone(dist, tmp_path):
    """Installed without its dependencies, which are this environment's, into a folder that comes before all others."""
    (wheel,) = dist.glob("*.whl")
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    there = {**os.environ, "PYTHONPATH": str(site)}
    where = run("-P", "-c", "import sharpwave; print(sharpwave.__file__)", env=there, cwd=tmp_path)
    assert Path(where.strip()).parent == site / "sharpwave"
    assert run("-P", "-m", "sharpwave", "--version", env=there, cwd=tmp_path) == f"sharpwave {sharpwave.__version__}\n"
    assert "CartPole-v1" in run("-P", "-m", "sharpwave", "envs", env=there, cwd=tmp_path)
    script = (site / "bin" / "sharpwave").read_text()
    assert "from sharpwave.cli import main" in script


def test_one_version_everywhere():
    version = sharpwave.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
