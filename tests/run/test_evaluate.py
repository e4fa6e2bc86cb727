"""Evaluation: exact returns of exactly the episodes asked for, without favour for short ones."""

import pytest
import torch

from sharpwave.envs.base import Discrete, Observation, Reset, Step, VectorEnv
from sharpwave.run.evaluate import evaluate, summary


class Scripted(VectorEnv):
    """Environment i plays episodes of the lengths lengths[i], over and over; each step's reward is 10 i + episode.

    With `late`, the next episode begins one step after an end, as in Gymnasium's next-step mode.
    """

    def __init__(self, lengths, late=False, device="cpu"):
        super().__init__("scripted", len(lengths), device, Observation((2,), torch.float32), Discrete((2,)))
        self.lengths, self.late, self.may_skip = lengths, late, late

    def _reset(self, seed):
        n = self.num_envs
        self.seed, self.t, self.episode, self.skip = seed, [0] * n, [0] * n, [False] * n
        return Reset(self._obs())

    def _obs(self):
        return torch.tensor(
            [[float(e), float(t)] for e, t in zip(self.episode, self.t, strict=True)], device=self.device
        )

    def _step(self, action):
        reward, ended, valid = [], [], []
        for i, lengths in enumerate(self.lengths):
            valid.append(not self.skip[i])
            if self.skip[i]:
                self.skip[i] = False
                reward.append(0.0)
                ended.append(False)
                continue
            reward.append(10.0 * i + self.episode[i])
            self.t[i] += 1
            ended.append(self.t[i] == lengths[self.episode[i] % len(lengths)])
        next_obs = self._obs()
        for i, end in enumerate(ended):
            if end:
                self.t[i], self.episode[i], self.skip[i] = 0, self.episode[i] + 1, self.late
        ended = torch.tensor(ended, device=self.device)
        half = torch.arange(self.num_envs, device=self.device) % 2 == 0  # even ones terminate, odd ones are cut off
        return Step(
            self._obs(),
            torch.tensor(reward, device=self.device),
            ended & half,
            ended & ~half,
            next_obs,
            torch.tensor(valid, device=self.device) if self.late else None,
        )


class Recorder:
    """Counts steps in its recurrent state and notes what it was called with."""

    def __init__(self):
        self.resets, self.states, self.modes = [], [], []

    def act(self, obs, state, reset, *, deterministic=False, mask=None):
        self.resets.append(reset.clone())
        self.modes.append(deterministic)
        self.states.append(None if state is None else state.clone())
        state = torch.zeros(len(obs)) if state is None else state
        return torch.zeros(len(obs), dtype=torch.int64), torch.where(reset, 0, state) + 1


@pytest.mark.parametrize("late", [False, True])
def test_each_environment_plays_its_share(late):
    # 5 episodes over 3 environments: shares 2, 2, 1. Environment 0's are short and go on unseen after its share.
    env = Scripted([[1], [3, 4], [7]], late)
    returns = evaluate(Recorder(), env, 5, seed=0)
    assert returns.dtype == torch.float64
    # environment 0: lengths 1, 1 with rewards 0 and 1; environment 1: 3 x 10, 4 x 11; environment 2: 7 x 20.
    assert returns.tolist() == [0.0, 1.0, 30.0, 44.0, 140.0]


def test_short_episodes_are_not_favoured():
    """Half of all episodes last 1 step and half 99. The first 8 to end anywhere would nearly all be short."""
    env = Scripted([[1, 99], [99, 1], [1, 99], [99, 1]])
    returns = evaluate(Recorder(), env, 8, seed=0)
    assert returns.numel() == 8
    lengths = [1 + 0, 99, 10 * 99, 11 * 1, 20, 21 * 99, 30 * 99, 31]
    assert returns.tolist() == [0.0, 99.0, *lengths[2:]]


def test_more_environments_than_episodes():
    env = Scripted([[2]] * 6)
    assert evaluate(Recorder(), env, 3, seed=0).tolist() == [0.0, 20.0, 40.0]


def test_the_agent_is_told_where_episodes_begin():
    agent = Recorder()
    evaluate(agent, Scripted([[2], [3]]), 4, seed=0)
    assert agent.states[0] is None
    assert [r.tolist() for r in agent.resets] == [
        [True, True],
        [False, False],
        [True, False],
        [False, True],
        [True, False],
        [False, False],
    ]
    assert all(agent.modes)


def test_an_episode_that_begins_a_step_late_begins_twice():
    """The final observation is shown once more before the first one: memory of it must not cross over."""
    agent = Recorder()
    evaluate(agent, Scripted([[2]], late=True), 2, seed=0)
    assert [r.tolist() for r in agent.resets] == [[True], [False], [True], [True], [False]]


def test_drawn_actions_are_asked_for():
    agent = Recorder()
    evaluate(agent, Scripted([[1]]), 1, seed=0, deterministic=False)
    assert agent.modes == [False]


def test_the_sum_is_double():
    class Long(Scripted):
        def _step(self, action):
            first = self.t[0] == 0
            return super()._step(action)._replace(reward=torch.tensor([2.0**24 if first else 1.0]))

    # In float32, 2^24 + 1 is 2^24: the nine ones would be lost.
    assert evaluate(Recorder(), Long([[10]]), 1, seed=0).item() == 2**24 + 9


def test_progress_is_told():
    seen = []
    evaluate(Recorder(), Scripted([[16]]), 3, seed=0, progress=seen.append)
    assert seen == [1, 2, 3]


def test_no_gradient_is_kept():
    class Learner(Recorder):
        def act(self, obs, state, reset, **options):
            assert not torch.is_grad_enabled()
            return super().act(obs, state, reset, **options)

    evaluate(Learner(), Scripted([[1]]), 1, seed=0)
    assert torch.is_grad_enabled()


@pytest.mark.gpu
def test_on_a_gpu():
    class Still:
        def act(self, obs, state, reset, *, deterministic=False, mask=None):
            return torch.zeros(len(obs), dtype=torch.int64, device=obs.device), None

    env = Scripted([[1], [3, 4], [7]], device="cuda")
    assert evaluate(Still(), env, 5, seed=0).tolist() == [0.0, 1.0, 30.0, 44.0, 140.0]


def test_errors():
    with pytest.raises(ValueError, match="episodes must be at least 1; got 0"):
        evaluate(Recorder(), Scripted([[1]]), 0, seed=0)
    with pytest.raises(RuntimeError, match="scripted: an episode did not end within 50 steps"):
        evaluate(Recorder(), Scripted([[1], [10**9]]), 2, seed=0, max_steps=50)


def test_summary():
    assert summary(torch.tensor([500.0, 474.6], dtype=torch.float64)) == "mean return 487.3, std 12.7, 2 episodes"
    assert summary(torch.tensor([3.0], dtype=torch.float64)) == "mean return 3.0, std 0.0, 1 episodes"
