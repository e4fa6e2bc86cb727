"""Vectors in groups: their transitions are those of the vectors alone, and the halves of a step are one step."""

import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

from sharpwave import envs
from sharpwave.envs import EnvFault, EpisodeStats, Grouped, Step
from sharpwave.envs.gymnasium import GymnasiumVector
from sharpwave.nn import RewardNormalizer
from tests.envs.toys import Opaque, Walk


def walks(n, processes=False, **options):
    make = AsyncVectorEnv if processes else SyncVectorEnv
    vector = make([partial(Walk, **options)] * n, autoreset_mode=AutoresetMode.DISABLED)
    return GymnasiumVector(vector, name="walk", action_mask="action_mask")


def relays(n):
    pytest.importorskip("pettingzoo")
    return envs.make("tests.envs.relay:Relay", n)


def atari(n):
    pytest.importorskip("ale_py")
    return envs.make("ALE/Breakout-v5", n, num_threads=1, max_num_frames_per_episode=100)


def pool(n):
    pytest.importorskip("envpool")
    return envs.make("envpool/CartPole-v1", n, num_threads=1, max_episode_steps=25)


KINDS = {"walks": (walks, 2, 40), "processes": (partial(walks, processes=True), 1, 30), "agents": (relays, 3, 30)}
KINDS |= {"atari": (atari, 1, 30), "envpool": (pool, 2, 60)}


def joined(parts):
    return None if parts[0] is None else torch.cat(parts)


@pytest.mark.parametrize("make, n, steps", KINDS.values(), ids=KINDS)
def test_transitions_are_those_of_the_vectors_alone(make, n, steps):
    """Stepped as a whole and group by group."""
    seeds = np.random.SeedSequence(5).generate_state(2, np.uint64) >> np.uint64(1)
    generator, ends = torch.Generator().manual_seed(0), 0
    with Grouped([make(n), make(n)]) as env, make(n) as first, make(n) as second:
        assert env.num_envs == 2 * n and len(env.groups) == 2 and first.groups == (first,)
        start, alone = env.reset(5), [one.reset(int(seed)) for one, seed in zip((first, second), seeds, strict=True)]
        assert torch.equal(start.obs, torch.cat([a.obs for a in alone]))
        for t in range(steps):
            action = torch.randint(0, env.action.nvec[0], (2 * n,), generator=generator)
            want = Step(*map(joined, zip(first.step(action[:n]), second.step(action[n:]), strict=True)))
            if t % 2:
                for group, part in zip(env.groups, action.split(n), strict=True):
                    group.step_async(part)
                got = Step(*map(joined, zip(*(group.step_wait() for group in env.groups), strict=True)))
            else:
                got = env.step(action)
                assert env.any_truncated == bool(want.truncated.any())
            for name, a, b in zip(Step._fields, got, want, strict=True):
                assert (a is None and b is None) or torch.equal(a, b), name
            ends += int(want.begins.sum())
    assert ends >= 2, "episodes must have ended for this to show anything"


