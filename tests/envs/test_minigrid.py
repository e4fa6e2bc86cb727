"""MiniGrid's views; its transitions are in test_adapters."""

import sys

import pytest
import torch

pytest.importorskip("minigrid")

from sharpwave import envs


def test_views():
    one_hot, image = (envs.make("MiniGrid-MemoryS7-v0", 2, view=view) for view in ("onehot", "image"))
    assert one_hot.observation == envs.Observation((7, 7, 21), torch.int8)
    assert image.observation == envs.Observation((7, 7, 3), torch.uint8)
    a, b = one_hot.reset(3).obs, image.reset(3).obs.long()
    parts = a.split([11, 6, 4], dim=3)
    for k, part in enumerate(parts):
        assert (part.sum(3) == 1).all() and torch.equal(part.argmax(3), b[..., k])
    with pytest.raises(ValueError, match="view must be 'onehot' or 'image'"):
        envs.make("MiniGrid-MemoryS7-v0", 1, view="text")


def test_chosen_actions():
    """The second of ["forward", "left"] turns left: the agent's direction goes from 0 to 3."""
    env = envs.make("MiniGrid-MemoryS7-v0", 1, actions=["forward", "left"])
    assert env.action == envs.Discrete((2,))
    env.reset(0)
    agent = env.vector.envs[0].unwrapped
    assert agent.agent_dir == 0
    env.step(torch.tensor([1]))
    assert agent.agent_dir == 3
    with pytest.raises(ValueError, match=r"actions must be some of left, right, forward, .*; got jump"):
        envs.make("MiniGrid-MemoryS7-v0", 1, actions=["left", "jump"])


def test_missions_are_not_dropped_where_they_matter():
    with pytest.raises(ValueError, match="the mission is text"):
        envs.make("BabyAI-GoToObj-v0", 1)


def test_unknown():
    with pytest.raises(ValueError, match="'MiniGrid-MemoryS77-v0': did you mean 'MiniGrid-MemoryS7-v0'"):
        envs.make("MiniGrid-MemoryS77-v0", 1)


def test_without_minigrid(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ImportError, match=r"pip install 'sharpwave\[minigrid\]'"):
        envs.make("MiniGrid-MemoryS7-v0", 1)
