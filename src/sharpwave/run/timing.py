"""How long each phase of training takes, without making the device wait."""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Seconds spent in named phases.

        timer = PhaseTimer(device)
        with timer("rollout"):
            ...
        timer.take()   # {"rollout": 0.031}: since the last take

    On a CUDA device a phase is the time between two events on the current stream: entering and leaving record an event
    and return at once; `take` counts the phases whose events have passed and leaves the rest for the next time, so it
    never waits. While a CUDA graph is being captured nothing is recorded, unless `in_graphs` is set: then the events
    become nodes of the graph, and `last_replay` reads them. On any other device a phase is wall-clock time, which on an
    asynchronous one (MPS, XPU) is the time to enqueue.

    Phases of one name add up. A phase inside another counts in both.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._cuda = torch.device(device).type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.in_graphs = False
        """Record phases in graphs captured from now on; costs the graph two nodes a phase."""
        self._captured: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        if not self._cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[phase] += time.perf_counter() - start
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not self.in_graphs:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True, external=capturing) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            (self._captured if capturing else self._pending).append((phase, begin, end))

    def last_replay(self) -> dict[str, float]:
        """Seconds by phase in the last replay of the graphs captured with `in_graphs`. Waits for the device.

        Phases on parallel branches overlap: their sum may be more than the replay took.
        """
        torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for phase, begin, end in self._captured:
            seconds[phase] += begin.elapsed_time(end) / 1000
        return dict(seconds)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, in the order in which the phases first ended; then start from zero."""
        waiting = []
        for phase, begin, end in self._pending:
            if end.query():
                self._seconds[phase] += begin.elapsed_time(end) / 1000
            else:
                waiting.append((phase, begin, end))
        self._pending = waiting
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