class Telling(gymnasium.Env):
    """Tells by a file that a step is being taken."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file):
        self.file = file

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.file.touch()
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_processes_step_before_they_are_waited_for(tmp_path, wrapped):
    file = tmp_path / "stepping"
    vector = AsyncVectorEnv([partial(Telling, file)], autoreset_mode=AutoresetMode.DISABLED)
    # A wrapper might change what its `step` returns, so that it is not passed over.
    with GymnasiumVector(VectorWrapper(vector) if wrapped else vector, name="telling") as env:
        env.reset(0)
        env.step_async(torch.zeros(1, dtype=torch.int64))
        until = time.monotonic() + (0.2 if wrapped else 20)
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.001)
        assert file.exists() is not wrapped
        env.step_wait()
        assert file.exists()


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_fault_names_the_environment_of_all(processes):
    """Environment 1 of group 1 of two; what the other group is doing does not keep it from closing."""
    groups = [walks(2, processes), walks(2, processes)]
    groups[1].close()
    make = AsyncVectorEnv if processes else SyncVectorEnv
    vector = make([Walk, partial(Walk, faulty_at=2)], autoreset_mode=AutoresetMode.DISABLED)
    groups[1] = GymnasiumVector(vector, name="walk", action_mask="action_mask")
    stay = torch.zeros(2, dtype=torch.int64)
    with Grouped(groups) as env:
        env.reset(0)
        env.step(torch.zeros(4, dtype=torch.int64))
        for group in env.groups:
            group.step_async(stay)
        with pytest.raises(EnvFault, match=r"walk: environment 3 raised OSError: .* at step 2") as caught:
            env.groups[1].step_wait()
        assert (caught.value.index, caught.value.step) == (3, 2)
    groups[0].close()
    with pytest.raises(RuntimeError, match="walk is closed"):
        groups[0].step_wait()


class TestState:
    def test_episodes_go_on_exactly(self):
        env, again = (Grouped([walks(2), walks(2)]) for _ in range(2))
        env.reset(3)
        action = torch.tensor([0, 1, 2, 0])
        for _ in range(7):
            env.step(action)
        state = env.state_dict()
        start = again.load_state_dict(state)
        assert start.continued and env.exact_resume and start.action_mask.shape == (4, 3)
        for _ in range(20):
            for a, b in zip(env.step(action), again.step(action), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)

    def test_all_begin_anew_where_one_cannot_go_on(self):
        def opaque():
            return GymnasiumVector(SyncVectorEnv([Opaque], autoreset_mode=AutoresetMode.DISABLED), name="opaque")

        env = Grouped([opaque(), opaque()])
        env.reset(3)
        env.step(torch.zeros(2, dtype=torch.int64))
        assert "Opaque" in env.inexact_because or "handle" in env.inexact_because
        assert not env.load_state_dict(env.state_dict()).continued
        env = Grouped([walks(1), walks(1)])
        env.reset(3)
        state = env.state_dict() | {"group 1 exact": False}
        start = env.load_state_dict(state)
        assert not start.continued and start.obs[:, 1].tolist() == [0, 0], "both, for the caller is told that all do"

    def test_a_state_of_other_groups_is_refused(self):
        env, whole = Grouped([walks(2), walks(2)]), walks(4)
        env.reset(0), whole.reset(0)
        with pytest.raises(ValueError, match="state's groups is 1, this environment's is 2"):
            env.load_state_dict(whole.state_dict())
        with pytest.raises(ValueError, match="state's groups is 2, this environment's is 1"):
            whole.load_state_dict(env.state_dict())


class TestUse:
    def test_halves_in_the_wrong_order(self):
        env = walks(2)
        action = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="step_async before reset"):
            env.step_async(action)
        env.reset(0)
        state = env.state_dict()
        with pytest.raises(RuntimeError, match="step_wait before step_async"):
            env.step_wait()
        with pytest.raises(ValueError, match=r"shape \(2,\)"):
            env.step_async(action[:1])
        env.step_async(action)
        uses = (env.state_dict, lambda: env.reset(0), lambda: env.load_state_dict(state))
        for use in (lambda: env.step(action), lambda: env.step_async(action), *uses):
            with pytest.raises(RuntimeError, match="while a step has begun: call step_wait first"):
                use()
        env.step_wait()
        env.step(action)

    def test_vectors_that_make_no_groups(self):
        with pytest.raises(ValueError, match="at least two vectors; got 1"):
            Grouped([walks(2)])
        with pytest.raises(ValueError, match="groups must be alike"):
            Grouped([walks(2), walks(1)])
        with pytest.raises(ValueError, match="sharpwave/CartPole cannot step beside the policy"):
            Grouped([envs.make("sharpwave/CartPole", 2) for _ in range(2)])


def steps(valid):
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        reward = torch.rand(6, generator=generator)
        terminated, truncated, skipped = torch.rand(3, 6, generator=generator) < 0.2
        yield Step(reward, reward, terminated, truncated, reward, ~skipped if valid else None)


@pytest.mark.parametrize("valid", [False, True])
def test_statistics_of_rows_are_those_of_all(valid):
    whole, parts = EpisodeStats(6, window=8), EpisodeStats(6, window=8)
    for step in steps(valid):
        whole.update(step)
        for rows in (slice(0, 2), slice(2, 6)):
            parts.update(Step(*(None if x is None else x[rows] for x in step)), rows)
    assert whole.read() == parts.read() and whole.read().episodes > 8
    for a, b in zip(whole._tensors().values(), parts._tensors().values(), strict=True):
        assert torch.equal(a, b) or len(a) > 8  # beyond the window lies what nobody reads
    assert torch.equal(whole._returns[:8], parts._returns[:8]) and torch.equal(whole._lengths[:8], parts._lengths[:8])


def test_rewards_of_rows_are_normalised_by_all():
    whole, parts = RewardNormalizer(6, 0.9), RewardNormalizer(6, 0.9)
    for step in steps(False):
        ended = step.terminated | step.truncated
        whole(step.reward, ended)
        for rows in (slice(0, 2), slice(2, 6)):
            scale = parts(step.reward[rows], ended[rows], rows) / step.reward[rows]
    assert torch.equal(whole.returns, parts.returns) and whole.count == parts.count
    assert torch.allclose(whole.var, parts.var, rtol=1e-12)
    assert torch.allclose(scale, whole.var.rsqrt().float())  # the last rows saw what all had seen
