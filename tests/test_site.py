"""The site builds, with every link and anchor in it checked, and holds what the pages promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "-d", str(tmp_path)], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def page(name):
        return re.sub(r"<[^>]+>", "", (tmp_path / name / "index.html").read_text())

    assert "--gae-lambda FLOAT" in page("reference/commands")
    assert 'id="sharpwave.ops.cdf.build_cdf"' in (tmp_path / "reference/ops/index.html").read_text()
    assert "Inclusive prefix sum" in page("reference/ops")
    assert "examples/dqn_per.py is a whole Double DQN" in page("replay")
    for image in ("dashboard.svg", "cartpole.svg", "cartpole.gif"):
        assert (tmp_path / "img" / image).stat().st_size > 1000


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert pages == listed, "add a page to mkdocs.yml under nav, or take one out"
