"""The contract's own promises: shapes, errors, masks, statistics."""

import math

import pytest
import torch

from sharpwave import envs
from sharpwave.envs import Continuous, Discrete, EpisodeStats, Observation, Reset, Step
from tests.envs.toys import MaskedSteps


def a_step(reward, terminated, truncated, valid=None) -> Step:
    obs = torch.zeros(len(reward), 1)
    flags = [torch.tensor(x, dtype=torch.bool) for x in (terminated, truncated)]
    return Step(obs, torch.tensor(reward), *flags, obs, None if valid is None else torch.tensor(valid))


class TestSpaces:
    def test_one_head_drops_its_axis(self):
        assert Discrete((3,)).shape == ()
        assert Discrete((3, 2)).shape == (2,)
        assert Continuous(2, (-1.0, -1.0), (1.0, 1.0)).shape == (2,)
        assert Observation((4, 84, 84), torch.uint8).size == 28224

    @pytest.mark.parametrize("nvec", [(), (2, 0)])
    def test_heads_without_choices_are_refused(self, nvec):
        with pytest.raises(ValueError, match="nvec"):
            Discrete(nvec)

    @pytest.mark.parametrize(
        "low, high", [((0.0,), (1.0, 1.0)), ((1.0, 0.0), (0.0, 1.0)), ((math.nan, 0.0), (1.0, 1.0))]
    )
    def test_bounds_must_fit(self, low, high):
        with pytest.raises(ValueError, match="low"):
            Continuous(2, low, high)


