"""The dashboard and the plain lines."""

import io
import math

import pytest
from rich.console import Console

from sharpwave.run import display as displays
from sharpwave.run.display import Dashboard, Plain, Rate, count, duration, number

METRICS = {
    "episode/return": 487.3,
    "episode/length": 490.0,
    "loss/value": 0.125,
    "loss/entropy": math.nan,
    "plain": 1.0,
}
PHASES = {"rollout": 0.03, "optimizer": 0.01}


def console(terminal, width=160):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def test_the_kind_follows_the_output():
    assert isinstance(displays.make(console(True), 10), Dashboard)
    assert isinstance(displays.make(console(False), 10), Plain)


def test_rate_and_time_left():
    now = [100.0]
    rate = Rate(num_epochs=100, clock=lambda: now[0])
    rate.update(0, 0)
    assert math.isnan(rate.per_second) and math.isnan(rate.seconds_left)
    now[0] += 50
    rate.update(1000, 10)
    assert rate.per_second == 20 and math.isnan(rate.seconds_left)  # the first epoch compiles: it tells nothing
    now[0] += 2
    rate.update(2000, 20)
    assert rate.per_second == 500  # 1000 steps in 2 s
    assert rate.seconds_left == 16  # 80 epochs at 5 a second
    now[0] += 100
    rate.update(3000, 30)
    now[0] += 1
    rate.update(5000, 50)
    # After a pause: the oldest point is forgotten, the newest one outside the window begins the measurement.
    assert rate.per_second == pytest.approx((5000 - 2000) / 101)


def test_a_resumed_run_counts_from_where_it_stands():
    now = [0.0]
    rate = Rate(100, clock=lambda: now[0])
    rate.update(50_000, 50)
    now[0] = 1.0
    rate.update(51_000, 51)
    assert rate.per_second == 1000
    now[0] = 2.0
    rate.update(52_000, 52)
    assert rate.per_second == 1000 and rate.seconds_left == 48


def test_plain_lines_come_at_most_every_interval_and_at_the_end():
    out = console(False)
    plain = Plain(out, num_epochs=50, interval=3600)
    plain.start(0, 0)
    for epoch in range(1, 51):
        plain.update(epoch * 100, epoch, METRICS, PHASES)
    plain.close()
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/50  step 100  SPS ")
    assert "return 487.3" in lines[0] and "value loss 0.125" in lines[0] and "entropy nan" in lines[0]
    assert lines[1].startswith("epoch 50/50  step 5,000") and lines[1].endswith("left 0s")
    assert "\x1b" not in out.file.getvalue()


def test_plain_lines_are_never_wrapped_or_marked_up():
    out = console(False, width=20)
    plain = Plain(out, 10)
    plain.message("checkpoint [bold]runs/x[/bold] " + "y" * 100)
    assert out.file.getvalue() == "checkpoint [bold]runs/x[/bold] " + "y" * 100 + "\n"


def test_the_dashboard_shows_everything():
    out = console(True)
    dashboard = Dashboard(out, num_epochs=50, header=["ppo CartPole-v1", "run x"])
    dashboard.start(0, 0)
    dashboard.update(100, 50, METRICS, PHASES)
    dashboard.message("a line that stays")
    dashboard.close()
    text = out.file.getvalue()
    assert text.startswith("ppo CartPole-v1\nrun x\n")
    for part in ("epoch 50/50", "100%", "step 100", "487.3", "value", "nan", "plain"):
        assert part in text, part
    assert "rollout" in text and " 75%" in text and "optimizer" in text and " 25%" in text
    assert "a line that stays" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_memory_priorities_and_trend():
    out = console(True)
    dashboard = Dashboard(out, num_epochs=50)
    dashboard.start(0, 0)
    memory = {"memory/reserved_gib": 3.0, "memory/device_used_gib": 12.34, "memory/device_gib": 140.0}
    asked = []

    def histograms():
        asked.append(True)
        return {"priorities": (0.001, 20.0, [0, 1, 2, 4])}

    for epoch, value in ((1, 0.0), (2, math.nan), (3, 50.0), (50, 100.0)):
        dashboard.update(100, epoch, {**METRICS, **memory, "episode/return": value}, PHASES, histograms)
    text = out.file.getvalue()
    assert "12.3 of 140 GiB" in text and "reserved_gib" not in text
    assert "▁▃▅█" in text and "1.0e-03 to 2.0e+01, log" in text
    assert "▁▅█" in text.rpartition("trend")[2]  # 0, 50, 100
    # Only what is drawn is asked for: the first picture and the last, for the others came too soon after the first.
    assert len(asked) == 2
    dashboard.close()


def test_bars():
    assert displays.bars([0, 1, 7], 0) == "▁▂█"
    assert displays.bars([3, 3], 3) == "▁▁" and displays.bars([], 0) == ""
    assert displays.bars([0, 0], 0) == "▁▁"


def test_a_stop_is_told_at_once_and_stays(tmp_path):
    def written():
        return (tmp_path / "terminal").read_bytes().decode()

    with (tmp_path / "terminal").open("w+", newline="") as file:
        out = Console(file=file, force_terminal=True, width=40, color_system=None)
        dashboard = Dashboard(out, num_epochs=50)
        dashboard.start(0, 0)
        dashboard.update(100, 1, METRICS, PHASES)
        file.flush()
        before = written()
        assert before.endswith("\n" + displays.HINT[:39])  # the last line, cut to the width
        dashboard.stopping()
        told = written().removeprefix(before)
        # In place of the last line, and no line more: the picture is redrawn over itself.
        assert told == f"\r\x1b[K\x1b[1;33m{displays.STOPPING[:39]}\x1b[0m"
        dashboard.update(100, 50, METRICS, PHASES)
        dashboard.close()
        file.flush()
        assert displays.STOPPING[:38] in written().removeprefix(before + told)


def test_plain_lines_tell_a_stop(capfd):
    Plain(console(False), 10).stopping()
    assert capfd.readouterr().err == f"sharpwave: {displays.STOPPING}\n"
    displays.Silent().stopping()
    assert capfd.readouterr() == ("", "")


def test_the_cursor_is_visible_while_it_runs():
    """A second Ctrl-C ends the process at once, and nobody could bring the cursor back."""
    out = console(True)
    dashboard = Dashboard(out, 10)
    dashboard.start(0, 0)
    dashboard.update(1, 1, METRICS, PHASES)
    text = out.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    dashboard.close()


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (999, "999"), (1234, "1.23k"), (1.5e6, "1.5M"), (2e9, "2G"), (math.nan, "-")]
)
def test_count(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0s"), (59.6, "1m00s"), (65, "1m05s"), (3725, "1h02m"), (math.inf, "-"), (math.nan, "-")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_number():
    assert [number(x) for x in (487.3, 1e-6, 12345678.0)] == ["487.3", "1e-06", "1.235e+07"]
