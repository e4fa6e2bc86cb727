"""The command: what it prints and returns, what it refuses, and that it refuses in one line."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

import sharpwave
from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.cli import COMMANDS, _trainers, main
from sharpwave.envs import EnvFault
from sharpwave.ops import _backends
from sharpwave.run import checkpoint, evaluate, info, loop, options, parity, presets, rundir
from sharpwave.run import config as configs
from sharpwave.run.errors import UserError
from tests.run import stub

LAST_LINE = re.compile(r"mean return -?\d+\.\d, std \d+\.\d, (\d+) episodes")
SMALL = ["--num-envs", "4", "--horizon", "8", "--minibatch", "16", "--total-steps", "64", "--hidden", "16"]
TRAIN_STUB = ["train", "stub", "--env", "sharpwave/CartPole", "--eval-episodes", "2"]


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.ALGORITHMS, "stub", ("tests.run.stub:StubConfig", "tests.run.stub:Stub"))
    monkeypatch.chdir(tmp_path)


def files(folder: Path):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capfd, *argv: str) -> str:
    """The message of a command that must fail as all user errors do, and change nothing on the disk."""
    before = files(Path())
    capfd.readouterr()
    code = main([str(a) for a in argv])
    out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("sharpwave: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert files(Path()) == before
    return err.removeprefix("sharpwave: error: ").rstrip("\n")


# What a user may get wrong on the command line of `train ppo`, and the words that say what to do about it.
BAD_TRAIN = [
    ("", "give --env NAME, e.g. --env CartPole-v1"),
    ("--env", "--env"),
    ("--env NoSuchEnv-v0", "unknown environment 'NoSuchEnv-v0'"),
    ("--env CartPole-v9", "did you mean 'CartPole-v1'"),
    ("--env sharpwave/CartPol", "did you mean 'sharpwave/CartPole'"),
    (
        "--env CartPole-v1 --env-kwargs x=[1,Infinity]",
        "--env-kwargs.x.1 must be finite; got inf: settings are kept as JSON",
    ),
    ("--env CartPole-v1 --env-kwargs nonsense=1", "CartPole-v1 does not take these options"),
    ("--env CartPole-v1 --env-kwargs nonsense", "--env-kwargs: expected KEY=VALUE, got 'nonsense'"),
    ("--env CartPole-v1 --lr 0", "--lr must be above 0 and finite; got 0.0"),
    ("--env CartPole-v1 --lr nan", "--lr must be above 0 and finite; got nan"),
    ("--env CartPole-v1 --gamma 1.5", "--gamma must be in [0, 1]; got 1.5"),
    ("--env CartPole-v1 --num-envs 0", "--num-envs must be at least 1; got 0"),
    ("--env CartPole-v1 --horizon -3", "--horizon must be at least 1; got -3"),
    ("--env CartPole-v1 --seed -1", "--seed must be in [0, 2^63); got -1"),
    ("--env CartPole-v1 --checkpoint-interval 0", "--checkpoint-interval must be at least 1; got 0"),
    ("--env CartPole-v1 --minibatch 100", "--minibatch must be a multiple of --horizon 64"),
    ("--env CartPole-v1 --total-steps 4095", "--total-steps must be at least one batch of 4096"),
    ("--env CartPole-v1 --lr fast", "--lr: expected a number, got 'fast'"),
    ("--env CartPole-v1 --horizon 6.5", "--horizon: expected an integer, got '6.5'"),
    ("--env CartPole-v1 --num-envs many", "--num-envs: expected none|INT, got 'many'"),
    ("--env CartPole-v1 --lr-schedule linear", "invalid choice 'linear' for argument '--lr-schedule'"),
    ("--env CartPole-v1 --lr", "Missing value for argument '--lr'"),
    ("--env CartPole-v1 --learning-rate 0.1", "unknown option --learning-rate: did you mean '--lr'?"),
    ("--env CartPole-v1 --n_steps 8", "unknown option --n-steps: did you mean '--horizon'?"),
    ("--env CartPole-v1 --config table.toml", "table.toml: there is no table [ppo]: settings stand at the top level"),
    ("--env CartPole-v1 --horizn 8", "unknown option --horizn: did you mean '--horizon'?"),
    ("--env CartPole-v1 --gae_lamda=0.9", "unknown option --gae-lamda: did you mean '--gae-lambda'?"),
    ("--env CartPole-v1 stray", "unexpected argument 'stray'"),
    ("--env CartPole-v1 --device gpu", "--device gpu cannot be used here; these can: auto, cpu"),
    ("--env CartPole-v1 --device cuda:99", "--device cuda:99 cannot be used here; these can: auto, cpu"),
    ("--env CartPole-v1 --config none.toml", "cannot read the config file none.toml: No such file"),
    ("--env CartPole-v1 --config broken.toml", "the config file broken.toml is not valid"),
    ("--env CartPole-v1 --config typo.toml", "typo.toml: unknown setting 'horizn': did you mean 'horizon'?"),
    ("--env CartPole-v1 --config range.toml", "--gamma must be in [0, 1]; got 2.0"),
    ("--env CartPole-v1 --run-dir taken", "run directory taken exists: choose another --run-dir; nothing"),
    ("--env CartPole-v1 --run-dir broken.toml/x", "cannot make the run directory broken.toml/x"),
]


@pytest.mark.parametrize("arguments, words", BAD_TRAIN, ids=[a or "nothing" for a, _ in BAD_TRAIN])
def test_bad_input_to_train(capfd, arguments, words):
    Path("broken.toml").write_text("horizon = ")
    Path("typo.toml").write_text("horizn = 8")
    Path("range.toml").write_text("gamma = 2")
    Path("table.toml").write_text("[ppo]\nlr = 0.1")
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    assert words in refused(capfd, "train", "ppo", *arguments.split())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "a command is missing: train, resume, eval, "),
        ("trian", "unknown command 'trian': did you mean 'train'?"),
        ("xyz", "unknown command 'xyz': choose train or resume or eval or "),
        ("--verbose", "unknown command '--verbose'"),
        ("train", "an algorithm is missing: sharpwave train ppo --env NAME"),
        ("train --env CartPole-v1", "an algorithm is missing"),
        ("train pp", "unknown algorithm 'pp': did you mean 'ppo'?"),
        ("train sarsa", "unknown algorithm 'sarsa': choose ppo or dqn"),
        ("train dqn --env CartPole-v1 --lr fast", "--lr: expected a number, got 'fast'"),
        (
            "train dqn --env CartPole-v1 --epsilon-ends 1",
            "unknown option --epsilon-ends: did you mean '--epsilon-end'?",
        ),
        ("train dqn --env CartPole-v1 --gamma 2", "--gamma must be in [0, 1]; got 2.0"),
        ("train dqn --env Pendulum-v1", "dqn needs one discrete action"),
        ("resume", "PATH is missing (see sharpwave resume --help)"),
        ("resume nowhere", "no run at nowhere: give a directory that `sharpwave train` made"),
        ("resume folder", "folder is not a run"),
        ("eval", "PATH is missing (see sharpwave eval --help)"),
        ("eval nowhere", "no run at nowhere"),
        ("eval folder --episodes 0", "--episodes must be at least 1; got 0"),
        ("eval folder --episodes ten", "--episodes: expected an integer, got 'ten'"),
        ("eval folder --episods 3", "unknown option --episods: did you mean '--episodes'?"),
        ("eval folder other", "unexpected argument 'other'"),
        ("info --all", "unknown option --all"),
        ("parity", "an op is missing: sharpwave parity cdf or mingru or "),
        ("bench", "what to measure is missing: sharpwave bench train or dqn"),
        ("bench dnq", "unknown 'dnq': did you mean 'dqn'?"),
        ("bench dqn --batch-size 0", "--batch-size must be at least 1; got 0"),
        ("bench train --minibatch 100", "--minibatch must be a multiple of --horizon 64"),
        ("parity fft", "'fft' has none, these have: cdf, mingru, "),
        ("parity cdf --device gpu", "--device gpu cannot be used here; these can: auto, cpu"),
    ],
)
def test_bad_input_to_the_others(capfd, arguments, words):
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    assert words in refused(capfd, *arguments.split())


def test_a_run_directory_that_is_not_text(capfd):
    assert "run directory 'x\\udcff' is not UTF-8" in refused(capfd, *TRAIN_STUB, "--run-dir", "x\udcff")


def test_a_run_is_not_overwritten(capfd):
    assert main([*TRAIN_STUB, "--run-dir", "x"]) == 0
    message = refused(capfd, *TRAIN_STUB, "--run-dir", "x", "--seed", "1")
    assert message == ("run directory x exists: choose another --run-dir, or continue it with `sharpwave resume x`")


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_missing_and_damaged_checkpoints(capfd, command):
    assert main([*TRAIN_STUB, "--run-dir", "x"]) == 0
    newest = loop.newest(Path("x"))
    os.truncate(newest / checkpoint.TENSORS, 20)
    message = refused(capfd, command, "x")
    assert f"checkpoint {newest} is damaged: tensors.safetensors has 20 bytes" in message
    assert "delete it to go on from step-000000000000" in message
    for path in Path("x/checkpoints").iterdir():
        path.rename(Path("x") / path.name)
    assert "x holds no checkpoint" in refused(capfd, command, "x")


def test_a_checkpoint_of_another_network(capfd):
    assert (
        main(
            [
                "train",
                "ppo",
                "--env",
                "sharpwave/CartPole",
                *SMALL,
                "--eval-episodes",
                "0",
                "--device",
                "cpu",
                "--run-dir",
                "x",
            ]
        )
        == 0
    )
    settings = json.loads(Path("x/config.json").read_text())
    Path("x/config.json").write_text(json.dumps(settings | {"hidden": 24}))
    for command in ("resume", "eval"):
        words = "hidden is 24, was 16" if command == "resume" else "is not of this configuration"
        assert words in refused(capfd, command, "x")


def test_train_evaluates_and_says_how_to_go_on(capfd):
    assert (
        main(
            [
                "train",
                "ppo",
                "--env",
                "sharpwave/CartPole",
                "--device",
                "cpu",
                *SMALL,
                "--eval-episodes",
                "5",
                "--run-dir",
                "a b",
            ]
        )
        == 0
    )
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"sharpwave {sharpwave.__version__}: ppo sharpwave/CartPole seed 0 on cpu"
    assert lines[1] == "run directory: a b"
    assert lines[2].startswith("epoch 1/2  step 32  SPS ") and "  left " not in lines[2]
    assert lines[-5].startswith("epoch 2/2  step 64  SPS ")
    assert lines[-4] == "checkpoint: a b/checkpoints/step-000000000064"
    assert lines[-3] == "draw its learning curve with: sharpwave plot 'a b'"
    assert lines[-2] == "evaluate again with: sharpwave eval 'a b'"
    assert LAST_LINE.fullmatch(lines[-1])[1] == "5"

    assert main(["eval", "a b", "--episodes", "5"]) == 0
    assert capfd.readouterr().out == lines[-1] + "\n"
    assert main(["eval", "a b", "--episodes", "7", "--seed", "3", "--no-deterministic", "--device", "cpu"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert LAST_LINE.fullmatch(line)[1] == "7"

    assert main(["resume", "a b"]) == 0  # complete: it only evaluates again
    again = capfd.readouterr().out.splitlines()
    assert "this run was complete: nothing is left to train" in again and again[-1] == lines[-1]


def test_the_evaluation_can_be_left_out(capfd):
    assert main([*TRAIN_STUB, "--eval-episodes", "0", "--run-dir", "x"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "evaluate again with: sharpwave eval x"


def test_an_environment_that_fails_while_it_is_played(capfd, monkeypatch):
    def fail(*_args, **_options):
        raise EnvFault("toy", 5, 7, "returned NaN")

    assert main([*TRAIN_STUB, "--eval-episodes", "0", "--run-dir", "x"]) == 0
    monkeypatch.setattr(evaluate, "evaluate", fail)
    assert main(["eval", "x"]) == 2
    assert "sharpwave: error: toy: environment 5 returned NaN at step 7\n" in capfd.readouterr().err


def test_evaluation_does_not_change_the_run(capfd):
    assert main([*TRAIN_STUB, "--run-dir", "x"]) == 0
    before = files(Path("x"))
    assert main(["eval", "x", "--episodes", "3"]) == 0
    assert files(Path("x")) == before


def test_the_default_run_directory(capfd):
    assert main([*TRAIN_STUB, "--seed", "4", "--eval-episodes", "0"]) == 0
    (path,) = Path("runs").iterdir()
    assert re.fullmatch(r"stub-sharpwave-CartPole-seed4-\d{8}-\d{6}", path.name)
    assert f"run directory: {path}" in capfd.readouterr().out


def test_what_is_recorded():
    argv = [*TRAIN_STUB, "--run-dir", "x", "--eval-episodes", "0", "--sizes", "1", "2", "3"]
    assert main(argv) == 0
    algorithm, config = rundir.read(Path("x"))
    assert (algorithm, config.sizes) == ("stub", (1, 2, 3))
    assert json.loads(Path("x/run.json").read_text())["command"] == ["sharpwave", *argv]


def test_defaults_preset_file_command_line(monkeypatch):
    """epochs is set in all four places, rate in three, note in two, and seed in none but the defaults."""
    preset = {"epochs": 2, "rate": 0.2, "note": "preset", "env_kwargs": {"max_episode_steps": 50}}
    monkeypatch.setitem(presets.PRESETS, ("stub", "sharpwave/CartPole"), preset)
    Path("c.toml").write_text('epochs = 3\nrate = 0.3\nenv = "sharpwave/CartPole"\n')
    argv = ["train", "stub", "--config", "c.toml", "--epochs", "4", "--eval-episodes", "0", "--run-dir", "x"]
    assert main([*argv, "--env-kwargs", "max_episode_steps=60"]) == 0
    _, config = rundir.read(Path("x"))
    assert (config.epochs, config.rate, config.note, config.seed) == (4, 0.3, "preset", 0)
    assert config.env_kwargs == {"max_episode_steps": 60}


def test_a_runs_config_can_be_used_again():
    assert main([*TRAIN_STUB, "--rate", "0.125", "--eval-episodes", "0", "--run-dir", "x"]) == 0
    assert main(["train", "stub", "--config", "x/config.json", "--seed", "1", "--run-dir", "y"]) == 0
    first, second = (rundir.read(Path(name))[1] for name in "xy")
    assert second == dataclasses.replace(first, seed=1)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_writes_a_checkpoint_and_says_how_to_resume(capfd, monkeypatch, number, code):
    train_epoch = stub.Stub.train_epoch
    before = signal.getsignal(signal.SIGINT)

    def interrupted(self):
        train_epoch(self)
        if self.epoch == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(stub.Stub, "train_epoch", interrupted)
        assert main([*TRAIN_STUB, "--epochs", "9", "--run-dir", "x"]) == code
    out, err = capfd.readouterr()
    assert out.splitlines()[-2:] == [
        "checkpoint: x/checkpoints/step-000000000030",
        "stopped at epoch 3 of 9; continue with: sharpwave resume x",
    ]
    assert err == "sharpwave: stopping after this epoch, with a checkpoint; once more ends it at once\n"
    assert signal.getsignal(signal.SIGINT) is before, "the handler that was there is back"
    assert main(["resume", "x"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "checkpoint: x/checkpoints/step-000000000090" in lines and LAST_LINE.fullmatch(lines[-1])


def test_ctrl_c_outside_of_training(capfd, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(rundir, "read", interrupt)
    assert main(["eval", "x"]) == 130
    assert capfd.readouterr().err == "sharpwave: interrupted\n"


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(stub.Stub, "train_epoch", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*TRAIN_STUB, "--run-dir", "x"])
    assert checkpoint.list_steps(Path("x/checkpoints")) == [0]


def test_help_is_complete(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "ppo", "--help"]) == 0
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capfd.readouterr().out).split())
    for field in dataclasses.fields(PPOConfig):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "Discount of one step, in [0, 1]. (default: 0.995)" in text
    assert "Epochs between two checkpoints (epochs, >= 1); more are written" in text
    assert "--env-kwargs [KEY=VALUE ...]" in text
    groups = [text.index(f" {name} options ") for name in ("experiment", "optimizer", "network", "run", "train")]
    assert groups == sorted(groups)
    assert "Later ones win: defaults, preset of the environment, --config, command line." in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capfd, command):
    assert main([command, "--help"]) == 0
    assert f"usage: sharpwave {command}" in capfd.readouterr().out
    assert main(["--help"]) == 0
    assert f"\n  {command}" in capfd.readouterr().out


def test_help_shows_the_presets_values(capfd, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, ("stub", "Known"), {"epochs": 321})
    assert main(["train", "stub", "--env", "Known", "--help"]) == 0
    assert "(default: 321)" in " ".join(capfd.readouterr().out.split())


def test_help_and_version_do_not_load_torch():
    code = """