class TestUse:
    def test_begins_after_every_end_and_where_nothing_happened(self):
        step = a_step([0.0] * 4, [1, 0, 0, 0], [0, 1, 0, 0], [True, True, False, True])
        assert step.begins.tolist() == [True, True, True, False]
        assert step._replace(valid=None).begins.tolist() == [True, True, False, False]

    def test_step_before_reset(self):
        env = envs.make("sharpwave/CartPole", 2)
        with pytest.raises(RuntimeError, match="step before reset: call reset"):
            env.step(torch.zeros(2, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="state_dict before reset"):
            env.state_dict()

    @pytest.mark.parametrize("name", ["sharpwave/CartPole", "CartPole-v1"])
    def test_after_close_everything_raises(self, name):
        with envs.make(name, 2) as env:
            env.reset(0)
            state = env.state_dict()
        env.close()
        uses = [
            lambda: env.reset(0),
            lambda: env.step(torch.zeros(2, dtype=torch.int64)),
            env.state_dict,
            lambda: env.load_state_dict(state),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=f"{name} is closed"):
                use()

    def test_actions_of_the_wrong_form(self):
        env = envs.make("sharpwave/CartPole", 2)
        env.reset(0)
        with pytest.raises(ValueError, match=r"shape \(2,\).*got \(2, 1\)"):
            env.step(torch.zeros(2, 1, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"int64.*got torch\.float32"):
            env.step(torch.zeros(2))

    @pytest.mark.parametrize("seed", [-1, 2**63])
    def test_seed_out_of_range(self, seed):
        with pytest.raises(ValueError, match="seed must be"):
            envs.make("sharpwave/CartPole", 1).reset(seed)

    @pytest.mark.parametrize("name", ["sharpwave/CartPole", "CartPole-v1"])
    def test_a_state_of_another_environment_is_refused(self, name):
        env, others = envs.make(name, 2), [envs.make(name, 3), envs.make("sharpwave/CueRecall", 2)]
        env.reset(0)
        for other, what in zip(others, ["num_envs", "name"], strict=True):
            other.reset(0)
            with pytest.raises(ValueError, match=f"state's {what}"):
                env.load_state_dict(other.state_dict())

    def test_an_environment_that_saves_nothing_begins_anew(self):
        class Forgetful(MaskedSteps):
            inexact_because = "it forgets"
            _state = envs.VectorEnv._state
            _load = envs.VectorEnv._load

        env = Forgetful(2)
        env.reset(7)
        env.step(torch.zeros(2, 2, dtype=torch.int64))
        state = env.state_dict()
        again = Forgetful(2)
        assert not again.exact_resume
        assert not again.load_state_dict(state).continued
        assert again.state_dict()["seed"] != 7
        assert again.state_dict()["count"] == 0


class TestMasks:
    def test_masks_belong_to_the_coming_observation(self):
        env = MaskedSteps(2)
        obs, mask, _ = env.reset(0)
        # t:  head one may not take t % 2, head two not t % 3
        expected = {0: [0, 1, 0, 1, 1], 1: [1, 0, 1, 0, 1], 2: [0, 1, 1, 1, 0]}
        for t in [0, 1, 2, 0, 1]:
            assert obs[:, 0].tolist() == [t, t]
            assert mask.int().tolist() == [expected[t]] * 2
            legal = torch.stack([mask[:, :2].int().argmax(1), mask[:, 2:].int().argmax(1)], dim=1)
            illegal = legal.clone()
            illegal[1, 0] = 1 - illegal[1, 0]
            step = env.step(illegal)
            assert step.reward.tolist() == [1.0, 0.0]
            obs, mask = step.obs, step.action_mask

    def test_unmasked_environments_give_none(self):
        env = envs.make("sharpwave/CartPole", 2)
        assert env.reset(0).action_mask is None
        assert env.step(torch.zeros(2, dtype=torch.int64)).action_mask is None


class TestEpisodeStats:
    def test_by_hand(self):
        stats = EpisodeStats(2, window=3)
        assert stats.read().episodes == 0
        assert math.isnan(stats.read().mean_return)
        stats.update(a_step([1.0, 10.0], [0, 0], [0, 0]))
        stats.update(a_step([2.0, 10.0], [1, 0], [0, 0]))  # environment 0: return 3 in 2 steps
        stats.update(a_step([5.0, 10.0], [1, 0], [1, 1]))  # 0: return 5 in 1 step; 1: return 30 in 3
        got = stats.read()
        assert got.episodes == 3
        assert got.mean_return == pytest.approx(38 / 3)
        assert got.std_return == pytest.approx(math.sqrt((3**2 + 5**2 + 30**2) / 3 - (38 / 3) ** 2))
        assert (got.min_return, got.max_return, got.mean_length) == (3, 30, 2)
        stats.update(a_step([7.0, 1.0], [1, 0], [0, 0]))  # the window is full: return 3 leaves it
        got = stats.read()
        assert (got.episodes, got.min_return, got.mean_return) == (4, 5, 14)

    def test_invalid_steps_do_not_count(self):
        stats = EpisodeStats(1)
        stats.update(a_step([1.0], [0], [0], [True]))
        stats.update(a_step([0.0], [0], [0], [False]))
        stats.update(a_step([1.0], [1], [0], [True]))
        assert stats.read()[:2] == (1, 2.0)
        assert stats.read().mean_length == 2

    def test_window_holds_all_that_can_end_at_once(self):
        stats = EpisodeStats(5, window=1)
        for k in range(3):
            stats.update(a_step([float(k), 2.0, 3.0, 4.0, 5.0], [1] * 5, [0] * 5))
        got = stats.read()
        assert (got.episodes, got.min_return, got.max_return) == (15, 2, 5)
        assert got.mean_return == pytest.approx((2 + 2 + 3 + 4 + 5) / 5)

    def test_kept_and_restored(self, gen):
        def random_step():
            ended = torch.rand(4, generator=gen) < 0.3
            reward = torch.randn(4, generator=gen)
            return Step(reward, reward, ended, torch.zeros_like(ended), reward)

        stats, again = EpisodeStats(4, window=6), EpisodeStats(4, window=6)
        for _ in range(10):
            stats.update(random_step())
        state = stats.state_dict()
        again.load_state_dict(state)
        for _ in range(10):
            step = random_step()
            stats.update(step)
            again.update(step)
        assert again.read() == stats.read()
        state["count"].fill_(99)
        assert again.read().episodes == stats.read().episodes

    @pytest.mark.parametrize("n, window", [(1, 1), (5, 3), (600, 700), (1100, 100)])
    def test_triton_launch_is_the_many(self, n, window, gen):
        """The GPU's kernel, blocks that count the ends before theirs included, against the operations it stands for."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        many, one = EpisodeStats(n, device, window), EpisodeStats(n, device, window)
        many._triton, one._triton = False, True
        for k in range(5):
            flags = torch.rand(3, n, generator=gen) < torch.tensor([[0.2], [0.1], [0.8]])
            terminated, truncated, valid = (x.to(device) for x in flags)
            reward = torch.randint(0, 9, (n,), generator=gen).float().to(device)
            step = Step(reward, reward, terminated, truncated, reward, valid if k % 2 else None)
            many.update(step)
            one.update(step)
            for name, want in many._tensors().items():
                kept = many.window if name in ("returns", "lengths") else None
                got = one._tensors()[name]
                assert torch.equal(got[:kept] if kept else got, want[:kept] if kept else want), name
        assert int(one._count) > many.window or n == 1

    def test_errors(self):
        with pytest.raises(ValueError, match="window"):
            EpisodeStats(2, window=0)
        with pytest.raises(ValueError, match="num_envs and window"):
            EpisodeStats(2).load_state_dict(EpisodeStats(3).state_dict())

    @pytest.mark.gpu
    def test_cuda_waits_for_nothing_and_agrees(self, gen):
        stats, there = EpisodeStats(64, window=80), EpisodeStats(64, "cuda", window=80)
        for _ in range(20):
            ended = torch.rand(64, generator=gen) < 0.1
            reward = torch.randint(0, 9, (64,), generator=gen).float()
            step = Step(reward, reward, ended, torch.zeros_like(ended), reward)
            moved = Step(*[x if x is None else x.cuda() for x in step])
            torch.cuda.set_sync_debug_mode("error")
            try:
                there.update(moved)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            stats.update(step)
        assert there.read() == stats.read()


def test_episodes_of_several_ranks_are_taken_together():
    ranks = [EpisodeStats(2, window=3) for _ in range(2)]
    no = torch.zeros(2, dtype=torch.bool)
    for rank, rewards in enumerate(([1.0, 2.0, 3.0, 4.0], [10.0])):
        for reward in rewards:
            obs = torch.zeros(2, 1)
            ranks[rank].update(Step(obs, torch.tensor([reward, 0.0]), torch.tensor([True, False]), no, obs))
    counts = torch.stack([r._count for r in ranks])
    kept = torch.stack([torch.stack([r._returns[:3], r._lengths[:3]]) for r in ranks])
    done = ranks[0].read(lambda x: counts if x.ndim == 0 else kept)
    assert (done.episodes, done.min_return, done.max_return) == (5, 2, 10)
    assert done.mean_return == (2 + 3 + 4 + 10) / 4 and done.mean_length == 1


def test_reset_unpacks():
    obs, mask, continued = Reset(torch.zeros(1))
    assert obs.shape == (1,) and mask is None and not continued
