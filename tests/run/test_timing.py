"""Phase timing: sums, nesting, and that a GPU is never waited for."""

import time

import pytest
import torch

from sharpwave.run.timing import PhaseTimer


def test_phases_add_up_and_restart():
    timer = PhaseTimer("cpu")
    for _ in range(3):
        with timer("a"):
            time.sleep(0.005)
    with timer("b"), timer("inner"):
        time.sleep(0.002)
    seconds = timer.take()
    assert list(seconds) == ["a", "inner", "b"]
    assert 0.015 <= seconds["a"] < 1
    assert 0.002 <= seconds["inner"] <= seconds["b"]
    assert timer.take() == {}


def test_a_phase_that_raises_is_counted():
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("a"):
        raise KeyError
    assert timer.take().keys() == {"a"}


class Event:
    """A CUDA event whose device is told when to catch up."""

    now = 0.0
    passed = True

    def __init__(self, enable_timing, external=False):
        assert enable_timing

    def record(self):
        self.time, self.recorded_while_busy = Event.now, not Event.passed

    def query(self):
        return Event.passed or not self.recorded_while_busy

    def elapsed_time(self, end):
        return end.time - self.time

    def synchronize(self):
        raise AssertionError("the host waited")


def test_cuda_phases_are_read_when_they_have_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = PhaseTimer("cuda:0")
    with timer("a"):
        Event.now += 20  # milliseconds
    Event.passed = False
    with timer("a"):
        Event.now += 30
    with timer("b"):
        Event.now += 5
    assert timer.take() == {"a": pytest.approx(0.020)}
    Event.passed = True
    assert timer.take() == {"a": pytest.approx(0.030), "b": pytest.approx(0.005)}


def test_nothing_is_recorded_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    timer = PhaseTimer("cuda")
    with timer("a"):
        pass
    assert timer.take() == {}


@pytest.mark.gpu
def test_on_a_gpu():
    x = torch.randn(4096, 4096, device="cuda")
    timer = PhaseTimer("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with timer("matmul"):
            for _ in range(20):
                x @ x
        timer.take()  # whatever has passed by now
        with timer("tail"):
            x + 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    seconds = timer.take()
    assert 0 < seconds["tail"] < 1
