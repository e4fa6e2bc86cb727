"""Hindsight relabelling, and datasets of Minari's form."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sharpwave.replay import PrioritizedReplay
from sharpwave.replay.her import relabel
from sharpwave.replay.minari import load


def near(achieved, goal):
    return ((achieved - goal).abs().amax(-1) < 0.5).float() - 1


def episode(steps=6):
    path = torch.arange(steps + 1.0)[:, None]
    goal = torch.full((steps, 1), 99.0)
    return dict(
        obs=dict(achieved_goal=path[:-1], desired_goal=goal, observation=path[:-1] * 10),
        next_obs=dict(achieved_goal=path[1:], desired_goal=goal, observation=path[1:] * 10),
        action=torch.arange(steps),
        reward=-torch.ones(steps),
        terminated=torch.zeros(steps, dtype=torch.bool),
    )


def test_goals_lie_later_in_the_episode_and_rewards_follow():
    given = episode()
    got = relabel(given, near, copies=200, success=lambda r: r == 0, generator=torch.Generator().manual_seed(0))
    ahead = (got.obs.desired_goal[:, 0] - got.next_obs.achieved_goal[:, 0]).long()
    assert torch.equal(got.obs.desired_goal, got.next_obs.desired_goal)
    assert ((ahead >= 0) & (ahead <= 5 - got.action)).all()
    assert torch.equal(got.reward == 0, ahead == 0) and torch.equal(got.terminated, ahead == 0)
    first = torch.bincount(ahead[got.action == 0], minlength=6)
    assert first.min() > 15, "each later step is as likely"
    assert torch.equal(got.obs.observation[:, 0] / 10, got.action.float())
    assert (given["obs"]["desired_goal"] == 99).all()


def test_both_go_into_one_buffer():
    buffer = PrioritizedReplay(100)
    buffer.add(episode())
    buffer.add(relabel(episode(), near, copies=2))
    assert len(buffer) == 18
    with pytest.raises(KeyError, match="achieved_goal"):
        relabel(dict(obs=torch.zeros(3), reward=torch.zeros(3)), near)
    with pytest.raises(ValueError, match="copies"):
        relabel(episode(), near, copies=0)


class Dataset:
    def iterate_episodes(self):
        for k, steps in enumerate((5, 3)):
            flags = np.zeros((2, steps), bool)
            flags[0, -1] = k == 0
            yield SimpleNamespace(
                observations={"a": np.arange(steps + 1.0)[:, None] + 100 * k, "b": np.arange(steps + 1)},
                actions=np.arange(steps),
                rewards=np.ones(steps),
                terminations=flags[0],
                truncations=flags[1],
            )


def test_datasets_in_time_order():
    flat, stream = PrioritizedReplay(50), PrioritizedReplay(50, num_envs=1, n_step=2, gamma=0.5)
    for buffer in (flat, stream):
        assert load(buffer, Dataset()) == 8 == len(buffer)
    batch = stream.sample(200)
    assert batch.obs.a.dtype == torch.float32
    assert (batch.obs.a[:, 0] // 100 == batch.next_obs.a[:, 0] // 100).all(), "episodes do not leak"
    last_of_second = batch.obs.a[:, 0] == 102
    assert (batch.discount[last_of_second] == 0.5).all() and batch.truncated[last_of_second].all()
    assert (batch.discount[batch.obs.a[:, 0] == 4] == 0).all()
    with pytest.raises(ValueError, match="num_envs"):
        load(PrioritizedReplay(50, num_envs=2), Dataset())


def test_episodes_without_steps_and_observations_without_names():
    empty = SimpleNamespace(observations=np.zeros((1, 2)), actions=np.zeros(0), rewards=np.zeros(0))
    empty.terminations = empty.truncations = np.zeros(0, bool)
    unnamed = SimpleNamespace(**vars(empty) | {"observations": (np.zeros((1, 2)), np.zeros(1))})
    for envs in (None, 1):
        buffer = PrioritizedReplay(50, num_envs=envs)
        episodes = [empty, *Dataset().iterate_episodes(), empty]
        assert load(buffer, SimpleNamespace(iterate_episodes=lambda e=episodes: e)) == 8
        with pytest.raises(TypeError, match="a Tuple space"):
            load(buffer, SimpleNamespace(iterate_episodes=lambda: [unnamed]))


def test_datasets_of_the_real_library(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason="needs Minari: pip install minari")
    pytest.importorskip("jax", reason="Minari records with JAX: pip install 'minari[create]'")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    gymnasium = pytest.importorskip("gymnasium")
    env = minari.DataCollector(gymnasium.make("CartPole-v1"), record_infos=False)
    for seed in range(3):
        env.reset(seed=seed)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
    dataset = env.create_dataset("cartpole/random-v0")
    buffer = PrioritizedReplay(1000, num_envs=1, n_step=3)
    assert load(buffer, dataset) == dataset.total_steps == len(buffer)
    assert buffer.sample(10).next_obs.shape == (10, 4)
