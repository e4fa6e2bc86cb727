"""A stop request: the first signal asks, the second kills, and the handlers are put back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from sharpwave.run.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    called = []
    with StopRequest(lambda: called.append(1)) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal == number and called == [1]
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert stop.signal == number


def test_the_second_ends_the_process_even_inside_a_long_c_call():
    code = (
        "import os, signal; from sharpwave.run.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop.requested; print('asked', flush=True)\n"
        "    sum(range(10**12))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process, process.stdout:
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


def test_one_that_comes_at_once_is_the_same_request_under_torchrun():
    """Which passes on the Ctrl-C that the terminal has sent to everyone."""
    code = (
        "import os, signal, time; from sharpwave.run.signals import StopRequest\n"
        "with StopRequest(lambda: print('asked', flush=True), together=0.3) as stop:\n"
        "    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):\n"
        "        os.kill(os.getpid(), number)\n"
        "    assert stop.signal == signal.SIGINT\n"
        "    time.sleep(0.4)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('alive')"
    )
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=20, check=False)
    assert process.returncode == -signal.SIGTERM and process.stdout == b"asked\n"


def test_elsewhere_than_in_the_main_thread_it_does_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
