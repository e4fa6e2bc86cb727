"""Trackers: what reaches them, that they cannot end a training, and that a resumed run is one run."""

import math
import sys
import types
from pathlib import Path

import pytest

from sharpwave.cli import main
from sharpwave.run import config as configs
from sharpwave.run import loop, rundir, trackers
from sharpwave.run.errors import UserError
from tests.run import stub


class Fake(types.ModuleType):
    """Stands in for wandb: keeps what it is told."""

    def __init__(self):
        super().__init__("wandb")
        self.began, self.logged, self.finished, self.fail_at = [], [], 0, None

    def init(self, **options):
        self.began.append(options)
        if self.fail_at == "init":
            raise RuntimeError("no API key\nsecond line")
        return self

    def log(self, values, step):
        if self.fail_at == step:
            raise ConnectionError("gone")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.ALGORITHMS, "stub", ("tests.run.stub:StubConfig", "tests.run.stub:Stub"))
    monkeypatch.chdir(tmp_path)
    made = Fake()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


TRAIN = ["train", "stub", "--env", "sharpwave/CartPole", "--eval-episodes", "0", "--run-dir", "x", "--logger", "wandb"]


def test_every_line_reaches_it(fake):
    assert main([*TRAIN, "--project", "mine"]) == 0
    (began,) = fake.began
    assert (began["project"], began["name"], began["resume"]) == ("mine", "x", "allow")
    assert began["config"]["epochs"] == 6
    assert [step for step, _ in fake.logged] == [10, 20, 30, 40, 50, 60]
    assert "episode/return" not in fake.logged[0][1]  # NaN: no episode had ended
    assert fake.logged[1][1]["episode/return"] == 2 and "time/sps" in fake.logged[1][1]
    assert fake.finished == 1


def test_a_resumed_run_has_the_same_identity_and_another_run_has_not(fake):
    assert main(TRAIN) == 0
    assert main(["resume", "x"]) == 0
    assert main([*TRAIN, "--run-dir", "y"]) == 0
    first, again, other = (began["id"] for began in fake.began)
    assert first == again != other


def test_a_tracker_that_fails_is_told_once_and_training_goes_on(fake, capfd):
    fake.fail_at = 30
    assert main(TRAIN) == 0
    out = capfd.readouterr().out
    assert out.count("wandb failed and is not used any more: gone") == 1
    assert [step for step, _ in fake.logged] == [10, 20] and fake.finished == 0
    assert loop.newest(Path("x")).name == "step-000000000060"


def test_one_that_cannot_begin(fake, capfd):
    fake.fail_at = "init"
    assert main(TRAIN) == 2
    err = capfd.readouterr().err
    assert "--logger wandb cannot begin: no API key second line (or work offline: WANDB_MODE=offline)" in err


def test_one_that_is_missing_is_told_before_anything_is_made(monkeypatch, capfd):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        assert main([*TRAIN[:-1], name]) == 2
        assert f"pip install 'sharpwave[{name}]'" in capfd.readouterr().err
    assert not Path("x").exists()
    assert main([*TRAIN[:-1], "mlflow"]) == 2
    assert "invalid choice 'mlflow'" in capfd.readouterr().err
    with pytest.raises(UserError, match="--logger must be among wandb, trackio; got mlflow"):
        trackers.require(["mlflow"])


def test_from_python(fake):
    trainer = stub.make(logger=("wandb",))
    run_dir = rundir.create(Path("p"), "stub", trainer.config, [])
    assert loop.run(trainer, run_dir)
    assert len(fake.logged) == 6 and all(math.isfinite(v) for _, values in fake.logged for v in values.values())
