"""Agents of parallel environments as rows of one vector."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("pettingzoo")

from sharpwave import envs
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.envs.pettingzoo import PettingZooVector
from tests.envs.relay import Relay


def relay(copies=2, **options):
    return PettingZooVector(lambda: Relay(**options), 3 * copies)


def test_agents_that_left_wait_for_the_others():
    """By hand: a leaves after 1 step, b after 3, c after 2; then a row is not valid until all begin anew."""
    env = relay(1)
    env.reset(0)
    env.copies[0].until = {"a": 1, "b": 3, "c": 2}
    stay = torch.zeros(3, dtype=torch.int64)
    first, second, third = (env.step(stay) for _ in range(3))
    assert first.valid.tolist() == [True, True, True] and first.terminated.tolist() == [True, False, False]
    assert second.valid.tolist() == [False, True, True]
    assert second.terminated.tolist() == [False, False, True] and second.truncated.tolist() == [False, False, True]
    assert second.obs[0].tolist() == first.next_obs[0].tolist() == [1, 1, 0], "it shows its last observation again"
    assert second.reward.tolist() == [0, 2, 2]
    assert third.valid.tolist() == [False, True, False] and third.truncated.tolist() == [False, True, False]
    assert third.next_obs[1].tolist() == [1, 3, 0], "the true last observation"
    assert third.obs.tolist() == [[2, 0, -1]] * 3, "all begin together"
    assert third.begins.all() and env.step(stay).valid.all()


def test_masks():
    env = relay()
    assert env.action == envs.Discrete((3,), masked=True)
    start = env.reset(0)
    assert start.action_mask.tolist() == [[False, True, True]] * 6
    env.copies[0].until = dict.fromkeys("abc", 5)
    assert env.step(torch.ones(6, dtype=torch.int64)).action_mask[0].tolist() == [True, False, True]


@pytest.mark.long
def test_trained():
    agent = PPO(
        PPOConfig(
            env="tests.envs.relay:Relay",
            device="cpu",
            num_envs=12,
            horizon=8,
            minibatch=32,
            hidden=16,
            total_steps=960,
            env_kwargs={"longest": 4},
        )
    )
    for _ in range(4):
        agent.train_epoch()
    assert (~agent.segments.valid).any() and torch.isfinite(agent.segments.value).all()
    assert 1 < agent.metrics()["episode/length"] < 4


def test_names_and_numbers():
    env = envs.make("tests.envs.relay:Relay", 6, longest=2)
    assert len(env.copies) == 2 and env.copies[1].longest == 2
    with pytest.raises(ValueError, match=r"has 3 agents, .* multiple of 3; got 8: use 6"):
        envs.make("tests.envs.relay:Relay", 8)
    with pytest.raises(ValueError, match=r"there is no module pettingzoo.sisl.persuit"):
        envs.make("pettingzoo/sisl/persuit", 2)
    if importlib.util.find_spec("scipy") is None:
        with pytest.raises(ImportError, match=r"'scipy': pip install 'pettingzoo\[sisl\]'"):
            envs.make("pettingzoo/sisl/pursuit_v5", 8)
    with pytest.raises(ValueError, match=r"does not take these options: .*'speed'"):
        envs.make("pettingzoo/classic/rps_v2", 2, speed=1)


def test_faults_are_named():
    env = relay(2, fault="nan")
    env.reset(0)
    env.copies[0].until = env.copies[1].until = dict.fromkeys("abc", 5)
    env.copies[0].fault = None
    stay = torch.zeros(6, dtype=torch.int64)
    env.step(stay)
    with pytest.raises(
        envs.EnvFault, match=r"environment 5 \(agent 'c' of copy 1\) returned a NaN .* at step 2"
    ) as caught:
        env.step(stay)
    assert (caught.value.index, caught.value.step) == (5, 2)
    env = relay(2, fault="raise", longest=1)
    env.reset(0)
    env.copies[1].until = dict.fromkeys("abc", 5)
    env.step(stay)
    with pytest.raises(envs.EnvFault, match=r"environment 3 \(copy 1\) raised OSError: the simulator has gone away"):
        env.step(stay)


def replaced(place, value):
    """A change of what step returned for agent a: one entry of it, or the entry's key removed."""

    def change(env, found):
        if value is None:
            del found[place]["a"]
        else:
            found[place]["a"] = value(found[place]["a"])

    return change


def forget(env, found):
    env.agents.remove("a")


@pytest.mark.parametrize(
    "change, words",
    [
        (replaced(0, lambda o: o | {"observation": np.float32(7)}), r"got float32 of shape \(\)"),
        (replaced(0, lambda o: o | {"observation": np.zeros(1, np.float32)}), r"got float32 of shape \(1,\)"),
        (replaced(0, lambda o: o | {"observation": np.zeros(3, complex)}), r"must be float32 .*; got complex128"),
        (replaced(0, lambda o: o | {"action_mask": True}), r"action_mask must be .* shape \(3,\); got bool of shape"),
        (replaced(0, lambda o: o | {"action_mask": [1, 2, 0]}), "action_mask must be true or false"),
        (replaced(0, None), r"no entry 'a'"),
        (replaced(1, None), r"no entry 'a'"),
        (replaced(1, lambda r: np.ones(1)), r"reward must be real numbers of shape \(\); got float64 of shape \(1,\)"),
        (replaced(2, lambda e: float("nan")), "an end must be true or false"),
        (forget, "left `agents` neither terminated nor truncated"),
    ],
)
def test_what_cannot_be_read_is_a_fault_of_its_agent(change, words):
    class Odd(Relay):
        def step(self, actions):
            found = super().step(actions)
            change(self, found)
            return found

    env = PettingZooVector(Odd, 3)
    env.reset(0)
    env.copies[0].until = dict.fromkeys("abc", 5)
    with pytest.raises(envs.EnvFault, match=r"environment 0 \(agent 'a' of copy 0\) .*" + words):
        env.step(torch.zeros(3, dtype=torch.int64))


def test_an_agent_that_is_kept_after_its_end_ends_once():
    class Kept(Relay):
        def step(self, actions):
            present = self.agents
            found = super().step(actions)
            self.agents = present
            return found

    env = PettingZooVector(Kept, 3)
    env.reset(0)
    env.copies[0].until = {"a": 1, "b": 3, "c": 2}
    steps = [env.step(torch.zeros(3, dtype=torch.int64)) for _ in range(4)]
    assert [step.valid.tolist() for step in steps] == [
        [True] * 3,
        [False, True, True],
        [False, True, False],
        [True] * 3,
    ]
    ends = [(step.terminated | step.truncated).tolist() for step in steps[:3]]
    assert ends == [[True, False, False], [False, False, True], [False, True, False]]
    assert steps[1].obs[0].tolist() == [1, 1, 0], "it shows its last observation again"


def test_without_pettingzoo(monkeypatch):
    monkeypatch.delitem(sys.modules, "sharpwave.envs.pettingzoo")
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ImportError, match=r"pip install 'sharpwave\[pettingzoo\]'"):
        envs.make("pettingzoo/classic/rps_v2", 2)
