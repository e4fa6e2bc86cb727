"""Reading runs that others made, are making, or broke; and `sharpwave runs`."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sharpwave.cli import main
from sharpwave.run import rundir, runs
from sharpwave.run.errors import UserError
from tests.run.made import make_run


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_what_a_run_came_to():
    run = runs.read(make_run(Path("runs/a"), [10.0, 20.0], seed=3))
    assert (run.status, run.problem, run.algorithm, run.env, run.seed) == (
        "complete",
        "",
        "ppo",
        "sharpwave/CartPole",
        3,
    )
    assert (run.epoch, run.num_epochs, run.step, run.checkpoint) == (2, 2, 64, 64)
    assert run.sps == 16  # 64 steps in 4 s
    assert run.last_return == 15


def test_ranks_share_the_steps_and_tell_runs_apart():
    path = make_run(Path("runs/a"), [10.0, 20.0], total_steps=4 * 32)
    assert runs.read(path).num_epochs == 4
    record = json.loads((path / rundir.RUN).read_text())
    (path / rundir.RUN).write_text(json.dumps(record | {"ranks": 2}))
    run = runs.read(path)
    assert (run.status, run.num_epochs, run.settings["ranks"]) == ("complete", 2, 2)


def test_the_return_is_of_the_last_ten_lines_and_of_episodes_that_ended():
    values = [1000.0] * 5 + [math.nan] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0]
    assert runs.read(make_run(Path("a"), values, total_steps=3200)).last_return == 3
    assert math.isnan(runs.read(make_run(Path("b"), [math.nan])).last_return)


def test_episodes_weigh_equally_in_the_return():
    path = make_run(Path("a"), [])
    lines = [
        {"step": 32 * i, "epoch": i, "episode/return": r, "episode/count": n} for i, r, n in ((1, 10, 1), (2, 40, 3))
    ]
    (path / rundir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.read(path).last_return == (10 + 3 * 40) / 4


@pytest.mark.parametrize("length", [1, 9, 10, 11, 300])
def test_the_tail_is_the_end_of_the_whole(length):
    path = make_run(Path("a"), [float(i) for i in range(length)], total_steps=32 * length)
    whole = [json.loads(text) for text in (path / rundir.METRICS).read_text().splitlines()]
    assert runs.tail(path, 10) == (whole[-10:], 0)


def test_lines_longer_than_the_first_guess():
    path = make_run(Path("a"), [])
    whole = [{"step": i, "epoch": i, "x" * 9000: 1.0} for i in range(12)]
    (path / rundir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in whole))
    assert runs.tail(path, 10) == (whole[-10:], 0)


def test_a_line_that_is_being_written_is_not_there_yet():
    path = make_run(Path("a"), [10.0, 20.0])
    with (path / rundir.METRICS).open("a") as file:
        file.write('{"step": 96, "epo')
    run = runs.read(path)
    assert (run.step, run.problem) == (64, "")


DAMAGED = [
    "garbage",
    "[1]",
    "3",
    "null",
    "{}",
    '{"step": 64, "epoch": 2, "nonfinite": 7}',
    '{"step": NaN, "epoch": 2}',
    '{"step": 64, "epoch": Infinity}',
    '{"step": 64, "epoch": 1e308}',
    '{"step": -1, "epoch": 2}',
    '{"step": 99999999999999999999, "epoch": 2}',
    '{"step": 64, "epoch": 2, "episode/return": "x\\ud800"}',
    '{"step": 64, "epoch": 2, "episode/return": [1]}',
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_lines_are_left_out_and_said(damaged, capfd):
    path = make_run(Path("a"), [10.0])
    with (path / rundir.METRICS).open("a") as file:
        file.write(damaged + "\n")
    run = runs.read(path)
    assert (run.step, run.elapsed, run.last_return) == (32, 2, 10)
    assert run.problem == "metrics.jsonl holds lines that sharpwave did not write"
    for options in ([], ["--json"], ["--compare"], ["--sort", "return"]):
        assert main(["runs", "a", *options]) == 0


@pytest.mark.parametrize("value", ["1e400", "null", "-1e400", '0, "nonfinite": {"time/elapsed": "nan"}'])
def test_numbers_that_are_none(value):
    path = make_run(Path("a"), [10.0])
    line = f'{{"step": 64, "epoch": 2, "episode/return": {value.split(",")[0]}, "time/elapsed": {value}}}'
    (path / rundir.METRICS).write_text(line + "\n")
    run = runs.read(path)
    assert (run.step, run.elapsed) == (64, 0) and not math.isinf(run.last_return)
    assert main(["runs", "a"]) == 0


def test_things_in_the_place_of_files(capfd):
    for name in (rundir.METRICS, rundir.RUN, rundir.CONFIG):
        path = make_run(Path("runs") / name.replace(".", "-"))
        (path / name).unlink()
        (path / name).mkdir()
    path = make_run(Path("runs/noise"))
    (path / rundir.METRICS).write_bytes(bytes(range(256)) * 2000)
    path = make_run(Path("runs/config"))
    (path / rundir.CONFIG).write_text('{"env": ["x"], "seed": "zero", "hidden": {}, "total_steps": -5}')
    path = make_run(Path("runs/record"))
    (path / rundir.RUN).write_text('{"algorithm": 5}')
    make_run(Path("runs/new\nline"))
    (Path("runs") / "loop").symlink_to(".")
    (Path("runs") / "dead").symlink_to("nowhere")
    for options in ([], ["--json"], ["--compare"], ["--sort", "step"]):
        assert main(["runs", *options]) == 0
    assert main(["plot"]) == 0
    assert capfd.readouterr().err == ""


def test_status(tmp_path):
    assert runs.read(make_run(Path("new"), [])).status == "new"
    assert runs.read(make_run(Path("stopped"), [1.0])).status == "stopped"
    assert runs.read(make_run(Path("killed"), [1.0, 2.0], checkpoint=False)).status == "stopped"
    path = make_run(Path("failed"), [])
    (path / rundir.FAILURE).write_text("the simulator has gone away\n")
    assert (runs.read(path).status, runs.read(path).problem) == ("failed", "the simulator has gone away")
    path = make_run(Path("running"), [1.0])
    with rundir.lock(path):
        seen = subprocess.run([sys.executable, "-m", "sharpwave", "runs", "--json", "running"], stdout=-1, check=True)
        assert json.loads(seen.stdout)[0]["status"] == "running"
    assert runs.read(path).status == "stopped"


def test_looking_does_not_stop_a_run_from_starting():
    path = make_run(Path("a"), [1.0])
    with rundir.lock(path):
        pass
    with (path / rundir.LOCK).open("rb") as file:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        import threading

        timer = threading.Timer(0.2, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        timer.start()
        with rundir.lock(path):  # waits for the one that looks
            pass
        timer.join()


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda p: (p / "run.json").unlink(), "no run.json"),
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read: it is not JSON"),
        (lambda p: (p / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read: it is not JSON"),
        (lambda p: (p / "run.json").write_text("[]"), "run.json is not what sharpwave wrote"),
    ],
)
def test_broken_runs_are_listed_as_such(spoil, problem, capfd):
    make_run(Path("runs/whole"))
    spoil(make_run(Path("runs/spoilt")))
    run = runs.read(Path("runs/spoilt"))
    assert (run.status, run.problem) == ("broken", problem)
    assert main(["runs"]) == 0
    out = capfd.readouterr().out
    assert "runs/whole   complete" in out and f"runs/spoilt: {problem}" in out


def test_settings_of_another_version_are_no_fault():
    path = make_run(Path("a"))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "a_later_setting": 1}))
    run = runs.read(path)
    assert (run.status, run.num_epochs, run.last_return) == ("stopped", None, 15)


def test_runs_are_found_once_and_in_order(tmp_path):
    for name in ("b", "a", "deep/er/c"):
        make_run(Path("runs") / name)
    make_run(Path("runs/a/checkpoints/inner"))  # what is inside a run is no run
    make_run(Path("runs/.hidden/x"))
    make_run(Path("runs/too/deep/to/see"))
    found = runs.find([Path("runs"), Path("runs/b"), tmp_path / "runs"])
    assert found == [Path("runs/a"), Path("runs/b"), Path("runs/deep/er/c")]


@pytest.mark.parametrize(
    "path, words", [("nowhere", "no run at nowhere"), ("file", "no run at file"), (".", "no run in .")]
)
def test_nothing_there(path, words, capfd):
    Path("file").write_text("x")
    with pytest.raises(UserError, match=words):
        runs.find([Path(path)])
    assert main(["runs", path]) == 2
    assert words in capfd.readouterr().err
    assert main(["runs"]) == 2


def test_an_experiment_is_what_the_seed_does_not_change():
    read = {name: runs.read(make_run(Path(name), **s)) for name, s in
            {"a": {}, "b": {"seed": 1, "threads": 2, "log_interval": 5}, "c": {"hidden": 64}}.items()}  # fmt: skip
    assert runs.experiment(read["a"]) == runs.experiment(read["b"]) != runs.experiment(read["c"])
    assert runs.differences([read["a"], read["c"]]) == {"hidden": [128, 64]}


def test_a_run_from_before_a_setting_was_there_is_of_the_same_experiment():
    old, new = make_run(Path("old")), make_run(Path("new"))
    settings = json.loads((old / "config.json").read_text())
    del settings["ent_coef"]
    (old / "config.json").write_text(json.dumps(settings))
    found = [runs.read(old), runs.read(new)]
    assert runs.experiment(found[0]) == runs.experiment(found[1]) and runs.differences(found) == {}


def test_the_listing(capfd):
    make_run(Path("runs/[red]x"), [10.0, 20.0], seed=7)
    make_run(Path("runs/y"), [math.nan], hidden=64)
    assert main(["runs", "--compare"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "algo", "env", "seed", "steps", "done", "SPS", "time", "return"]
    assert lines[1].split() == [
        "runs/[red]x",
        "complete",
        "ppo",
        "sharpwave/CartPole",
        "7",
        "64",
        "100%",
        "16",
        "4s",
        "15",
    ]
    assert lines[2].split() == ["runs/y", "stopped", "ppo", "sharpwave/CartPole", "0", "32", "50%", "16", "2s", "-"]
    assert [line.split() for line in lines[4:]] == [["run", "seed", "hidden"], ["[red]x", "7", "128"], ["y", "0", "64"]]


def test_equal_settings_are_said(capfd):
    make_run(Path("runs/a"))
    make_run(Path("runs/b"))
    assert main(["runs", "--compare"]) == 0
    assert capfd.readouterr().out.endswith("their settings are equal\n")


def test_json_is_json(capfd):
    run = make_run(Path("runs/a"), [math.nan])
    settings = json.loads((run / rundir.CONFIG).read_text())
    (run / rundir.CONFIG).write_text(json.dumps(settings | {"env_kwargs": {"x": [math.inf]}}))
    assert main(["runs", "--json"]) == 0
    (run,) = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert (run["path"], run["status"], run["last_return"], run["sps"]) == ("runs/a", "stopped", None, 16)
    assert (run["settings"]["hidden"], run["settings"]["env_kwargs"]) == (128, {"x": [None]})


@pytest.mark.parametrize(
    "sort, order", [("name", "abc"), ("return", "bac"), ("step", "cab"), ("sps", "bac"), ("created", "abc")]
)
def test_order(sort, order, capfd):
    make_run(Path("runs/a"), [10.0, 20.0], seconds=4.0)
    make_run(Path("runs/b"), [30.0], seconds=2.0)
    make_run(Path("runs/c"), [math.nan] * 3, seconds=8.0, total_steps=96)
    assert main(["runs", "--sort", sort, "--json"]) == 0
    assert "".join(run["path"][-1] for run in json.loads(capfd.readouterr().out)) == order


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything")
def test_a_folder_without_permissions():
    make_run(Path("runs/a"))
    secret = make_run(Path("runs/b/c")).parent
    secret.chmod(0)
    try:
        assert runs.find([Path("runs")]) == [Path("runs/a")]
    finally:
        secret.chmod(0o755)


def test_reading_writes_nothing_and_needs_no_torch():
    make_run(Path("runs/a"))
    before = {p: p.stat().st_mtime_ns for p in Path().rglob("*")}
    code = "import sys; from sharpwave.cli import main; sys.exit(main(['runs']) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert {p: p.stat().st_mtime_ns for p in Path().rglob("*")} == before
