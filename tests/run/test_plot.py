"""Learning curves: their numbers, which runs share a line, and what is refused."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from sharpwave.cli import main
from sharpwave.run import plot, rundir, runs
from sharpwave.run.errors import UserError
from tests.run.made import make_run

pytest.importorskip("matplotlib")
PNG, SVG = b"\x89PNG", b"<?xml"


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def line(xs, ys):
    return np.array(xs, dtype=float), np.array(ys, dtype=float)


def test_the_middle_and_the_spread_of_four_runs():
    four = [line([0, 1], [v, v + 10]) for v in (1, 2, 3, 8)]
    iqr = plot.curve(four, "iqr")
    # Sorted 1 2 3 8: the median is 2.5; the quartiles stand at 0.75 and 2.25 of the way along 0, 1, 2, 3.
    assert (iqr.line[0], iqr.low[0], iqr.high[0]) == (2.5, 1.75, 4.25)
    extremes = plot.curve(four, "minmax")
    assert (extremes.line[1], extremes.low[1], extremes.high[1]) == (12.5, 11, 18)
    error = plot.curve(four, "stderr")
    # Mean 3.5; squared deviations 6.25 + 2.25 + 0.25 + 20.25 = 29, s^2 = 29 / 3, s / sqrt(4) = 1.5546.
    assert error.line[0] == 3.5
    assert error.high[0] - 3.5 == pytest.approx(math.sqrt(29 / 3) / 2)
    none = plot.curve(four, "none")
    assert (none.low == none.line).all() and (none.high == none.line).all()


def test_one_run_has_no_spread():
    for spread in ("iqr", "minmax", "stderr", "none"):
        curve = plot.curve([line([0, 5], [1, 2])], spread)
        assert curve.line.tolist() == curve.low.tolist() == curve.high.tolist() == [1, 2]


def test_runs_are_interpolated_where_all_have_values():
    curve = plot.curve([line([0, 10, 20], [0, 10, 20]), line([5, 15, 40], [5, 15, 40])], "minmax")
    assert curve.x.tolist() == [5, 10, 15, 20]
    assert curve.low.tolist() == curve.high.tolist() == [5, 10, 15, 20]
    apart = plot.curve([line([0, 1], [0, 0]), line([2, 3], [0, 0])], "iqr")
    assert len(apart.x) == 0


def test_long_runs_are_thinned_to_what_a_figure_can_show():
    xs = np.arange(10_000.0)
    curve = plot.curve([(xs, xs), (xs, xs + 2)], "iqr")
    assert len(curve.x) == plot.POINTS and (curve.x[0], curve.x[-1]) == (0, 9999)
    assert np.allclose(curve.line, curve.x + 1)


def test_the_running_mean():
    assert plot.smooth(np.array([1.0, 2.0, 6.0, 4.0]), 1).tolist() == [1, 2, 6, 4]
    assert plot.smooth(np.array([1.0, 2.0, 6.0, 4.0]), 3).tolist() == [1, 1.5, 3, 4]
    assert plot.smooth(np.array([]), 3).tolist() == []


def test_what_a_run_gives():
    path = make_run(Path("a"), [math.nan, 20.0, 30.0], total_steps=96)
    with (path / rundir.METRICS).open("a") as file:
        file.write('garbage\n{"step": 128, "epoch": 4, "episode/return": 40.0}\n{"step": 160, "ep')
    found = plot.series(path, ["episode/return", "nothing"])
    assert [a.tolist() for a in found["episode/return"]] == [[64, 96, 128], [20, 30, 40]]
    assert [a.tolist() for a in found["nothing"]] == [[], []]
    assert plot.series(path, ["episode/return"], "time")["episode/return"][0].tolist() == [4, 6]  # the last has no time
    assert plot.series(Path("nowhere"), ["x"])["x"][0].shape == (0,)


def test_runs_that_differ_in_the_seed_share_a_line():
    made = [make_run(Path(f"s{i}"), seed=s, hidden=h) for i, (s, h) in enumerate([(0, 64), (1, 64), (0, 32)])]
    groups = plot.groups([runs.read(path) for path in made])
    assert {label: [run.path.name for run in group] for label, group in groups.items()} == {
        "hidden=64": ["s0", "s1"],
        "hidden=32": ["s2"],
    }


def test_two_algorithms_are_told_apart_by_name():
    made = [make_run(Path("a"), hidden=64), make_run(Path("b"), hidden=32), make_run(Path("c"))]
    record = json.loads((Path("c") / "run.json").read_text())
    (Path("c") / "run.json").write_text(json.dumps({**record, "algorithm": "dqn"}))
    (Path("c") / "config.json").write_text(json.dumps({"env": "sharpwave/CartPole", "hidden": 64, "n_step": 3}))
    found = [runs.read(path) for path in made]
    assert list(plot.groups(found)) == ["ppo hidden=64", "ppo hidden=32", "dqn"]
    assert runs.differences([found[0], found[2]]) == {}
    assert runs.differences(found) == {"hidden": [64, 32, 64]}


def test_labels_stay_apart_where_they_are_cut_or_unknown():
    odd = {"env_kwargs": {"a": "long " * 20}}
    made = [make_run(Path("x"), **odd, hidden=16), make_run(Path("y"), **odd, hidden=32), make_run(Path("z"))]
    for name in ("p", "q"):
        (make_run(Path(name)) / "config.json").write_text(json.dumps({"env": name}))
        made.append(Path(name))
    groups = plot.groups([runs.read(path) for path in made])
    assert len(groups) == 5 and all(len(group) == 1 for group in groups.values())
    assert all(len(label) <= plot.LABEL + 8 for label in groups)


def test_panels_lines_and_bands():
    made = [make_run(Path(f"s{seed}"), [float(seed), 9.0], seed=seed) for seed in range(3)]
    made.append(make_run(Path("other"), env="sharpwave/CueRecall"))
    fig = plot.figure([runs.read(path) for path in made], ["episode/return", "loss/value"])
    shown = [axis for axis in fig.axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown] == ["sharpwave/CartPole", "sharpwave/CueRecall", "", ""]
    first = shown[0]
    assert len(first.lines) == 4 and len(first.collections) == 1  # three runs, their median, their spread
    assert first.lines[-1].get_ydata().tolist() == [1, 9]
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["ppo (3 runs)"]
    assert first.get_legend().get_title().get_text() == "median and interquartile range"


@pytest.mark.parametrize("suffix, head", [(".png", PNG), (".svg", SVG), (".PNG", PNG), (".pdf", b"%PDF")])
def test_the_suffix_is_the_format(suffix, head, capfd):
    make_run(Path("runs/a"))
    assert main(["plot", "--out", f"x{suffix}"]) == 0
    assert Path(f"x{suffix}").read_bytes().startswith(head)
    assert capfd.readouterr().out == f"x{suffix}: 1 run, episode/return\n"


def test_nothing_is_overwritten(capfd):
    make_run(Path("runs/a"))
    Path("x.png").write_text("mine")
    assert main(["plot", "--out", "x.png"]) == 2
    assert capfd.readouterr().err == (
        "sharpwave: error: x.png exists: choose another --out, or give --force to replace it\n"
    )
    assert Path("x.png").read_text() == "mine"
    assert main(["plot", "--out", "x.png", "--force"]) == 0
    assert Path("x.png").read_bytes().startswith(PNG)
    for name in ("plot.png", "plot-2.png", "plot-3.png"):
        assert main(["plot", "runs/a"]) == 0
        assert Path(name).exists()


def test_a_file_that_appears_meanwhile_is_not_overwritten(monkeypatch):
    make_run(Path("runs/a"))
    monkeypatch.setattr(plot, "check_target", lambda *_, **__: None)
    Path("x.png").write_text("mine")
    assert main(["plot", "--out", "x.png"]) == 2
    assert Path("x.png").read_text() == "mine"


def test_the_same_runs_give_the_same_file():
    make_run(Path("runs/a"))
    for name in ("x.svg", "y.svg"):
        assert main(["plot", "--out", name]) == 0
    assert Path("x.svg").read_bytes() == Path("y.svg").read_bytes()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("nowhere", "no run at nowhere"),
        ("--out x.bmp", "--out must end in .png or .svg or .pdf; got x.bmp"),
        ("--out x", "--out must end in .png or .svg or .pdf; got x"),
        (
            "--out no/such/x.png",
            "cannot write no/such/x.png: there is no folder no/such; make it, or choose another --out",
        ),
        ("runs/a --metric", "--metric must name at least one metric"),
        ("--smooth 0", "--smooth must be at least 1; got 0"),
        ("--spread std", "invalid choice 'std' for argument '--spread'"),
        (
            "--metric loss/valu",
            "no run has the metric 'loss/valu': did you mean 'loss/value'?; there are episode/return",
        ),
        ("runs/new", "these runs have not logged anything yet: wait for their first epoch"),
        ("runs/young", "no run has a finite value of episode/return yet: episodes must end before they have a return"),
    ],
)
def test_what_is_refused(arguments, words, capfd):
    make_run(Path("runs/a"))
    make_run(Path("runs/new"), [])
    make_run(Path("runs/young"), [math.nan])
    before = sorted(Path().rglob("*"))
    assert main(["plot", *arguments.split()]) == 2
    assert words in capfd.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_without_matplotlib(monkeypatch, capfd):
    make_run(Path("runs/a"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot"]) == 2
    assert "plots need matplotlib: pip install 'sharpwave[plot]'" in capfd.readouterr().err
    with pytest.raises(UserError):
        plot.matplotlib_figure()
