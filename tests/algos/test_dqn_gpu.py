"""The DQN trainer on a GPU: captured as eager, no waits, no allocation, and what it learns there."""

import gc

import pytest
import torch

from sharpwave.algos.dqn import DQN, DQNConfig
from sharpwave.run.checkpoint import flatten
from sharpwave.run.evaluate import evaluate
from tests.algos.test_dqn import Pixels, fingerprint, train

pytestmark = pytest.mark.gpu

SMALL = dict(
    device="cuda", num_envs=16, epoch_steps=16, batch_size=64, hidden=32, buffer_size=2000, learning_starts=256,
    total_steps=256 * 12,
)  # fmt: skip


def trainer(env="sharpwave/CartPole", captured=True, **changes):
    agent = DQN(DQNConfig(env=env, **(SMALL | changes)), Pixels(16, "cuda") if env == "toy/Pixels" else None)
    for each in (agent._run_step, agent._run_block, agent._run_one):
        each.enabled &= captured
    return agent


VARIANTS = {
    "plain": dict(),
    "polyak": dict(target_interval=1, tau=0.01, double=False, dueling=False),
    "hard": dict(target_interval=7),
    "noisy": dict(noisy=True),
    "c51": dict(atoms=21, v_min=0.0, v_max=30.0),
    "muon": dict(optimizer="muon", lr=0.005),
    "bfloat16": dict(dtype="bfloat16"),
    "frames": dict(frame_stack=3),
    "singles": dict(updates_per_step=0.07),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_equals_eager(variant):
    changes = VARIANTS[variant]
    captured = train(trainer(**changes))
    assert captured._run_step.graph is not None
    assert captured._run_block.graph is not None or captured._run_one.graph is not None
    assert captured.updates > 50
    assert fingerprint(captured) == fingerprint(train(trainer(captured=False, **changes)))


@pytest.mark.parametrize("changes", [dict(), dict(dueling=False, double=False, target_interval=1, tau=0.1)])
def test_the_loss_in_three_launches_is_the_same(changes):
    """A few updates: rounding differs, and what learns amplifies that."""
    plain, fused = (trainer(learning_starts=SMALL["total_steps"] - 1, **changes) for _ in range(2))
    assert fused._is_fused
    plain._is_fused = False
    for agent in (plain, fused):
        agent.train_epoch()
        agent.update(8)
    for x, y in zip(plain.policy.parameters(), fused.policy.parameters(), strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    assert fused.metrics() == pytest.approx(plain.metrics(), rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_convolutions_captured_equal_eager(network):
    changes = dict(env="toy/Pixels", network=network, frame_stack=2, total_steps=256 * 6)
    captured = train(trainer(**changes))
    assert captured.dtype == torch.bfloat16
    assert fingerprint(captured) == fingerprint(train(trainer(captured=False, **changes)))


def test_environments_on_the_host():
    """Their steps overlap with the updates; the numbers are those of a run in which nothing overlaps."""

    def run(wait):
        agent = trainer(env="CartPole-v1", total_steps=256 * 6)
        if wait:
            update = agent.update
            agent.update = lambda count: (torch.cuda.synchronize(), update(count), torch.cuda.synchronize())
        return train(agent).policy.state_dict()

    for (name, x), y in zip(run(False).items(), run(True).values(), strict=True):
        assert torch.equal(x, y), name


def same_state(a, b):
    """Names of what differs between two trainers' checkpoints."""
    (x, _), (y, _) = flatten(a.state_dict()), flatten(b.state_dict())
    return [name for name in x if not torch.equal(x[name].cpu(), y[name].cpu())]


@pytest.mark.parametrize("was_captured", [False, True])
def test_resume_is_exact(was_captured):
    """Also into a trainer that has captured its graphs before."""
    straight = train(trainer())
    half = trainer()
    for _ in range(6):
        half.train_epoch()
    resumed = trainer()
    for _ in range(4 if was_captured else 0):
        resumed.train_epoch()
    resumed.load_state_dict(half.state_dict())
    assert same_state(resumed, half) == []
    assert same_state(train(resumed), straight) == []


def test_no_wait_and_no_allocation():
    agent = trainer()
    for _ in range(6):
        agent.train_epoch()
        agent._run_one()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            agent._run_block()
            agent._run_one()
            agent._run_step()
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


def test_infinite_reward_skips_the_step():
    agent = trainer(huber=float("inf"))
    for _ in range(6):
        agent.train_epoch()
    weights = [p.detach().clone() for p in agent.policy.parameters()]
    agent.metrics()
    agent.replay.storage.tensors["reward"].fill_(3e38)
    agent._run_one()
    assert all(torch.equal(p, w) for p, w in zip(agent.policy.parameters(), weights, strict=True))
    assert agent.metrics()["fault/skipped_updates"] == 1 and agent.faults()


def test_learns_cartpole():
    changes = dict(total_steps=200_000, num_envs=16, buffer_size=100_000, lr=1e-3, lr_schedule="linear")
    changes |= dict(reward_scale=0.1, target_interval=200)
    agent = train(DQN(DQNConfig(env="sharpwave/CartPole", device="cuda", **changes)))
    assert evaluate(agent, agent.env, 64, seed=1).mean() >= 475
