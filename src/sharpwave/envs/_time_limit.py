"""An end to code that does not return."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float | None) -> Generator[None]:
    """Raise TimeoutError inside the code that runs for longer than `seconds`; None sets no limit.

    It interrupts Python code, sleeping and waiting, in the main thread, where the system has interval timers (not
    Windows); elsewhere there is no limit. A timer that was running goes on afterwards.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_signal, _frame):
        raise TimeoutError(f"it did not return within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, expire)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)
