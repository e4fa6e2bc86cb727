"""What a rollout's step leaves behind: the GPU's one launch against the operations it stands for."""

import dataclasses
from functools import partial

import pytest
import torch

from sharpwave.algos import _record_triton
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.algos.segments import Segments
from sharpwave.envs.base import Step
from sharpwave.nn import actions, policy
from sharpwave.nn.actions import Sample


def segments(n, horizon, columns, dtype, valid, device):
    def new(*shape, dtype=torch.float32):
        return torch.zeros(n, horizon, *shape, dtype=dtype, device=device)

    flags = {name: new(dtype=torch.bool) for name in ("terminated", "truncated", "reset")}
    numbers = {name: new() for name in ("logprob", "value", "next_value", "reward", "ratio")}
    return Segments(
        obs=new(2), action=new(columns, dtype=dtype), **numbers, **flags, state=torch.zeros(0, n, 1, device=device),
        valid=new(dtype=torch.bool) if valid else None, mask=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "n, columns, dtype, skips", [(3, 1, torch.int64, False), (300, 3, torch.int64, True), (7, 5, torch.float32, True)]
)
def test_triton_launch_is_the_many(n, columns, dtype, skips, gen, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    many, one = (segments(n, 4, columns, dtype, skips, device) for _ in range(2))
    begins = [torch.ones(n, dtype=torch.bool, device=device) for _ in range(2)]
    monkeypatch.setattr("sharpwave.algos.segments.installed", lambda _package: False)
    for t in (0, 1, 3):
        action = torch.randint(0, 9, (n, columns), generator=gen).to(device, dtype)
        logprob, reward, wide = (torch.randn(n, k, generator=gen).to(device) for k in (1, 1, 3))
        terminated, truncated, valid = (x.to(device) for x in torch.rand(3, n, generator=gen) < 0.3)
        step = Step(wide, reward[:, 0], terminated, truncated, wide, valid if skips else None)
        sample, value = Sample(action, logprob[:, 0]), wide[:, 1]
        many.record(t, sample, value, step, -step.reward, begins[0])
        record_in_one(one, t, sample, value, step, -step.reward, begins[1])
        assert torch.equal(*begins) and torch.equal(begins[0], step.begins)
    for field in dataclasses.fields(Segments):
        got, want = getattr(one, field.name), getattr(many, field.name)
        assert (got is None and want is None) or torch.equal(got, want), field.name
    assert many.reset[:, 0].all() and not many.reset[:, 2].any() and many.reward.any()


def test_triton_launches_make_the_same_rollout(monkeypatch):
    """Two rollouts whose every step goes through the GPU's kernels, wired as there, against the plain operations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = PPOConfig(
        env="sharpwave/Synthetic", device=device, num_envs=2, horizon=4, minibatch=4, hidden=8, total_steps=80,
        env_kwargs=dict(observation_size=5, num_actions=3, length=3, rows=7), dtype="float32",
    )  # fmt: skip
    plain, fused = PPO(config), PPO(config)
    for agent, triton in ((plain, False), (fused, True)):
        agent.env._triton = agent.episodes._triton = triton
        with monkeypatch.context() as patch:
            if triton:
                patch.setattr(agent.policy, "_reads_aligned", lambda _obs: True)
                patch.setattr(policy, "gather_rows", partial(policy.gather_rows, backend="triton"))
                patch.setattr(agent.policy.recurrent, "backend", "triton")
                patch.setattr(actions, "sample_categorical", partial(actions.sample_categorical, backend="triton"))
                patch.setattr(Segments, "record", record_in_one)
            for _ in range(2):
                agent._rollout()
    for field in dataclasses.fields(Segments):
        got, want = getattr(fused.segments, field.name), getattr(plain.segments, field.name)
        assert (got is None and want is None) or torch.allclose(got, want, atol=1e-5), field.name
    assert torch.equal(fused.obs, plain.obs) and torch.equal(fused.begins, plain.begins)
    assert torch.allclose(fused.state, plain.state, atol=1e-5)
    assert fused.episodes.read() == plain.episodes.read() and plain.episodes.read().episodes > 3
    assert fused.segments.reset[:, 1:].any()


def record_in_one(self, t, sample, value, step, reward, begins):
    into = (self.action, self.logprob, self.value, self.reward, self.terminated, self.truncated, self.reset)
    flags = (step.terminated, step.truncated, step.valid)
    _record_triton.record(*sample, value, reward, *flags, begins, into, self.valid, t)
