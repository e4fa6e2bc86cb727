"""Normalisers in the PPO trainer: when they learn, and where what they learnt travels."""

import pytest
import torch

from sharpwave.algos.ppo import PPO
from sharpwave.envs.cartpole import CartPole
from sharpwave.run import loop, rundir
from sharpwave.run.checkpoint import flatten, unflatten
from tests.algos.test_ppo import fingerprint, one_update, train, trainer

BOTH = dict(normalize_obs=True, normalize_reward=True)


def test_statistics_are_those_of_what_was_seen_between_epochs():
    agent = trainer(CartPole(8, max_episode_steps=7), **BOTH)
    seen = []
    for _ in range(3):
        agent.train_epoch()
        seen.append(agent.segments.obs.flatten(0, 1).double().clone())
        rows = torch.cat(seen)
        torch.testing.assert_close(agent.policy.normalizer.mean, rows.mean(0))
        torch.testing.assert_close(agent.policy.normalizer.var, rows.var(0, correction=0))
    assert agent.reward_normalizer.count == rows.shape[0]


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_ratios_are_one_before_the_first_update(encoder):
    """The statistics do not move between a rollout and its updates."""
    agent = trainer(encoder=encoder, **BOTH)
    for _ in range(3):
        agent.train_epoch()
    agent._rollout()
    one_update(agent)
    assert (agent.segments.ratio - 1).abs().max() <= 1e-5


def test_resumed_bit_for_bit():
    changes = dict(total_steps=128 * 20, **BOTH)
    straight = train(trainer(**changes))
    half = trainer(**changes)
    for _ in range(10):
        half.train_epoch()
    resumed = trainer(**changes)
    resumed.load_state_dict(unflatten(*flatten(half.state_dict())))
    assert fingerprint(train(resumed)) == fingerprint(straight)


def test_evaluation_reads_observations_as_training_did(tmp_path):
    """The same action on the same raw observation, also in a trainer with another number of environments."""
    agent = trainer(total_steps=128 * 4, **BOTH)
    run_dir = rundir.create(tmp_path / "run", "ppo", agent.config, command=[])
    loop.run(agent, run_dir)
    other = trainer(num_envs=4, minibatch=32, seed=9, **BOTH)
    raw = 5 * torch.randn(8, 4)
    before = other.policy.step(raw, other.policy.initial_state(8)).params
    loop.restore_policy(other, run_dir)
    after = other.policy.step(raw, other.policy.initial_state(8)).params
    assert torch.equal(after, agent.policy.step(raw, agent.policy.initial_state(8)).params)
    assert not torch.equal(after, before)
    other.policy.normalizer.load_state_dict(trainer(**BOTH).policy.normalizer.state_dict())
    assert not torch.equal(after, other.policy.step(raw, other.policy.initial_state(8)).params), "they matter"


def test_logs_show_rewards_as_they_are():
    agent = trainer(CartPole(8, max_episode_steps=7), **BOTH)
    agent.train_epoch()
    assert agent.metrics()["episode/return"] == agent.metrics()["episode/length"] == 7
    assert agent.segments.reward.max() != 1


def test_off_by_default():
    agent = trainer()
    assert agent.policy.normalizer is None and agent.reward_normalizer is None
    assert "reward_normalizer" not in agent.state_dict()


@pytest.mark.gpu
def test_captured_equals_eager():
    def run(captured: bool) -> PPO:
        agent = trainer(device="cuda", num_envs=64, minibatch=256, total_steps=1024 * 20, **BOTH)
        agent._run_update.enabled &= captured
        agent._run_rollout.enabled &= captured
        return train(agent)

    assert fingerprint(run(True)) == fingerprint(run(False))
