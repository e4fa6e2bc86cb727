"""20 epochs are 10, a kill, a resume and 10 more: weights, momentum, schedules, random streams, counters, environments,
log lines and checkpoints, bit for bit, through the command line and a real SIGKILL."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sharpwave.cli import main
from sharpwave.run import checkpoint, loop, rundir, threads
from sharpwave.run.config import trainer_class
from sharpwave.run.log import read_metrics

EPOCHS, KILLED_IN = 20, 13
COMMON = ["--checkpoint-interval", "10", "--eval-episodes", "0", "--device", "cpu", "--seed", "7", "--hidden", "16"]
COMMON += ["--num-envs", "4", "--total-steps", str(4 * 8 * EPOCHS)]
SETTINGS = {
    "ppo": ["--horizon", "8", "--minibatch", "16"],
    "dqn": [
        "--epoch-steps",
        "8",
        "--batch-size",
        "8",
        "--learning-starts",
        "40",
        "--buffer-size",
        "400",
        "--target-interval",
        "7",
    ],
}
PARTS = {
    "ppo": ("policy.", "momentum.", "generators.", "draw_offset", "state"),
    "dqn": ("policy.", "target.", "optimizer.", "generators.", "draws", "replay.", "acting."),
}
CASES = [("ppo", "sharpwave/CartPole"), ("ppo", "CartPole-v1"), ("dqn", "sharpwave/CartPole"), ("dqn", "CartPole-v1")]

# Runs the command given, and kills itself with SIGKILL in the middle of epoch 13, while it learns.
KILLER = f"""
import os, signal, sys
from sharpwave.cli import main
from sharpwave.run.config import trainer_class
cls, name = trainer_class(sys.argv[2]), {{"ppo": "_update", "dqn": "_learn"}}[sys.argv[2]]
update = getattr(cls, name)
def dying(self, *args, **kwargs):
    update(self, *args, **kwargs)
    if self.epoch == {KILLED_IN} - 1:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(cls, name, dying)
main(sys.argv[1:])
"""


def command(case: tuple[str, str], path: Path) -> list[str]:
    algorithm, env = case
    return ["train", algorithm, "--env", env, "--run-dir", str(path), *COMMON, *SETTINGS[algorithm]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{case: (a run that was left alone, a run that was killed)}; the processes to be killed run side by side."""
    folder = tmp_path_factory.mktemp("resume")
    paths = {case: (folder / f"whole{i}", folder / f"killed{i}") for i, case in enumerate(CASES)}
    killed = [
        subprocess.Popen([sys.executable, "-c", KILLER, *command(case, path)], stdout=subprocess.DEVNULL)
        for case, (_, path) in paths.items()
    ]
    for case, (path, _) in paths.items():
        assert main(command(case, path)) == 0
    for process in killed:
        assert process.wait(timeout=120) == -9
    return paths


def state(path: Path):
    """The tensors and the rest of a run's newest checkpoint.

    What Gymnasium's objects hold is left out: the order in which it is written down is not fixed, and their spaces'
    generators, which nobody uses, start anew in each process.
    """
    content = checkpoint.unflatten(*checkpoint.load(loop.newest(path)))["trainer"]
    for name in ("tree", "arrays"):
        content["env"].pop(name, None)
    return checkpoint.flatten(content)


def lines(path: Path):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(path)]


def what_follows(path: Path):
    """Observations and weights after three more epochs from a run's newest checkpoint."""
    algorithm, config = rundir.read(path)
    trainer = trainer_class(algorithm)(replace(config, total_steps=2 * config.total_steps))
    trainer.load_state_dict(checkpoint.unflatten(*checkpoint.load(loop.newest(path)))["trainer"])
    seen = [trainer.obs.clone()]
    with threads.use(1):
        for _ in range(3):
            trainer.train_epoch()
            seen.append(trainer.obs.clone())
    trainer.close()
    return [*seen, *trainer.policy.state_dict().values()]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_killed_and_resumed_is_the_same_run(case, runs):
    whole, killed = runs[case]
    assert checkpoint.list_steps(killed / "checkpoints") == [0, 320]
    assert len(lines(killed)) == KILLED_IN - 1  # two lines are ahead of the checkpoint
    assert main(["resume", str(killed)]) == 0

    (tensors, structure), (tensors_b, structure_b) = state(whole), state(killed)
    assert structure == structure_b
    for name, tensor in tensors.items():
        assert torch.equal(tensor, tensors_b[name]), name
    assert repr(lines(whole)) == repr(lines(killed))
    assert [x["epoch"] for x in lines(killed)] == list(range(1, EPOCHS + 1))
    # The environments stand at the same point too: whatever is done next has the same outcome.
    for x, y in zip(what_follows(whole), what_follows(killed), strict=True):
        assert torch.equal(x, y)

    # The comparison would see a difference: at epoch 10 the state was another one.
    before, _ = checkpoint.load(checkpoint.step_path(whole / "checkpoints", 320))
    changed = [name for name, t in tensors.items() if not torch.equal(t, before[f"trainer.{name}"])]
    for part in PARTS[case[0]]:
        assert any(name.startswith(part) for name in changed), part


@pytest.mark.parametrize("algorithm, more", [("ppo", ("begins",)), ("dqn", ("max_priority", "acting.begins"))])
def test_the_checkpoint_holds_every_stream(algorithm, more, runs):
    tensors, _ = state(runs[algorithm, "sharpwave/CartPole"][0])
    for name in (*PARTS[algorithm], "env.generator", *more):
        assert any(key.startswith(name) for key in tensors), name
