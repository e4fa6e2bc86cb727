"""Code that does not return in time is interrupted, and other timers go on."""

import signal
import threading
import time

import pytest

from sharpwave.envs import make
from sharpwave.envs._time_limit import time_limit

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")


def test_interrupts_and_leaves_no_timer():
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not return within 0\.2 s"), time_limit(0.2):
        time.sleep(30)
    assert time.monotonic() - started < 10
    with time_limit(30):
        pass
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]) == before


def test_no_limit_elsewhere():
    done = []

    def work():
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with time_limit(None):
        done.append(True)
    assert done == [True, True]


def test_must_be_positive():
    with pytest.raises(ValueError, match="timeout must be above 0"):
        make("CartPole-v1", 1, timeout=0)
