"""A request to stop: Ctrl-C or SIGTERM asks, the loop answers between two epochs, with a checkpoint."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `signal`; the next one ends the process at once.

    Under torchrun Ctrl-C comes twice, from the terminal and from torchrun: what comes within `together` seconds of the
    first is the same request.

        with StopRequest() as stop:
            while not stop.requested:
                ...

    Only the main thread of a process can catch signals; elsewhere this does nothing.
    """

    def __init__(self, on_request: Callable[[], object] | None = None, together: float = 0.0):
        self.signal: int | None = None
        """The signal that asked: signal.SIGINT, signal.SIGTERM or None."""
        self._on_request = on_request
        self._together = together
        self._first = 0.0
        self._previous: dict[int, signal.Handlers | int | Callable | None] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() > self._first + self._together:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.signal, self._first = number, time.monotonic()
        if not self._together:
            # The system's own default, not Python's: it works inside a long call into C too.
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        if self._on_request is not None:
            self._on_request()
