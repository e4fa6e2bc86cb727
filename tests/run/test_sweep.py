"""Sweeps: what is searched, how trials end, and that no kill loses one."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sharpwave.cli import main
from sharpwave.run import rundir, runs, spaces, sweep
from sharpwave.run.errors import UserError
from sharpwave.run.sweep import Result, front
from tests.run import fake_train
from tests.run.made import SETTINGS

pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
SPACE = "[lr]\nlow = 1e-4\nhigh = 1.0\nlog = true\n"
OPTIONS = [
    "ppo",
    *(w for k, v in SETTINGS.items() for w in (f"--{k.replace('_', '-')}", str(v))),
    "--total-steps",
    "320",
]


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    def command(arguments, log):
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, fake_train.__file__, *arguments], stdout=out, stderr=out, start_new_session=True
            )

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(sweep, "_command", command)
    monkeypatch.setattr(sweep, "POLL", 0.05)
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(SPACE)


def made(*, space="space.toml", trials=4, prune=False, pace=0.01, **settings):
    from sharpwave.algos.ppo_config import PPOConfig

    config = PPOConfig(**SETTINGS, total_steps=320, vf_coef=pace, **settings)
    return sweep.create(Path("s"), "ppo", config, spaces.read("ppo", Path(space)), space, prune, trials)


def test_a_sweep_finds_what_is_better(capfd):
    assert main(["sweep", *OPTIONS, "--vf-coef", "0.001", "--space", "space.toml", "--trials", "6", "--workers", "2",
                 "--dir", "s", "--no-prune", "--lr", "0.5"]) == 0  # fmt: skip
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "sweep directory: s" and lines[1] == "searching lr: 6 trials, 2 at a time"
    assert sum(line.startswith("trial ") for line in lines) == 6
    results = sweep.Sweep(Path("s")).results()
    assert [r.number for r in results] == list(range(6)) and {r.state for r in results} == {"complete"}
    assert results[0].params == {"lr": 0.5}  # the settings as they were given come first
    for result in results:
        settings = json.loads((Path("s/trials") / f"{result.number:04d}" / "config.json").read_text())
        assert settings["lr"] == result.params["lr"] and settings["seed"] == result.number
        # The score is the mean over ten epochs that rise to the top: 0.1 to 1.0 of it.
        assert result.score == pytest.approx(0.55 * (100 - 20 * abs(math.log10(result.params["lr"]) + 2)))
        assert result.seconds == 1.0
    best = max(results, key=lambda r: r.score)
    assert lines[-1].startswith(
        f"train with the best settings: sharpwave train ppo --config s/trials/{best.number:04d}/"
    )
    assert Path("s/pareto.svg").read_text().startswith("<?xml")
    assert len(runs.find([Path("s")])) == 6  # ordinary runs


def test_more_trials_later(capfd):
    assert made(trials=2).run(2, 1)
    first = sweep.Sweep(Path("s")).results()
    assert main(["sweep", "--resume", "s"]) == 0
    assert sweep.Sweep(Path("s")).results() == first
    assert main(["sweep", "--resume", "s", "--trials", "5", "--workers", "3"]) == 0
    results = sweep.Sweep(Path("s")).results()
    assert results[:2] == first and len(results) == 5
    assert len({r.params["lr"] for r in results}) == 5  # the sampler does not begin again where it began


def test_a_trial_that_falls_behind_is_stopped_early():
    Path("space.toml").write_text("[lr]\nchoices = [0.01, 1.0]\n")
    opened = made(prune=True, pace=0.05)
    results = []
    opened.run(10, 2, report=results.append)
    states = {lr: {r.state for r in results if r.params["lr"] == lr} for lr in (0.01, 1.0)}
    assert states[0.01] == {"complete"}
    assert "pruned" in states[1.0], results
    for result in results:
        if result.state == "pruned":
            run = runs.read(opened.run_dir(result.number))
            assert run.status == "stopped" and run.epoch < fake_train.EPOCHS


def test_trials_that_fail_say_why():
    Path("space.toml").write_text("[hidden]\nchoices = [13, 14, 16]\n")
    results = []
    assert made(hidden=16).run(8, 2, report=results.append)
    by_state = {r.params["hidden"]: (r.state, r.why) for r in results}
    assert by_state[16] == ("complete", "")
    assert by_state.get(13, ("failed", "13 is unlucky")) == ("failed", "13 is unlucky")
    assert by_state.get(14, ("failed", "no"))[1].startswith("no")
    assert sum(r.state == "failed" for r in results) > 0


def test_a_sweep_whose_first_trials_all_fail_ends():
    Path("space.toml").write_text("[hidden]\nchoices = [13]\n")
    with pytest.raises(UserError, match="the first 5 trials failed, the last with: 13 is unlucky; see s/trials"):
        made(hidden=13).run(50, 2)
    assert len(sweep.Sweep(Path("s")).results()) < 10


class Stop:
    requested = False


def running(opened, *arguments, **options):
    thread = threading.Thread(target=opened.run, args=arguments, kwargs=options)
    thread.start()
    return thread


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stop_keeps_what_was_trained():
    opened, stop = made(pace=0.1, trials=2), Stop()
    thread = running(opened, 2, 2, stop=stop)
    wait_for(lambda: all(runs.tail(opened.run_dir(i), 1)[0] for i in range(2)))
    stop.requested = True
    thread.join()
    before = [runs.read(opened.run_dir(i)) for i in range(2)]
    assert [r.status for r in before] == ["stopped", "stopped"]
    assert [r.state for r in opened.results()] == ["running", "running"]
    assert sweep.Sweep(Path("s")).run(2, 2)
    results = opened.results()
    assert [r.state for r in results] == ["complete", "complete"]
    # They went on from where they stopped: each has ten lines, and none twice.
    for i in range(2):
        lines = [json.loads(text)["epoch"] for text in (opened.run_dir(i) / "metrics.jsonl").read_text().splitlines()]
        assert lines == list(range(1, 11))


def kill_training(opened, number):
    os.kill(int((opened.run_dir(number) / "pid").read_text()), signal.SIGKILL)


CONDUCT = """
import sys
from pathlib import Path
from tests.run import fake_train
from sharpwave.run import sweep
import subprocess
def command(arguments, log):
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, fake_train.__file__, *arguments], stdout=out, stderr=out, start_new_session=True)
sweep._command, sweep.POLL = command, 0.05
sweep.Sweep(Path("s")).run(2, 2)
"""  # noqa: E501


@pytest.mark.parametrize("trainings_die", [False, True])
def test_a_killed_conductor_loses_nothing(trainings_die):
    opened = made(pace=0.07, trials=2)
    conductor = subprocess.Popen([sys.executable, "-c", CONDUCT])
    wait_for(lambda: all(runs.tail(opened.run_dir(i), 1)[0] for i in range(2)))
    conductor.kill()
    conductor.wait()
    with (Path("s") / sweep.JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code": 5, "cut sho')  # as a kill in the middle of a write leaves it
    lock = Path("s/journal.log.lock")
    if not os.path.lexists(lock):
        lock.symlink_to("journal.log")
    if trainings_die:
        for i in range(2):
            kill_training(opened, i)
    with opened._lock():
        assert not os.path.lexists(lock)  # Optuna would wait half a minute for a lock that nobody holds
    assert sweep.Sweep(Path("s")).run(2, 2)
    results = opened.results()
    assert [r.state for r in results] == ["complete"] * 2
    for i in range(2):
        lines = [json.loads(text)["epoch"] for text in (opened.run_dir(i) / "metrics.jsonl").read_text().splitlines()]
        assert lines == list(range(1, 11))


def test_a_killed_training_goes_on_from_its_checkpoint():
    opened = made(pace=0.07, trials=1)
    thread = running(opened, 1, 1)
    wait_for(lambda: len(runs.tail(opened.run_dir(0), 10)[0]) >= 3)
    kill_training(opened, 0)
    thread.join()
    (result,) = opened.results()
    assert result.state == "complete"


@pytest.mark.parametrize(
    "line", [b"garbage\n", b"{}\n", b"[1]\n", b'{"op_code": 99}\n', b'{"op_code": 4, "trial_id": 77}\n']
)
def test_a_damaged_journal_is_one_line(line, capfd):
    assert made(trials=1).run(1, 1)
    journal = Path("s") / sweep.JOURNAL
    journal.write_bytes(line + journal.read_bytes())
    before = journal.read_bytes()
    assert main(["sweep", "--resume", "s", "--trials", "2"]) == 2
    err = capfd.readouterr().err
    assert "s/journal.log is damaged" in err and err.count("\n") == 1
    assert journal.read_bytes() == before


def test_two_conductors_do_not_share_a_sweep():
    opened = made()
    with rundir.lock(Path("s")), pytest.raises(UserError, match="s is conducted by another process"):
        opened.run(1, 1)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "the search space is empty"),
        ("[lrr]\nlow = 0\nhigh = 1", "setting 'lrr' is unknown: did you mean 'lr'?"),
        ("[seed]\nlow = 0\nhigh = 1", "setting 'seed' cannot be searched"),
        ("[threads]\nchoices = [1, 2]", "setting 'threads' cannot be searched"),
        ("[lr]\nlow = 0.1", "[lr] has low but no high"),
        ("[lr]\nhigh = 0.1", "[lr] must hold low and high"),
        ("[lr]\nlow = 0.1\nhigh = 0.01", "low must not be above high"),
        ("[lr]\nlow = 0\nhigh = 0.1\nlog = true", "low must be above 0 with log = true; got 0.0"),
        ("[lr]\nlow = 0.1\nhigh = inf", "both be finite"),
        ("[lr]\nlow = 0.1\nhigh = 1\nlog = 1", "log must be true or false; got 1"),
        ("[lr]\nlow = 'a'\nhigh = 1", "lr must be a number"),
        ("[lr]\nlow = 0.1\nhigh = 1\nstep = 2", "must hold low and high"),
        ("lr = 3", "[lr] must hold low and high (and log = true), or choices; it holds 3"),
        ("[hidden]\nlow = 1.5\nhigh = 2", "hidden must be an integer"),
        ("[hidden]\nchoices = []", "choices must be a list of at least one value"),
        ("[hidden]\nchoices = [64, 'x']", "hidden must be an integer"),
        ("[encoder]\nlow = 1\nhigh = 2", "is no number: give choices"),
        ("[encoder]\nchoices = ['rnn']", "encoder must be one of"),
        ("[env_kwargs]\nchoices = [{k = 1}]", "choices must be numbers, strings, true or false"),
        ("[lr", "is not valid"),
    ],
)
def test_spaces_that_are_refused(text, words, capfd):
    Path("space.toml").write_text(text)
    assert main(["sweep", *OPTIONS, "--space", "space.toml", "--dir", "s"]) == 2
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1
    assert not Path("s").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "an algorithm is missing: sharpwave sweep ppo --env NAME"),
        ("ppo", "an environment is missing"),
        ("pp", "unknown algorithm 'pp': did you mean 'ppo'?"),
        ("ppo --env CartPole-v1 --trials 0", "--trials must be at least 1; got 0"),
        ("ppo --env CartPole-v1 --workers 0", "--workers must be at least 1; got 0"),
        ("ppo --env CartPole-v1 --space none.toml", "cannot read the config file none.toml"),
        ("ppo --env CartPole-v1 --dir taken", "taken exists: choose another --dir"),
        ("ppo --env CartPole-v1 --dir file/x", "cannot make the sweep directory file/x"),
        ("--resume nowhere", "no sweep at nowhere"),
        ("--resume broken", "broken/sweep.json is not a file that sharpwave wrote"),
        ("--resume", "Missing value for argument '--resume'"),
    ],
)
def test_what_is_refused(arguments, words, capfd):
    Path("taken").mkdir()
    Path("file").write_text("x")
    Path("broken").mkdir()
    Path("broken/sweep.json").write_text("{}")
    assert main(["sweep", *arguments.split()]) == 2
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


def test_without_optuna(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", *OPTIONS, "--dir", "s"]) == 2
    assert "sweeps need Optuna: pip install 'sharpwave[sweep]'" in capfd.readouterr().err
    assert not Path("s").exists()


def test_every_default_space_is_valid_and_holds_the_defaults():
    from sharpwave.run import config as configs

    for algorithm, tables in spaces.DEFAULTS.items():
        default = configs.config_class(algorithm)(env="x")
        for dimension in spaces.build(algorithm, tables, "defaults"):
            assert getattr(default, dimension.name) in dimension, dimension


def test_the_front_is_what_no_trial_beats_in_both():
    def result(number, score, seconds, state="complete"):
        return Result(number, state, score, seconds, {})

    results = [result(0, 10, 5), result(1, 8, 6), result(2, 12, 9), result(3, 12, 8), result(4, 99, 1, "pruned")]
    # 1 is slower and worse than 0; 2 is as good as 3 and slower; 4 was not trained to its end.
    assert [r.number for r in front(results)] == [0, 3]
    assert front([]) == []


@pytest.mark.long
def test_a_real_sweep(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sharpwave", "sweep", *OPTIONS, "--trials", "1", "--hidden", "8"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "best of " in done.stdout
