"""Run directories: made once, never overwritten, read back, and held by one process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sharpwave.run import config as configs
from sharpwave.run import rundir
from sharpwave.run.errors import UserError
from tests.run.stub import StubConfig


@pytest.fixture(autouse=True)
def stub(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.ALGORITHMS, "stub", ("tests.run.stub:StubConfig", "tests.run.stub:Stub"))
    monkeypatch.chdir(tmp_path)


CONFIG = StubConfig(env="a/B v1", seed=3, env_kwargs={"k": [1, 2], "x": None}, rate=1e-7, note="n", sizes=(1, 2, 3))


def test_what_is_created_is_read_back(tmp_path):
    path = rundir.create(tmp_path / "deep" / "x", "stub", CONFIG, ["sharpwave", "train"])
    assert rundir.read(path) == ("stub", CONFIG)
    record = json.loads((path / "run.json").read_text())
    assert record["command"] == ["sharpwave", "train"]
    assert record["versions"]["torch"] and record["versions"]["sharpwave"]
    assert record["created"][:2] == "20"


@pytest.mark.parametrize("kind", ["run", "empty", "file"])
def test_an_existing_path_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "run":
        rundir.create(path, "stub", CONFIG, [])
    elif kind == "empty":
        path.mkdir()
    else:
        path.write_text("mine")
    before = {p: p.read_bytes() for p in path.rglob("*")} if path.is_dir() else path.read_bytes()
    advice = ", or continue it with `sharpwave resume" if kind == "run" else "; nothing was overwritten"
    with pytest.raises(UserError, match=f"exists: choose another --run-dir{advice}"):
        rundir.create(path, "stub", replace(CONFIG, seed=9), [])
    assert ({p: p.read_bytes() for p in path.rglob("*")} if path.is_dir() else path.read_bytes()) == before


def test_a_path_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory"):
        rundir.create(tmp_path / "file" / "x", "stub", CONFIG, [])


def test_default_names_say_what_and_when_and_do_not_collide():
    paths = [rundir.create(None, "stub", CONFIG, []) for _ in range(3)]
    assert len(set(paths)) == 3
    for path in paths:
        assert path.parent == Path("runs")
        assert path.name.startswith("stub-a-B-v1-seed3-20")


@pytest.mark.parametrize("name", ["..", "../../x", "a:b/c?"])
def test_an_environments_name_cannot_leave_the_folder(name):
    path = rundir.create(None, "stub", replace(CONFIG, env=name), [])
    assert path.parent == Path("runs") and path.resolve().parent == Path("runs").resolve()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda p: (p / "run.json").unlink(), "is not a run"),
        (lambda p: (p / "config.json").unlink(), "is not a run"),
        (lambda p: (p / "config.json").write_text("{"), "is not valid"),
        (lambda p: (p / "run.json").write_text("[]"), "must hold settings by name"),
        (lambda p: (p / "run.json").write_text("{}"), "names no algorithm"),
        (lambda p: (p / "run.json").write_text('{"algorithm": "x"}'), "unknown algorithm 'x'"),
        (lambda p: (p / "config.json").write_text('{"env": "x", "rat": 1}'), "unknown setting 'rat'.*'rate'"),
        (lambda p: (p / "config.json").write_text('{"env": "x", "epochs": 0}'), "epochs must be >= 1"),
        (lambda p: (p / "config.json").write_text("{}"), "env must be given"),
    ],
)
def test_what_is_not_a_run_is_named(tmp_path, damage, words):
    path = rundir.create(tmp_path / "x", "stub", CONFIG, [])
    damage(path)
    with pytest.raises(UserError, match=words):
        rundir.read(path)


def test_no_such_run():
    with pytest.raises(UserError, match="no run at nowhere"):
        rundir.read(Path("nowhere"))


def test_one_process_at_a_time(tmp_path):
    path = rundir.create(tmp_path / "x", "stub", CONFIG, [])
    code = (
        "import sys; from pathlib import Path; from sharpwave.run import rundir\n"
        "with rundir.lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process"), rundir.lock(path):
            pass
        holder.kill()  # it has no chance to clean up
        holder.wait()
        with rundir.lock(path):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def test_a_run_that_cannot_be_locked(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rundir.filelock.FileLock, "acquire", refuse)
    with (
        pytest.raises(UserError, match=r"cannot write in the run directory .*: Permission denied"),
        rundir.lock(tmp_path),
    ):
        pass
