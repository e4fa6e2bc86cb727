"""What README, CONTRIBUTING and docs/ show: Python is run, commands are accepted, links and targets exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed import run as torch_run

from sharpwave import cli
from sharpwave.cli import COMMANDS, _trainers, bench
from sharpwave.cli.doctor import Doctor
from sharpwave.cli.envs import Envs
from sharpwave.cli.parity import Parity
from sharpwave.cli.plot import Plot
from sharpwave.cli.runs import Runs
from sharpwave.run import config as configs
from sharpwave.run import loop, options, rundir, sweep, threads
from tests.test_cli import LAST_LINE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def commands() -> list[str]:
    """Every command line shown: in fenced sh blocks, in indented ones, and `sharpwave ...` within text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
        lines += re.findall(r"^ {4}((?:make|sharpwave|pip|torchrun) .*)$", text, re.MULTILINE)
        lines += re.findall(r"`((?:make|sharpwave|pip|torchrun) [^`]+)`", text)
        found += [line.split("  #")[0].strip() for line in lines if line.strip()]
    return sorted(set(found))


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    with threads.use(1):
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_says_what_it_is(page):
    kinds = {kind for kind, _ in FENCE.findall(page.read_text())}
    assert kinds <= {"python", "sh", "text", "toml"}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_settings_files_are_valid(page, tmp_path):
    for block in blocks(page, "toml"):
        file = tmp_path / "c.toml"
        file.write_text(block)
        algorithm = "dqn" if page.stem == "dqn" else "ppo"
        settings, _ = configs.layers(algorithm, file, None)
        configs.build(algorithm, settings, str(file))


# Commands whose line is only read here, for their work has its own tests.
ONLY_READ = {"doctor": Doctor, "envs": Envs, "parity": Parity, "plot": Plot, "runs": Runs}


class Accepted(Exception):
    """A command got as far as its work."""


@pytest.mark.parametrize("line", commands())
def test_commands_are_accepted(line, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    program, *args = shlex.split(line)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in args:
            name = word.split("=")[0]
            assert re.search(rf"^{name} *\?=" if "=" in word else rf"^{name}:", makefile, re.MULTILINE), word
        return
    if program == "pip":
        assert args[:1] == ["install"]
        extras = re.findall(r"\[(\w+)\]", line)
        assert all(
            re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras
        )
        return
    if program == "torchrun":
        options_of_torchrun = torch_run.get_args_parser().parse_args(args)
        assert options_of_torchrun.module and options_of_torchrun.training_script == "sharpwave"
        program, args = "sharpwave", options_of_torchrun.training_script_args
    assert program == "sharpwave"
    if (
        "COMMAND" in args
        or args in ([], ["train", "ppo"], ["train", "dqn"])
        or (len(args) == 1 and args[0] in COMMANDS and args[0] not in ONLY_READ)
    ):
        return  # a command's name alone, in a sentence

    def accept(*_args, **_kwargs):
        raise Accepted

    for module, name in ((_trainers, "make"), (rundir, "read"), (loop, "newest"), (sweep, "create"), (sweep, "Sweep")):
        monkeypatch.setattr(module, name, accept)
    for name in ("file.toml", "c.toml", "space.toml"):
        Path(name).write_text("[lr]\nlow = 0.01\nhigh = 0.1" if name == "space.toml" else "")
    if args[0] == "bench" and "--help" not in args:
        module, cls, _ = bench.BENCHMARKS[args[1]]
        options.parse(getattr(importlib.import_module(module), cls), args[2:], f"sharpwave bench {args[1]}")
        return
    if args[0] in ONLY_READ and "--help" not in args:
        options.parse(ONLY_READ[args[0]], args[1:], f"sharpwave {args[0]}")
    elif args[0] == "info" or "--help" in args or "--version" in args:
        assert cli.main(args) == 0
    else:
        with pytest.raises(Accepted):
            cli.main(args)
    assert capsys.readouterr().err == ""


def test_the_output_in_the_readme_is_what_is_printed():
    lines = blocks(ROOT / "README.md", "text")[0].splitlines()
    assert re.fullmatch(r"sharpwave \S+: ppo CartPole-v1 seed 0 on cpu", lines[0])
    assert re.fullmatch(r"run directory: runs/ppo-CartPole-v1-seed0-\d{8}-\d{6}", lines[1])
    assert any(re.match(r"epoch \d+/\d+  step [\d,]+  SPS \S+  return ", line) for line in lines)
    assert lines[-2].startswith("evaluate again with: sharpwave eval runs/ppo-CartPole-v1-seed0-")
    assert LAST_LINE.fullmatch(lines[-1])[1] == "100"
    assert float(re.search(r"mean return ([\d.]+)", lines[-1])[1]) >= 475
