"""The loop around a trainer: log lines, checkpoints, stops, and resuming as if nothing had happened."""

from pathlib import Path

import pytest
import torch

from sharpwave.envs import EnvFault
from sharpwave.run import checkpoint, loop, rundir
from sharpwave.run.errors import CheckpointError, UserError
from sharpwave.run.log import read_metrics
from sharpwave.run.signals import StopRequest
from tests.run import stub


def start(path: Path, **settings) -> tuple[stub.Stub, Path]:
    path.mkdir()
    return stub.make(**settings), path


def state(path: Path):
    """What the newest checkpoint holds, and the log without its times."""
    content = checkpoint.unflatten(*checkpoint.load(loop.newest(path)))["trainer"]
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(path)]
    return content, lines


def assert_same_run(a: Path, b: Path) -> None:
    (content_a, lines_a), (content_b, lines_b) = state(a), state(b)
    tensors_a, structure_a = checkpoint.flatten(content_a)
    tensors_b, structure_b = checkpoint.flatten(content_b)
    assert structure_a == structure_b
    assert all(torch.equal(t, tensors_b[name]) for name, t in tensors_a.items())
    assert repr(lines_a) == repr(lines_b)


def test_a_whole_run(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=7, checkpoint_interval=3, keep_checkpoints=9, log_interval=2)
    assert loop.run(trainer, path) is True
    assert checkpoint.list_steps(path / "checkpoints") == [0, 30, 60, 70]
    lines = read_metrics(path)
    assert [x["epoch"] for x in lines] == [2, 3, 4, 6, 7]  # every second, and each checkpoint's
    assert [x["step"] for x in lines] == [20, 30, 40, 60, 70]
    for name in ("walk/mean", "time/elapsed", "time/sps", "time/rollout", "time/update"):
        assert all(name in x for x in lines), name
    assert lines[-1]["time/elapsed"] >= lines[0]["time/elapsed"] > 0


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=6, checkpoint_interval=1, keep_checkpoints=2)
    loop.run(trainer, path)
    assert checkpoint.list_steps(path / "checkpoints") == [50, 60]


@pytest.mark.parametrize("log_interval", [1, 4])
@pytest.mark.parametrize("crash_at", [1, 2, 3, 4, 5, 8])
def test_a_crash_and_a_resume_change_nothing(tmp_path, crash_at, log_interval):
    settings = {"epochs": 8, "checkpoint_interval": 3, "log_interval": log_interval}
    whole, path_a = start(tmp_path / "a", **settings)
    loop.run(whole, path_a)

    class Crash(Exception):
        pass

    def crash(epoch):
        if epoch == crash_at:
            raise Crash

    broken, path_b = start(tmp_path / "b", **settings)
    broken.on_epoch = crash
    with pytest.raises(Crash):
        loop.run(broken, path_b)
    assert loop.run(stub.make(**settings), path_b, resume=True) is True
    assert_same_run(path_a, path_b)


def test_a_stop_writes_a_checkpoint_of_that_moment(tmp_path):
    settings = {"epochs": 8, "checkpoint_interval": 100}
    whole, path_a = start(tmp_path / "a", **settings)
    loop.run(whole, path_a)
    trainer, path = start(tmp_path / "b", **settings)
    stop = StopRequest()
    trainer.on_epoch = lambda epoch: setattr(stop, "signal", 2) if epoch == 5 else None
    assert loop.run(trainer, path, stop=stop) is False
    assert trainer.epoch == 5 and checkpoint.list_steps(path / "checkpoints") == [0, 50]
    assert loop.run(stub.make(**settings), path, resume=True) is True
    assert_same_run(path_a, path)


def test_a_stop_while_a_line_is_written(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=8, checkpoint_interval=100)
    stop, metrics = StopRequest(), trainer.metrics

    def interrupted():
        if trainer.epoch == 3:
            stop.signal = 2
        return metrics()

    trainer.metrics = interrupted
    assert loop.run(trainer, path, stop=stop) is False
    assert checkpoint.list_steps(path / "checkpoints")[-1] == trainer.global_step
    assert read_metrics(path)[-1]["step"] == trainer.global_step


def test_a_stop_before_the_first_epoch(tmp_path):
    trainer, path = start(tmp_path / "x")
    stop = StopRequest()
    stop.signal = 2
    assert loop.run(trainer, path, stop=stop) is False
    assert checkpoint.list_steps(path / "checkpoints") == [0]


def test_resuming_a_complete_run_does_nothing(tmp_path):
    trainer, path = start(tmp_path / "x")
    loop.run(trainer, path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and "tensorboard" not in p.parts}
    again = stub.make()
    assert loop.run(again, path, resume=True) is True
    assert torch.equal(again.walk, trainer.walk)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and "tensorboard" not in p.parts} == before


def test_a_fault_of_an_environment_is_named_and_the_way_on_shown(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=6, checkpoint_interval=2)

    def fail(epoch):
        if epoch == 3:
            raise EnvFault("toy", 5, 7, "returned NaN")

    trainer.on_epoch = fail
    with pytest.raises(UserError, match=r"toy: environment 5 returned NaN at step 7; .* sharpwave resume .*x"):
        loop.run(trainer, path)
    assert loop.newest(path).exists()
    assert (path / rundir.FAILURE).read_text().startswith("toy: environment 5 returned NaN at step 7; ")
    mended = stub.make(epochs=6, checkpoint_interval=2)
    assert loop.run(mended, path, resume=True)
    assert not (path / rundir.FAILURE).exists()


