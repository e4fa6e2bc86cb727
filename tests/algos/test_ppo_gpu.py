"""The PPO trainer on a GPU: captured as eager, no waits, no allocation, and what it learns there."""

import gc

import pytest
import torch

from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.algos.segments import segment_advantage
from sharpwave.run.evaluate import evaluate
from sharpwave.run.graphs import Captured
from tests.algos.test_ppo import fingerprint, train
from tests.algos.toys import in_turn

pytestmark = pytest.mark.gpu

SMALL = dict(device="cuda", num_envs=64, horizon=16, minibatch=256, hidden=32, total_steps=1024 * 20)


def trainer(env="sharpwave/CartPole", captured=True, **changes):
    agent = PPO(PPOConfig(env=env, **(SMALL | changes)))
    for part in (agent, *agent.groups):
        for run in vars(part).values():
            if isinstance(run, Captured):
                run.enabled &= captured
    return agent


@pytest.mark.parametrize("env", ["sharpwave/CartPole", "sharpwave/CueRecall"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_equals_eager(env, dtype):
    captured = train(trainer(env, dtype=dtype))
    assert all(run.graph for run in (captured._run_draw, captured._run_update, captured._run_last_update))
    assert captured._run_rollout.graph is not None
    assert fingerprint(captured) == fingerprint(train(trainer(env, captured=False, dtype=dtype)))


HOST = dict(env="Acrobot-v1", env_kwargs=dict(max_episode_steps=7), num_envs=8, minibatch=32, total_steps=128 * 6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"puffer_compat": True}, {"normalize_obs": True, "normalize_reward": True}])
def test_environments_on_the_host(changes, groups):
    """Their step is in no graph, but the policy's is; and the value where an episode was cut off, inside a segment."""
    settings = HOST | dict(env_groups=groups) | changes
    captured = train(trainer(**settings))
    assert captured._run_rollout.graph is None and len(captured.groups) == groups
    for group in captured.groups:
        assert group.run_next_value.graph is not None
        assert (group.run_act.graph is None) == ("puffer_compat" in changes)
    assert fingerprint(captured) == fingerprint(train(trainer(captured=False, **settings)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_that_overlap_are_groups_in_turn(mode):
    """While one group steps, the other's observations, policy and actions are on their way."""
    kwargs = HOST["env_kwargs"] | dict(vectorization_mode=mode)
    overlapped, turns = (trainer(**HOST | dict(env_groups=2, env_kwargs=kwargs)) for _ in range(2))
    in_turn(turns.env)
    assert fingerprint(train(overlapped)) == fingerprint(train(turns))
    for agent in (overlapped, turns):
        agent.close()


def test_resume_of_groups_is_exact():
    straight = train(trainer(**HOST, env_groups=2))
    half, resumed = trainer(**HOST, env_groups=2), trainer(**HOST, env_groups=2)
    for _ in range(3):
        half.train_epoch()
    resumed.load_state_dict(half.state_dict())
    assert fingerprint(train(resumed)) == fingerprint(straight)


@pytest.mark.parametrize("env", ["sharpwave/CartPole", "sharpwave/Synthetic"])
def test_observations_are_kept_as_the_network_reads_them(env):
    agent = train(trainer(env))
    kept, first = agent.segments.obs, agent.obs.clone()
    size = agent.env.observation.size
    agent._run_rollout()
    assert kept.dtype == torch.bfloat16 and kept.shape[2] % 8 == 0 and not kept[:, :, size:].any()
    assert torch.equal(kept[:, 0, :size], first.flatten(1).bfloat16())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        from_kept = agent.policy.step(kept[:, 0].contiguous(), agent.state)
        from_raw = agent.policy.step(first, agent.state)
    assert torch.equal(from_kept.params, from_raw.params) and torch.equal(from_kept.value, from_raw.value)


def test_resume_is_exact():
    straight = train(trainer())
    half = trainer()
    for _ in range(10):
        half.train_epoch()
    resumed = trainer()
    resumed.load_state_dict(half.state_dict())
    assert fingerprint(train(resumed)) == fingerprint(straight)


def test_loading_into_a_captured_trainer():
    """Graphs that were captured before go on from what was loaded."""
    straight = train(trainer())
    half, other = trainer(), trainer()
    for _ in range(10):
        half.train_epoch()
    for _ in range(6):
        other.train_epoch()
    other.load_state_dict(half.state_dict())
    assert fingerprint(train(other)) == fingerprint(straight)


def test_no_wait_and_no_allocation():
    agent = trainer()
    for _ in range(4):
        agent.train_epoch()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            for _ in range(agent.config.updates_per_epoch):
                agent._run_update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    assert after == before
    torch.cuda.set_sync_debug_mode("error")
    try:
        agent.train_epoch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert agent.metrics()["fault/skipped_updates"] == 0


def test_advantages_follow_what_was_written_back():
    """Those of the drawn segments are computed anew, the others kept: bit for bit what all give at once."""
    agent = trainer()
    for _ in range(4):
        agent.train_epoch()
    agent._run_rollout()
    agent._run_draw()
    first = agent.advantage.clone()
    for _ in range(3):
        agent._run_update()
    advantage, priority = segment_advantage(agent.segments, agent.config)
    assert torch.equal(agent.advantage, advantage) and torch.equal(agent.priority, priority)
    assert not torch.equal(first, advantage)


def test_infinite_reward_skips_the_step():
    agent = trainer()
    for _ in range(4):
        agent.train_epoch()
    weights = [p.detach().clone() for p in agent.policy.parameters()]
    agent.metrics()
    agent.segments.reward.fill_(3e38)
    agent._run_draw()
    agent._run_last_update()
    assert all(torch.equal(p, w) for p, w in zip(agent.policy.parameters(), weights, strict=True))
    assert agent.metrics()["fault/skipped_updates"] == 1 and agent.faults()


def test_learns_cartpole():
    config = dict(num_envs=1024, horizon=64, minibatch=8192, hidden=128, total_steps=4_000_000)
    agent = train(trainer(**config, gamma=0.99, reward_scale=0.01))
    assert evaluate(agent, agent.env, 1024, seed=1).mean() >= 475


def test_learns_the_memory_task():
    """Returns of 0.95 of 1, where chance, and a policy without memory, is 0.25."""
    agent = PPO(
        PPOConfig(
            env="sharpwave/CueRecall",
            device="cuda",
            env_kwargs=dict(k=4, delay=30),
            num_envs=1024,
            minibatch=2048,
            total_steps=8_000_000,
            ent_coef=0.01,
        )
    )
    best = 0.0
    while agent.epoch < agent.num_epochs and best < 0.95:
        agent.train_epoch()
        if agent.epoch % 10 == 0:
            best = agent.metrics()["episode/return"]
    assert best >= 0.95
