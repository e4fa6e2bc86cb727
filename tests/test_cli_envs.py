"""`sharpwave envs`."""

import json

import pytest

from sharpwave import envs
from sharpwave.cli import main
from sharpwave.envs import Family


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