def test_time_goes_on_counting(tmp_path):
    settings = {"epochs": 4, "checkpoint_interval": 1}
    trainer, path = start(tmp_path / "x", **settings)
    stop = StopRequest()
    trainer.on_epoch = lambda epoch: setattr(stop, "signal", 2) if epoch == 2 else None
    loop.run(trainer, path, stop=stop)
    loop.run(stub.make(**settings), path, resume=True)
    elapsed = [x["time/elapsed"] for x in read_metrics(path)]
    assert elapsed == sorted(elapsed) and len(elapsed) == 4


class Shown:
    def __init__(self):
        self.calls = []

    def start(self, step, epoch):
        self.calls.append(("start", step, epoch))

    def update(self, step, epoch, metrics, phases, histograms=None):
        self.calls.append(("update", step, epoch, metrics["walk/mean"], phases["rollout"]))

    def message(self, text):
        self.calls.append(("message", text))

    def close(self):
        self.calls.append(("close",))


def test_the_display_is_told(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=2)
    shown = Shown()
    loop.run(trainer, path, display=shown)
    walk = [x["walk/mean"] for x in read_metrics(path)]
    assert shown.calls == [("start", 0, 0), ("update", 10, 1, walk[0], 0.25), ("update", 20, 2, walk[1], 0.25)]


def test_skipped_updates_are_named(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=1)
    trainer.metrics = lambda: {"walk/mean": 0.0, "fault/skipped_updates": 2.0}
    trainer.faults = lambda: ["loss/value", "the gradient of encoder.weight"]
    shown = Shown()
    loop.run(trainer, path, display=shown)
    (text,) = [c[1] for c in shown.calls if c[0] == "message"]
    assert text == "epoch 1: 2 updates skipped, for these were not finite: loss/value, the gradient of encoder.weight"


def test_nothing_is_printed(tmp_path, capfd):
    trainer, path = start(tmp_path / "x")
    loop.run(trainer, path)
    assert capfd.readouterr() == ("", "")


def test_a_run_that_is_being_trained_is_left_alone(tmp_path):
    trainer, path = start(tmp_path / "x")
    with rundir.lock(path), pytest.raises(UserError, match="another process"):
        loop.run(trainer, path)
    assert not (path / "checkpoints").exists()


def test_a_damaged_checkpoint_stops_a_resume_and_the_advice_works(tmp_path):
    settings = {"epochs": 4, "checkpoint_interval": 2}
    trainer, path = start(tmp_path / "x", **settings)
    loop.run(trainer, path)
    damaged = loop.newest(path)
    (damaged / checkpoint.TENSORS).write_bytes(b"")
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"is damaged.*delete it to go on from step-000000000020"):
        loop.run(stub.make(**settings), path, resume=True)
    assert (path / "metrics.jsonl").read_bytes() == before  # nothing was lost by trying
    for file in damaged.iterdir():
        file.unlink()
    damaged.rmdir()
    again = stub.make(**settings)
    assert loop.run(again, path, resume=True) is True
    assert torch.equal(again.walk, trainer.walk)


def test_a_checkpoint_of_another_configuration(tmp_path):
    trainer, path = start(tmp_path / "x")
    loop.run(trainer, path)
    other = stub.make()
    other.policy = torch.nn.Linear(5, 1, bias=False)
    with pytest.raises(CheckpointError, match="is not of this configuration") as error:
        loop.restore(other, path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [[1], {"trainer": None}, {"trainer": {}, "config": {}}, {"trainer": {"epoch": "7"}, "config": {}, "elapsed": 0}],
)
def test_foreign_content(tmp_path, content):
    _, path = start(tmp_path / "x")
    checkpoint.save(checkpoint.step_path(path / "checkpoints", 5), *checkpoint.flatten(content))
    with pytest.raises(CheckpointError, match="is not of this configuration"):
        loop.restore(stub.make(), path)


def test_settings_may_not_change_under_a_run_but_the_loops_may(tmp_path):
    trainer, path = start(tmp_path / "x", epochs=4, checkpoint_interval=2)
    loop.run(trainer, path)
    with pytest.raises(CheckpointError, match=r"rate is 0\.25, was 0\.5; put config.json back"):
        loop.restore(stub.make(epochs=4, rate=0.25), path)
    loop.restore(stub.make(epochs=4, log_interval=3, checkpoint_interval=1), path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        loop.restore(stub.make(), tmp_path)


def test_only_the_policy(tmp_path):
    trainer, path = start(tmp_path / "x")
    loop.run(trainer, path)
    fresh = stub.make()
    drawn = fresh.generator.get_state()
    loop.restore_policy(fresh, path)
    assert torch.equal(fresh.walk, trainer.walk)
    assert fresh.epoch == 0 and torch.equal(fresh.generator.get_state(), drawn)
