"""`sharpwave envs`, and what the command line says of environments of one's own."""

import json
import math
from pathlib import Path

import pytest

from sharpwave import envs
from sharpwave.cli import main
from sharpwave.envs import Continuous, Discrete, Family
from sharpwave.run.environment import clipping
from tests.envs import toys


def test_what_is_there_and_what_brings_the_rest(capfd, monkeypatch):
    found = [
        Family("native", None, True, "0.1.0", ("sharpwave/CartPole",)),
        Family("X", "xs", False, None, ("x/A", "x/B")),
    ]
    monkeypatch.setattr(envs, "families", lambda: found)
    assert main(["envs"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "native  0.1.0      sharpwave/CartPole",
        "X       pip install 'sharpwave[xs]'  x/A, x/B",
        "and your own: --env my_module:MyEnv",
    ]
    assert main(["envs", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[1]["extra"] == "xs"


def test_every_name(capfd):
    assert main(["envs", "--all"]) == 0
    assert {"sharpwave/CartPole", "CartPole-v1"} <= set(capfd.readouterr().out.splitlines())


@pytest.mark.parametrize(
    "arguments, facts",
    [
        ("CartPole-v1", {"observation": "4 float32", "action": "2 choices", "runs": "on the host"}),
        ("Pendulum-v1", {"action": "1 numbers from -2 to 2"}),
        (
            "sharpwave/CueRecall --env-kwargs k=3",
            {"runs": "on any device, inside the captured graph", "resume": "bit for bit"},
        ),
    ],
)
def test_one(arguments, facts, capfd):
    assert main(["envs", *arguments.split(), "--json"]) == 0
    assert json.loads(capfd.readouterr().out).items() >= facts.items()
    assert main(["envs", *arguments.split()]) == 0
    out = capfd.readouterr().out
    assert all(text in out for text in facts.values())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("CartPole-v9", "did you mean 'CartPole-v1'"),
        ("nowhere:Env", "there is no module 'nowhere'"),
        ("CartPole-v1 --env-kwargs k=1", "does not take these options"),
        ("CartPole-v1 other", "unexpected argument 'other'"),
    ],
)
def test_what_is_refused(arguments, words, capfd):
    assert main(["envs", *arguments.split()]) == 2
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_fault_shows_in_a_few_steps_with_the_users_own_lines(capfd):
    assert main(["envs", f"{toys.__name__}:Walk", "--env-kwargs", "faulty_at=3", "timeout=60"]) == 2
    first, where, code, *rest = capfd.readouterr().err.splitlines()
    assert first.endswith("tests.envs.toys:Walk: environment 0 raised OSError: the simulator has gone away at step 3")
    source = Path(toys.__file__)
    line = int(where.removeprefix(f"  {source}:").removesuffix(", in step"))
    assert code == f"    {source.read_text().splitlines()[line - 1].strip()}" and "raise OSError" in code and not rest


def test_the_shapes_of_a_misfit_are_said(capfd):
    assert main(["envs", f"{toys.__name__}:Misfit"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "environment 0 returned an observation of shape (3,), where its space has (4,), at reset" in line


def test_how_an_observation_is_flattened(capfd):
    assert main(["envs", f"{toys.__name__}:DictWalk"]) == 0
    assert "flattened    " in capfd.readouterr().out


@pytest.mark.parametrize(
    "low, high, is_told",
    [
        *[(-1, 1, False), (-2, 2, False), (-3, 3, False), (-math.inf, math.inf, False), (-1, math.inf, False)],
        *[(0, 100, True), (-0.4, 0.4, True), (-4, 4, True), (0, 1, True), (5, math.inf, True)],
    ],
)
def test_bounds_that_a_new_policy_does_not_explore(low, high, is_told):
    lines = clipping(Continuous(2, (-1.0, float(low)), (1.0, float(high))))
    assert bool(lines) is is_told
    if is_told:
        assert f"action 1 runs from {low} to {high}" in lines[0] and "RescaleAction(env, -1, 1)" in lines[0]
    assert clipping(Discrete((3,))) == []
