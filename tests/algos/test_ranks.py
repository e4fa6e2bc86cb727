"""Data-parallel training: two ranks do together what one would do on the union of their experience."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sharpwave
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.cli import main
from sharpwave.run import checkpoint, distributed, loop
from sharpwave.run.errors import CheckpointError, UserError
from sharpwave.run.log import read_metrics
from tests.algos import ranks
from tests.algos.test_ppo import SMALL, trainer


def newest(run_dir, rank=0):
    """What the newest checkpoint of a run holds of a rank, and its name.

    But for what Gymnasium's objects hold, which they write down in no fixed order.
    """
    path = loop.newest(run_dir)
    own = checkpoint.rank_path(path / checkpoint.RANKS, rank) if rank else path
    state = checkpoint.unflatten(*checkpoint.load(own))
    state = state if rank else state["trainer"]
    for name in ("tree", "arrays"):
        state["env"].pop(name, None)
    return path.name, *checkpoint.flatten(state)


def assert_same_run(a, b):
    for rank in range(2):
        (name, tensors, structure), (other, others, theirs) = newest(a, rank), newest(b, rank)
        assert name == other and structure == theirs
        for key, tensor in tensors.items():
            assert torch.equal(tensor, others[key]), key
    logs = ([{k: v for k, v in line.items() if "time/" not in k} for line in read_metrics(path)] for path in (a, b))
    lines, others = ({line["epoch"]: line for line in log} for log in logs)
    assert lines.keys() <= others.keys() and repr([others[epoch] for epoch in lines]) == repr([*lines.values()])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two ranks went through all cases, and what they said, the last of which fails."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = ("talk", "gradients", "skips", f"train={folder / 'ppo'}", f"dqn={folder / 'dqn'}", "fails")
    return folder, ranks.finish(ranks.start(*cases))


def test_ranks_do_as_one(two):
    """Gradients, weights, steps that are not taken, a stop, a resume: what `tests.algos.ranks` asserts."""
    for _code, out, err in two[1]:
        assert out.split() == ["talk", "gradients", "skips", "train", "dqn"], err


def test_a_run_stopped_and_resumed_is_one_left_alone(two):
    assert_same_run(two[0] / "dqn" / "whole", two[0] / "dqn" / "half")
    folder = two[0] / "ppo"
    assert_same_run(folder / "whole", folder / "half")
    lines = read_metrics(folder / "whole")
    assert [line["step"] for line in lines] == [64, 128, 192, 256, 320, 384]
    assert torch.equal(newest(folder / "whole", 1)[1]["draw_offset"], newest(folder / "whole")[1]["draw_offset"])
    assert not torch.equal(newest(folder / "whole", 1)[1]["state"], newest(folder / "whole")[1]["state"])
    assert not any(name.startswith("policy") for name in newest(folder / "whole", 1)[1])


def test_one_that_fails_ends_the_others_who_say_why(two):
    _, ((code, _, waiting), (other, _, failed)) = two
    assert code and other
    assert failed.rstrip().endswith("the pole broke")
    assert waiting.rstrip().endswith("RankFailed: rank 0 stops: rank 1 failed: the pole broke")


def test_another_number_of_ranks_is_refused(two):
    folder = two[0] / "ppo"
    with pytest.raises(CheckpointError, match=r"is of 2 ranks, this run has 1: continue it with `torchrun --nproc-per"):
        loop.restore(trainer(), folder / "whole")


def test_what_a_rank_keeps_is_of_its_checkpoint(two, tmp_path):
    """Another step's, missing or damaged, is refused, with the checkpoint to go on from."""
    copied = tmp_path / "run"
    shutil.copytree(two[0] / "ppo" / "whole", copied)
    path = loop.newest(copied)
    epoch = checkpoint.unflatten(*checkpoint.load(path))["trainer"]["epoch"]
    before = checkpoint.step_path(path.parent, checkpoint.list_steps(path.parent)[-2])
    own = checkpoint.rank_path(path / checkpoint.RANKS, 1)
    assert loop._load_own(path, 1, epoch)["draw_offset"].shape == (1,)
    advice = f"delete it to go on from {before.name}"
    shutil.rmtree(own)
    with pytest.raises(CheckpointError, match=rf"what rank 1 keeps there \(no checkpoint at .*{advice}"):
        loop._load_own(path, 1, epoch)
    shutil.copytree(checkpoint.rank_path(before / checkpoint.RANKS, 1), own)
    with pytest.raises(CheckpointError, match=f"what rank 1 keeps there is of another checkpoint; {advice}"):
        loop._load_own(path, 1, epoch)
    (own / checkpoint.TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: what rank 1 keeps there \(.*{advice}$"):
        loop._load_own(path, 1, epoch)


@pytest.mark.parametrize("name, value", [("RANK", None), ("WORLD_SIZE", "abc"), ("WORLD_SIZE", "-1")])
def test_half_an_environment_of_torchruns_is_refused(monkeypatch, name, value):
    launch(monkeypatch, 0)
    monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name} is {value!r} in the environment"), distributed.joined("cpu"):
        pass


def launch(monkeypatch, rank, **variables):
    for name, value in (dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4) | variables).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    "device, gpus, message",
    [
        ("cuda:1", 8, "--device cuda:1 under torchrun: every rank takes the GPU of its own number, so give --device"),
        ("mps", 0, "--device mps under torchrun: ranks train on CPUs or CUDA GPUs"),
        ("auto", 2, "torchrun started 4 ranks on this machine, which has 2 GPUs: use --nproc-per-node 2, or --device"),
        ("cuda", 1, "which has 1 GPU: use --nproc-per-node 1, or --device cpu"),
    ],
)
def test_devices_that_ranks_cannot_take(monkeypatch, device, gpus, message):
    launch(monkeypatch, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(UserError, match=re.escape(message)), distributed.joined(device):
        pass


def test_commands_of_one_process_are_refused_under_torchrun(monkeypatch, capsys):
    launch(monkeypatch, 1)
    for command in (["eval", "runs/x"], ["sweep", "ppo", "--env", "CartPole-v1"], ["bench", "dqn"]):
        assert main(command) == 2
        name = " ".join(command[: 1 + (command[0] == "bench")])
        assert f"sharpwave {name} is done by one process: start it without torchrun" in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_alone_nothing_is_asked_of_torch_distributed(monkeypatch):
    launch(monkeypatch, 0, WORLD_SIZE=1)
    monkeypatch.delattr(torch.distributed, "init_process_group")
    with distributed.joined("cuda:1") as world:
        assert world is distributed.ALONE
    assert world.gather(torch.ones(2)).tolist() == [[1, 1]] and world.tell("x") == "x" and world.largest(3) == 3


def test_too_few_steps_for_all_ranks():
    world = distributed.World()
    world.size = 64
    with pytest.raises(UserError, match=r"at least one batch of all ranks, 8192 \(64 ranks x 8 environments x horizon"):
        PPO(PPOConfig(env="sharpwave/CartPole", device="cpu", **SMALL), world=world)


SETTINGS = ["--num-envs", "4", "--hidden", "16", "--device", "cpu", "--eval-episodes", "4", "--seed", "3"]
OWN = {
    "ppo": ["--horizon", "8", "--minibatch", "16"],
    "dqn": ["--epoch-steps", "8", "--batch-size", "16", "--buffer-size", "1000", "--learning-starts", "200"],
}


def torchrun(*args, **options):
    # What torchrun is; its own script may not be on the path.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sharpwave", *args]
    env = os.environ | {"PYTHONPATH": str(Path(sharpwave.__file__).parents[1])}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_torchrun(tmp_path, algorithm, capsys):
    """A run by torchrun, one stopped by Ctrl-C and resumed, and what is said where ranks or directories do not fit."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    command = ["train", algorithm, "--env", "CartPole-v1", *SETTINGS, *OWN[algorithm], "--total-steps", str(64 * 200)]
    code, out, err = ranks.finish([torchrun(*command, "--run-dir", str(whole))], 120)[0]
    assert code == 0, err
    assert out.count("run directory") == out.count("mean return") == 1 and "on 2 x cpu" in out
    assert "epoch 200/200  step 12,800" in out and read_metrics(whole)[-1]["step"] == 12800

    process = torchrun(*command, "--run-dir", str(half), start_new_session=True)
    while not (half / "metrics.jsonl").is_file() or len(read_metrics(half)) < 25:
        time.sleep(0.1)
        assert process.poll() is None, process.communicate()
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: torchrun and all its ranks
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert re.search(
        r"stopped at epoch \d+ of 200; continue with: torchrun --nproc-per-node 2 -m sharpwave resume", out
    )
    assert main(["resume", str(half)]) == 2
    assert "is of 2 ranks, this run has 1" in capsys.readouterr().err
    code, out, err = ranks.finish([torchrun("resume", str(half))], 120)[0]
    assert code == 0, err
    assert_same_run(whole, half)
    assert json.loads((whole / "run.json").read_text())["ranks"] == 2

    code, out, err = ranks.finish([torchrun(*command, "--run-dir", str(half))], 60)[0]
    assert code and f"run directory {half} exists" in err


KILLER = """
import os, signal
from sharpwave.envs import CartPole
class Dying(CartPole):
    count = 0
    def _step(self, action):
        Dying.count += 1
        if Dying.count == 1000 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(action)
"""


@pytest.mark.long
def test_a_rank_that_is_killed_ends_all(tmp_path):
    Path(tmp_path / "dying.py").write_text(KILLER)
    command = ["train", "ppo", "--env", "dying:Dying", *SETTINGS, *OWN["ppo"], "--total-steps", "10_000_000"]
    began = time.monotonic()
    code, _, err = ranks.finish([torchrun(*command, "--run-dir", "run", cwd=tmp_path)], 60)[0]
    assert code and "Signal 9 (SIGKILL)" in err
    assert "rank 0 stops: another rank has ended" in (tmp_path / "run" / "failure.txt").read_text()
    assert time.monotonic() - began < 30