import sys
import sharpwave
from sharpwave.cli import main
assert {"nn", "envs", "PrioritizedReplay"} <= set(dir(sharpwave)) and "mingru" in dir(sharpwave.ops)
for argv in (["--help"], ["--version"], ["train", "ppo", "--help"], ["eval", "--help"]):
    assert main(argv) == 0
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"sharpwave {sharpwave.__version__}\n" in done.stdout


def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "sharpwave", "train", "ppo", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "sharpwave", "nonsense"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sharpwave: error: unknown command 'nonsense'")


def test_info(capfd):
    assert main(["info"]) == 0
    text = capfd.readouterr().out
    assert re.search(rf"sharpwave +{re.escape(sharpwave.__version__)}", text)
    assert re.search(r"\n  cpu +\S", text)
    for op in ("advantage", "cdf", "mingru", "ppo_loss"):
        assert re.search(rf"\n  {op} +{_backends.choose(op, 'cpu')}\b", text), op


def test_bench_train(capsys):
    tiny = "--num-envs 4 --horizon 8 --minibatch 16 32 --observation-size 5 --num-actions 3 --hidden 8 --layers 1"
    assert main(["bench", "train", *tiny.split(), "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["minibatch"] for row in report["results"]] == [16, 32]
    assert all(row["train_sps"] > 0 and row["sps"] > 0 for row in report["results"])
    assert main(["bench", "train", *tiny.split(), "--repeats", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_bench_dqn(capsys):
    tiny = "--num-envs 4 --capacity 200 --batch-size 8 --hidden 8 --updates 10 --repeats 1"
    assert main(["bench", "dqn", *tiny.split(), "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    parts = ("update", "sample", "forward", "priorities", "step", "cumsum")
    assert all(row[f"{part}_us"] > 0 for part in parts) and row["replay_share"] > 0
    assert "torchrl_us" in row or "torchrl_problem" in row
    assert main(["bench", "dqn", *tiny.split(), "--device", "cpu", "--no-peers"]) == 0
    out = capsys.readouterr().out
    assert "mlp (float32): " in out and "cumulated" not in out


def test_parity_passes_the_exit_code_on(monkeypatch):
    calls = []
    monkeypatch.setattr(parity, "main", lambda op, device: calls.append((op, device)) or 1)
    assert main(["parity", "cdf"]) == 1
    assert main(["parity", "cdf", "--device", "cpu"]) == 1
    assert calls == [("cdf", None), ("cdf", "cpu")]


def test_a_line_where_a_gpu_lacks_kernels(monkeypatch):
    monkeypatch.setattr(info, "backends", lambda device: {"cdf": "triton", "mingru": "reference"})
    (line,) = info.slow_backends("cuda")
    assert line == "backends: mingru run in plain PyTorch, for Triton is missing: pip install 'sharpwave[triton]'"
    assert info.slow_backends("cpu") == []


def test_an_output_without_frames_gets_the_same_line():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "sharpwave", "eval", "--episodes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    line = "Missing value for argument '--episodes'. Expected 1 values (see sharpwave eval --help)"
    assert (done.returncode, done.stderr) == (2, f"sharpwave: error: {line}\n")


@dataclasses.dataclass
class Sample:
    """Every kind of option."""

    count: int
    """Needed."""
    rate: float = 0.5
    limit: int | None = None
    flag: bool = False
    table: dict[str, int | str] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        ("--count 1e6", "count", 1_000_000),
        ("--count 1_000", "count", 1000),
        ("--count=-3", "count", -3),
        ("--count 1 --rate 1e-3", "rate", 0.001),
        ("--count 1 --count 2", "count", 2),
        ("--count 1 --limit 5", "limit", 5),
        ("--count 1 --limit none", "limit", None),
        ("--count 1 --flag", "flag", True),
        ("--count 1 --no-flag", "flag", False),
        ("--count 1 --sizes 4 5", "sizes", (4, 5)),
        ("--count 1 --table a=1 b=x c=0.5 d=true e=[1,2] f=False g=a=b", "table", None),
    ],
)
def test_options(arguments, name, value):
    got = getattr(options.parse(Sample, arguments.split(), "p"), name)
    if name == "table":
        value = {"a": 1, "b": "x", "c": 0.5, "d": True, "e": [1, 2], "f": False, "g": "a=b"}
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("arguments", ["", "--count", "--count x", "--count inf", "--count 1 --sizes a", "--coun 1"])
def test_bad_options_are_one_line(arguments):
    with pytest.raises(UserError) as error:
        options.parse(Sample, arguments.split(), "p")
    assert "\n" not in str(error.value) and not set("│╭─") & set(str(error.value))


def test_a_run_uses_its_threads_and_the_process_goes_on_with_its_own(monkeypatch):
    seen = []
    for name in ("train_epoch", "act"):
        method = getattr(stub.Stub, name)

        def watched(self, *args, name=name, method=method, **options):
            seen.append((name, torch.get_num_threads(), numba.get_num_threads()))
            return method(self, *args, **options)

        monkeypatch.setattr(stub.Stub, name, watched)
    numba.get_num_threads()  # what asks first starts Numba's threads, which may change PyTorch's number
    torch.set_num_threads(1)
    before = torch.get_num_threads(), numba.get_num_threads()
    most = numba.config.NUMBA_NUM_THREADS
    assert main([*TRAIN_STUB, "--run-dir", "x"]) == 0
    assert set(seen) == {("train_epoch", 1, 1), ("act", 1, 1)}
    seen.clear()
    assert main([*TRAIN_STUB, "--run-dir", "y", "--threads", "2"]) == 0
    assert set(seen) == {("train_epoch", 2, min(2, most)), ("act", 2, min(2, most))}
    assert (torch.get_num_threads(), numba.get_num_threads()) == before


def test_kernels_that_an_earlier_run_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton").knobs.cache, "dir", str(tmp_path))
    assert not _trainers._are_compiled("cuda")
    (tmp_path / "kernel").mkdir()
    assert _trainers._are_compiled("cuda")
