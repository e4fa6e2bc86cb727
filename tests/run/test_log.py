"""metrics.jsonl and TensorBoard: valid JSON always, and no line twice after a resume."""

import json
import math
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sharpwave.run.errors import UserError
from sharpwave.run.log import RunLog, read_metrics


def lines(path):
    return (path / "metrics.jsonl").read_text().splitlines()


def scalars(path, name):
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_lines_and_tensorboard(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(10, 1, {"loss/value": 0.5, "episode/return": 3})
        log.write(20, 2, {"loss/value": 0.25})
    assert [json.loads(x) for x in lines(tmp_path)] == [
        {"step": 10, "epoch": 1, "loss/value": 0.5, "episode/return": 3.0},
        {"step": 20, "epoch": 2, "loss/value": 0.25},
    ]
    assert scalars(tmp_path, "loss/value") == [(10, 0.5), (20, 0.25)]


def test_what_is_not_finite_is_null_and_named(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    with RunLog(tmp_path) as log:
        log.write(1, 1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.0})
    line = json.loads(lines(tmp_path)[0], parse_constant=refuse)
    assert line["a"] is line["b"] is line["c"] is None and line["d"] == 1.0
    assert line["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf and "nonfinite" not in back


def test_a_line_is_on_the_disk_when_write_returns(tmp_path):
    log = RunLog(tmp_path)
    log.write(1, 1, {"a": 1.0})
    assert len(lines(tmp_path)) == 1
    log.close()


@pytest.mark.parametrize("tail", ["", '{"step": 40, "ep', "garbage\n", '{"no": "step"}\n'])
def test_resuming_drops_what_will_be_repeated(tmp_path, tail):
    with RunLog(tmp_path) as log:
        for step in (10, 20, 30):
            log.write(step, step // 10, {"a": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    with RunLog(tmp_path, resume_step=20) as log:
        log.write(30, 3, {"a": -1.0})
    assert [(x["step"], x["a"]) for x in read_metrics(tmp_path)] == [(10, 10.0), (20, 20.0), (30, -1.0)]


def test_tensorboard_forgets_what_will_be_repeated(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (10, 20, 30):
            log.write(step, step // 10, {"a": float(step)})
    time.sleep(1.1)  # TensorBoard reads its files in the order of their names, which hold the second
    with RunLog(tmp_path, resume_step=20) as log:
        log.write(30, 3, {"a": -1.0})
    assert scalars(tmp_path, "a") == [(10, 10.0), (20, 20.0), (30, -1.0)]


def test_resuming_at_the_end_keeps_all(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(10, 1, {"a": 1.0})
    before = lines(tmp_path)
    with RunLog(tmp_path, resume_step=10):
        pass
    assert lines(tmp_path) == before


def test_resuming_before_the_first_line(tmp_path):
    with RunLog(tmp_path, resume_step=0) as log:
        log.write(10, 1, {"a": 1.0})
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda run: (run / "metrics.jsonl").symlink_to("/dev/full"), "No space left on device"),
        (lambda run: (run / "metrics.jsonl").mkdir(), "metrics.jsonl: Is a directory"),
        (lambda run: (run / "tensorboard").touch(), "tensorboard: File exists"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_what_the_disk_refuses_names_the_way_on(tmp_path, spoil, why):
    for step in (10, 20):
        (tmp_path / f"checkpoints/step-{step:012d}").mkdir(parents=True)
    spoil(tmp_path)
    advice = f"then go on from step-000000000020: sharpwave resume {tmp_path}"
    with pytest.raises(UserError, match=f"^cannot write .*{why}.*{advice}$"), RunLog(tmp_path) as log:
        log.write(30, 3, {"loss/value": 0.5})


def test_tensorboard_is_not_imported_before_the_first_line():
    code = "import sys, sharpwave.run.loop; sys.exit(any(m.startswith('tensorboard') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
