"""The PPO trainer: what it stores, learns and resumes, and what it does with numbers that are not finite."""

import ast
import dataclasses
import hashlib
import inspect
import math

import pytest
import torch

from sharpwave.algos import ppo, ppo_config, segments
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.algos.ppo_metrics import UpdateMetrics
from sharpwave.algos.segments import segment_advantage
from sharpwave.envs.cartpole import CartPole
from sharpwave.envs.synthetic import Synthetic
from sharpwave.ops.advantage import puff_advantage
from sharpwave.ops.ppo_loss import STATS
from sharpwave.run import environment
from sharpwave.run.checkpoint import flatten, unflatten
from sharpwave.run.config import RunConfig
from sharpwave.run.distributed import World
from sharpwave.run.errors import UserError
from sharpwave.run.evaluate import evaluate
from tests.algos.toys import Clock, Masked, Target
from tests.conftest import backends

SMALL = dict(num_envs=8, horizon=16, minibatch=64, hidden=16, layers=2, total_steps=128 * 40)


def trainer(env=None, name="sharpwave/CartPole", **changes):
    return PPO(PPOConfig(env=name, **(SMALL | dict(device="cpu") | changes)), env)


def train(agent):
    while agent.epoch < agent.num_epochs:
        agent.train_epoch()
    return agent


def fingerprint(agent):
    """A hash of everything that a checkpoint holds, and of what the environments do next."""
    state = agent.state_dict()
    del state["env"]
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        draws = torch.rand(agent.env.num_envs, agent.policy.actions.columns, generator=generator)
        action = agent.policy.actions.to_env((draws * 2).to(agent.device, agent.policy.actions.dtype))
        state[f"step {i}"] = agent.env.step(action)._asdict()
    tensors, structure = flatten(state)
    digest = hashlib.sha256(repr(structure).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def one_update(agent):
    """Draw, and train on what was drawn."""
    agent._first_draw()
    agent._update(last=True)


class TestRollout:
    def test_frozen_weights_give_ratio_one_across_resets(self):
        """Episodes of at most 7 steps in segments of 16: the scan's resets are the rollout's."""
        agent = trainer(CartPole(8, max_episode_steps=7))
        for _ in range(5):
            agent.train_epoch()
        agent._rollout()
        s = agent.segments
        assert s.reset[:, 1:].any(1).all(), "every segment holds a reset inside"
        out = agent.policy(s.obs, s.state, s.reset)
        logprob = torch.log_softmax(out.params, -1).gather(2, s.action).squeeze(2)
        assert ((logprob - s.logprob).exp() - 1).abs().max() <= 1e-5
        one_update(agent)
        assert (s.ratio - 1).abs().max() <= 1e-5
        # Without the resets they are not: the test can fail.
        out = agent.policy(s.obs, s.state, torch.zeros_like(s.reset))
        logprob = torch.log_softmax(out.params, -1).gather(2, s.action).squeeze(2)
        assert ((logprob - s.logprob).exp() - 1).abs().max() > 1e-4

    def test_advantages_are_gae_when_ratios_are_one(self):
        agent = trainer(CartPole(8, max_episode_steps=7))
        agent._rollout()
        s = agent.segments
        config = agent.config
        got, priority = segment_advantage(s, config)
        assert torch.allclose(priority, got.abs().sum(1).pow(config.alpha))
        n = (~s.terminated).double()
        k = (~(s.terminated | s.truncated)).double()
        v_tp1 = torch.cat([s.value[:, 1:], s.next_value[:, -1:]], 1)
        v_tp1 = torch.where(s.truncated, s.next_value, v_tp1).double()
        delta = s.reward.double() + config.gamma * n * v_tp1 - s.value.double()
        want, a = torch.zeros_like(delta), torch.zeros(8, dtype=torch.float64)
        for t in reversed(range(16)):
            a = delta[:, t] + config.gamma * config.gae_lambda * k[:, t] * a
            want[:, t] = a
        assert (got - want).abs().max() <= 1e-6 * max(1, want.abs().max())

    def test_truncation_bootstraps_from_the_true_final_observation(self):
        env = CartPole(8, max_episode_steps=5)
        agent = trainer(env)
        agent._rollout()
        s = agent.segments
        assert s.truncated.any()
        i, t = (int(x) for x in s.truncated.nonzero()[0])
        before = agent.policy(s.obs[i : i + 1, : t + 1], s.state[:, i : i + 1], s.reset[i : i + 1, : t + 1]).state
        assert s.next_value[i, t] != s.value[i, t + 1]
        # The next observation is not stored, so it is stepped to again.
        copy = CartPole(8, max_episode_steps=5)
        copy.reset(ppo.seeding.stream_seed(0, 0, "env"))
        for u in range(t + 1):
            step = copy.step(s.action[:, u, 0])
        want = agent.policy.step(step.next_obs[i : i + 1], before).value
        assert s.next_value[i, t].item() == pytest.approx(want.item(), abs=1e-6)

    @pytest.mark.parametrize("make", [lambda: CartPole(8, max_episode_steps=5), lambda: Synthetic(8, length=4)])
    def test_observations_are_the_environments(self, make):
        """Two rollouts; at the last step the bootstrap reads the true next observation, though the episode ended."""
        agent, copy = trainer(make(), horizon=10, minibatch=40), make()
        obs = copy.reset(ppo.seeding.stream_seed(0, 0, "env")).obs
        s = agent.segments
        for _ in range(2):
            agent._rollout()
            for t in range(10):
                assert torch.equal(s.obs[:, t], obs)
                step = copy.step(s.action[:, t, 0])
                obs = step.obs
            assert torch.equal(agent.obs, obs) and torch.equal(agent.begins, step.begins)
            before = agent.policy(s.obs, s.state, s.reset).state
            assert torch.allclose(s.next_value[:, -1], agent.policy.step(step.next_obs, before).value, atol=1e-6)
            ended = step.terminated | step.truncated
            assert ended.any() and not torch.equal(step.next_obs[ended], obs[ended])

    def test_environments_do_not_meet(self):
        """Perturbing segment 0's observations leaves the outputs of the others as they were."""
        agent = trainer()
        agent._rollout()
        s = agent.segments
        first = agent.policy(s.obs, s.state, s.reset)
        changed = s.obs.clone()
        changed[0] += 1
        second = agent.policy(changed, s.state, s.reset)
        assert torch.equal(first.params[1:], second.params[1:]) and torch.equal(first.value[1:], second.value[1:])
        assert not torch.equal(first.params[0], second.params[0])

    @pytest.mark.parametrize("late", [False, True])
    def test_masks_and_skipped_steps(self, late):
        """Illegal choices are never taken (the environment asserts it); skipped steps have no advantage."""
        agent = train(trainer(Masked(8, late), name="toy/Masked", total_steps=128 * 8))
        s = agent.segments
        assert s.mask is not None and s.obs.dtype == torch.uint8
        assert torch.isfinite(torch.cat([p.flatten() for p in agent.policy.parameters()])).all()
        if late:
            assert s.valid is not None and (~s.valid).any()
            assert (segment_advantage(s, agent.config)[0][~s.valid] == 0).all()
            # The step after a skipped one begins an episode.
            assert torch.equal(s.reset[:, 1:], (s.terminated | s.truncated | ~s.valid)[:, :-1])
            assert agent.metrics()["episode/length"] == 4

    def test_truncation_at_the_last_step_is_not_the_reset_observation(self):
        agent = trainer(Clock(8, length=16, choose_at=3, truncates=True), name="toy/Clock")
        agent._rollout()
        s = agent.segments
        assert s.truncated[:, -1].all()
        # What Clock shows after the last step: no flag, the choice, 1.
        final = torch.stack([torch.zeros(8), torch.zeros(8), s.action[:, 3, 0] * 2.0 - 1, torch.ones(8)], 1)
        before = agent.policy(s.obs, s.state, s.reset).state
        assert torch.allclose(s.next_value[:, -1], agent.policy.step(final, before).value, atol=1e-6)

    def test_rewards_are_scaled_and_then_clipped(self):
        reward = torch.tensor([-4.0, 1.0, 4.0])
        assert trainer(reward_scale=0.5)._scale(reward).tolist() == [-2.0, 0.5, 2.0]
        assert trainer(reward_scale=0.5, reward_clip=1.0)._scale(reward).tolist() == [-1.0, 0.5, 1.0]
        assert trainer(puffer_compat=True)._scale(reward).tolist() == [-1.0, 1.0, 1.0]

    def test_streams_follow_seed_and_rank(self):
        def actions(seed, rank):
            agent = PPO(PPOConfig(env="sharpwave/CartPole", device="cpu", seed=seed, **SMALL), world=World(rank))
            agent._rollout()
            weights = next(agent.policy.parameters()).detach()
            return agent.segments.action, agent.segments.obs[:, 0], agent.draw_seed, weights

        base, other_rank, other_seed = actions(0, 0), actions(0, 1), actions(1, 0)
        for other in (other_rank, other_seed):
            assert not torch.equal(base[0], other[0]) and not torch.equal(base[1], other[1]) and base[2] != other[2]
        assert torch.equal(base[3], other_rank[3]), "all ranks begin with the same weights"
        assert not torch.equal(base[3], other_seed[3])


class TestUpdate:
    """What one update hands to the loss, and what it writes back."""

    def spy(self, monkeypatch, agent, index, ratio=None):
        """One update on the segments at `index`; what the loss was given. `ratio` replaces what the loss says."""
        weight = torch.arange(1.0, len(index) + 1)
        monkeypatch.setattr(
            ppo,
            "draw_segments",
            lambda *_args, **_options: (torch.tensor(index), weight, torch.tensor(0, dtype=torch.int64)),
        )
        seen = {}
        real = agent.policy.actions.gradient
        names = ("action", "old_logprob", "old_value", "advantage", "weight")

        def gradient(output, log_std, mask, *rows, **options):
            seen.update(zip(names, (x.clone() for x in rows), strict=False), mask=mask, valid=options["valid"])
            out = real(output, log_std, mask, *rows, **options)
            return out if ratio is None else out._replace(ratio=ratio)

        monkeypatch.setattr(agent.policy.actions, "gradient", gradient)
        one_update(agent)
        return seen

    @pytest.mark.parametrize("late", [False, True])
    def test_rows_are_those_of_the_segments_drawn(self, monkeypatch, late):
        agent = trainer(Masked(8, late), name="toy/Masked")
        agent._rollout()
        s = agent.segments
        before = s.value.clone()
        advantage, _ = segment_advantage(s, agent.config)
        index = [5, 0, 2, 7]
        seen = self.spy(monkeypatch, agent, index)
        assert torch.equal(seen["weight"], torch.arange(1.0, 5))
        for name, stored in dict(action=s.action, old_logprob=s.logprob, old_value=before, mask=s.mask).items():
            assert torch.equal(seen[name], stored[index].flatten(0, 1)), name
        assert torch.equal(seen["advantage"], advantage[index].flatten())
        assert (seen["valid"] is None) if not late else torch.equal(seen["valid"], s.valid[index].flatten())

    @pytest.mark.parametrize("compat", [False, True])
    def test_advantages_follow_what_was_written_back(self, compat):
        """Only the segments that an update wrote back are computed anew, and the kept ones are what all give."""
        agent = trainer(puffer_compat=compat)
        agent._rollout()
        agent._first_draw()
        first = agent.advantage.clone()
        for _ in range(3):
            agent._update()
        advantage, priority = segment_advantage(agent.segments, agent.config)
        assert torch.equal(agent.advantage, advantage) and not torch.equal(first, advantage)
        assert torch.allclose(agent.priority, priority)

    def test_ratio_and_value_are_written_back_and_the_last_of_a_segment_drawn_twice(self, monkeypatch):
        agent = trainer()
        agent._rollout()
        s = agent.segments
        value = s.value.clone()
        ratio = torch.arange(64.0)
        ratio[7] = math.inf
        self.spy(monkeypatch, agent, [3, 1, 3, 6], ratio)
        rows = ratio.view(4, 16)
        assert torch.equal(s.ratio[3], rows[2]) and torch.equal(s.ratio[6], rows[3])
        assert torch.equal(s.ratio[1], rows[1])
        assert (s.ratio[[0, 2, 4, 5, 7]] == 1).all()
        assert torch.equal(s.value[0], value[0]) and torch.allclose(s.value[3], value[3], atol=1e-5)
        # The next update's values are of the weights after this one's step.
        self.spy(monkeypatch, agent, [3, 1, 3, 6])
        assert not torch.allclose(s.value[3], value[3], atol=1e-5)

    def test_what_is_not_finite_is_not_written_back(self, monkeypatch):
        agent = trainer()
        agent._rollout()
        ratio = torch.full((64,), 2.0)
        ratio[5] = math.inf
        self.spy(monkeypatch, agent, [3, 1, 2, 6], ratio)
        assert agent.segments.ratio[3, 5] == 1 and agent.segments.ratio[3, 4] == 2

    def test_a_skipped_step_writes_nothing_back(self, monkeypatch):
        agent = trainer()
        agent._rollout()
        agent.segments.reward.fill_(3e38)
        self.spy(monkeypatch, agent, [3, 1, 2, 6], torch.full((64,), 2.0))
        assert (agent.segments.ratio == 1).all()

    def test_schedules(self):
        """Ten epochs of 20: lr at half its cosine, beta half way to 1; and constant where that was asked."""
        agent = trainer(total_steps=128 * 20, beta0=0.2)
        constant = trainer(total_steps=128 * 20, lr_schedule="constant")
        compat = trainer(total_steps=128 * 20, beta0=0.2, alpha=0.5, puffer_compat=True)
        assert agent.lr == pytest.approx(0.015) and agent.beta == pytest.approx(0.2)
        for each in (agent, constant, compat):
            for _ in range(11):
                each.train_epoch()
        assert agent.lr.item() == pytest.approx(0.015 / 2, rel=1e-6)
        assert constant.lr.item() == pytest.approx(0.015)
        assert agent.beta.item() == pytest.approx(0.2 + 0.8 * 10 / 20)
        assert compat.beta.item() == pytest.approx(0.2 + 0.5 * 0.8 * 10 / 20)

    def test_gradient_is_clipped_as_configured(self):
        assert trainer(max_grad_norm=0.25).optimizer.param_groups[0]["max_grad_norm"] == 0.25

    @pytest.mark.parametrize("name", ["sharpwave/CartPole", pytest.param("Pendulum-v1", marks=pytest.mark.long)])
    def test_bfloat16_gradients_are_nearly_float32s(self, name):
        grads = []
        for dtype in ("float32", "bfloat16"):
            agent = trainer(name=name, dtype=dtype)
            agent._run_rollout()
            one_update(agent)
            grads.append([p.grad.flatten() for p in agent.policy.parameters()])
        for a, b in zip(*grads, strict=True):
            assert b.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(a, b, 0) > 0.98

    def test_explained_variance(self):
        """Advantages of variance 1 beside returns of variance 4: 3/4 is explained."""
        metrics = UpdateMetrics(torch.tensor(0.0))
        advantage = torch.tensor([1.0, -1, 1, -1])
        metrics.rollout(advantage, torch.tensor([1.0, -1, 1, -1]))
        numbers, _ = metrics.read(torch.tensor(0.1), torch.tensor(0.2))
        assert numbers["value/explained_variance"] == pytest.approx(0.75)

    @backends("triton", "reference")
    def test_every_update_is_counted_once(self, backend, device):
        """Means over the updates that were taken; the last is held until it is read, and reading twice adds nothing."""
        norm = torch.tensor(0.0, device=device)
        metrics = UpdateMetrics(norm)
        metrics._triton = backend == "triton"
        stats = torch.arange(6.0, device=device)
        for loss, grad_norm in ((1.0, 2.0), (math.nan, 3.0), (1.0, math.inf), (1.0, 4.0)):
            metrics.settle()
            metrics.update(torch.tensor(loss, device=device), stats + grad_norm)
            norm.fill_(grad_norm)
        numbers, faults = metrics.read(torch.tensor(0.1, device=device), torch.tensor(0.2, device=device))
        assert numbers["grad/norm"] == 3 and numbers["loss/entropy"] == 5
        assert numbers["fault/skipped_updates"] == 2
        assert faults == [*STATS, "gradient"]  # those of the third update
        numbers, faults = metrics.read(torch.tensor(0.1, device=device), torch.tensor(0.2, device=device))
        assert numbers["grad/norm"] == 0 == numbers["fault/skipped_updates"] and not faults


class TestLearning:
    def test_reward_on_a_segments_last_step_only(self):
        """Episodes as long as the horizon; the last step's action alone is rewarded, at once."""
        env = Clock(16, length=16, choose_at=15)
        agent = train(trainer(env, name="toy/Clock", num_envs=16, minibatch=128, total_steps=40_000))
        assert evaluate(agent, Clock(16, 16, 15), 64, seed=1).mean() >= 0.95

    @pytest.mark.long
    def test_choice_rewarded_two_segments_later(self):
        """The action at step 1 is rewarded at step 128, horizon 64."""
        env = Clock(32, length=128, choose_at=1)
        agent = trainer(env, name="toy/Clock", num_envs=32, horizon=64, minibatch=512, total_steps=250_000, hidden=32)
        train(agent)
        returns = evaluate(agent, Clock(32, 128, 1), 96, seed=1, deterministic=False)
        assert returns.mean() > 0.9

    def test_truncated_value_goes_on(self):
        """Reward 1 for ever, cut after 10 steps, gamma 0.9: V tends to 1 / (1 - 0.9) = 10, not to 6.51."""
        env = Clock(16, length=10, choose_at=None, truncates=True)
        agent = trainer(
            env,
            name="toy/Clock",
            num_envs=16,
            minibatch=128,
            total_steps=100_000,
            gamma=0.9,
            vf_clip=100.0,
            vf_coef=0.5,
        )
        train(agent)
        assert agent.segments.value.mean().item() == pytest.approx(10, abs=0.3)

    def test_terminated_value_stops(self):
        """The same with termination: V at the first step tends to (1 - 0.9^10) / (1 - 0.9) = 6.51."""
        env = Clock(16, length=10, choose_at=None)
        agent = trainer(
            env,
            name="toy/Clock",
            num_envs=16,
            minibatch=128,
            total_steps=100_000,
            gamma=0.9,
            vf_clip=100.0,
            vf_coef=0.5,
        )
        train(agent)
        s = agent.segments
        assert s.value[s.reset].mean().item() == pytest.approx((1 - 0.9**10) / 0.1, abs=0.5)

    def test_continuous_actions(self):
        agent = train(
            trainer(Target(64), name="toy/Target", num_envs=64, minibatch=256, total_steps=150_000, gamma=0.0)
        )
        returns = evaluate(agent, Target(64), 256, seed=1)
        assert returns.mean() > -0.05  # doing nothing: -2/3

    @pytest.mark.long
    @pytest.mark.parametrize(
        "layers, target, low, high",
        [
            (2, "cue", 0.95, 1.0),
            (0, "cue", 0.22, 0.28),
            (2, "previous", 0.22, 0.28),
        ],
    )
    def test_memory_task(self, layers, target, low, high):
        """4 cues, delay 8: recurrence learns it; without it, or with the previous episode's cue, chance remains."""
        kwargs = dict(k=4, delay=8, target=target)
        agent = PPO(
            PPOConfig(
                env="sharpwave/CueRecall",
                device="cpu",
                env_kwargs=kwargs,
                total_steps=200_000 if target == "cue" else 100_000,  # a cue that leaked would be learnt by half
                minibatch=512,
                layers=layers,
            )
        )
        train(agent)
        env = type(agent.env)(512, **kwargs)
        # 8192 episodes: the standard error at chance is 0.005.
        returns = evaluate(agent, env, 8192, seed=1, deterministic=False)
        assert low <= returns.mean() <= high


class TestResume:
    @pytest.mark.parametrize("name", ["sharpwave/CartPole", "CartPole-v1", "sharpwave/CueRecall"])
    def test_twenty_epochs_are_ten_and_ten(self, name):
        """Weights, optimizer, schedules, streams, counters, environment: bit for bit, through the file format."""
        changes = dict(total_steps=128 * 20)
        straight = train(trainer(name=name, **changes))
        half = trainer(name=name, **changes)
        for _ in range(10):
            half.train_epoch()
        state = unflatten(*flatten(half.state_dict()))
        half.train_epoch()  # the state must not change with the trainer it was taken from
        resumed = trainer(name=name, **changes)
        resumed.load_state_dict(state)
        assert fingerprint(train(resumed)) == fingerprint(straight)

    def test_same_seed_same_weights(self):
        first, again, other = (train(trainer(seed=seed, total_steps=128 * 12)) for seed in (0, 0, 1))
        assert fingerprint(first) == fingerprint(again)
        assert fingerprint(first) != fingerprint(other)

    def test_loading_does_not_alias(self):
        agent, other = trainer(), trainer(seed=1)
        state = agent.state_dict()
        other.load_state_dict(state)
        before = [t.clone() for t in flatten(state)[0].values()]
        other.train_epoch()
        assert all(torch.equal(a, b) for a, b in zip(before, flatten(state)[0].values(), strict=True))

    def test_an_environment_that_cannot_continue_begins_new_episodes(self):
        agent = trainer()
        for _ in range(3):
            agent.train_epoch()
        agent.begins.fill_(False)
        assert agent.state.abs().sum() > 0
        start = agent.env.reset(5)
        assert not start.continued
        agent._begin(start)
        assert agent.begins.all() and not agent.state.any() and torch.equal(agent.obs, start.obs)


class TestFaults:
    def test_infinite_value_loss_skips_the_step_and_names_it(self):
        agent = trainer()
        agent.train_epoch()
        weights = [p.detach().clone() for p in agent.policy.parameters()]
        agent._rollout()
        agent.segments.reward.fill_(3e38)
        agent.metrics()
        one_update(agent)
        assert all(torch.equal(p, w) for p, w in zip(agent.policy.parameters(), weights, strict=True))
        metrics = agent.metrics()
        assert metrics["fault/skipped_updates"] == 1
        assert "value_loss" in agent.faults()
        assert torch.isfinite(agent.segments.value).all()
        agent.train_epoch()
        assert agent.metrics()["fault/skipped_updates"] == 0 and agent.faults() == []

    def test_bad_priorities_are_counted_and_not_drawn(self):
        agent = trainer()
        agent._rollout()
        agent.segments.reward[3, 5] = float("nan")
        one_update(agent)
        metrics = agent.metrics()
        assert metrics["fault/bad_priorities"] == 1 and metrics["fault/skipped_updates"] == 0
        assert all(torch.isfinite(p).all() for p in agent.policy.parameters())

    def test_duplicate_draws_write_one_winner(self):
        """Eight draws from two segments hold duplicates: what is written back is a fixed function of the draw."""
        runs = []
        for _ in range(3):
            agent = trainer(num_envs=2, minibatch=128, replay_ratio=4.0, total_steps=32 * 5)
            runs.append(fingerprint(train(agent)))
        assert len(set(runs)) == 1


class TestConfig:
    @pytest.mark.parametrize(
        "changes, words",
        [
            (dict(gamma=1.5), r"--gamma must be in \[0, 1\]; got 1.5"),
            (dict(lr=0.0), "--lr must be above 0"),
            (dict(minibatch=100), "--minibatch must be a multiple of --horizon 16.*use 96 or 112"),
            (dict(total_steps=100), "--total-steps must be at least one batch of 128"),
            (dict(minibatch=512), "nothing would be trained"),
            (dict(num_envs=0), "--num-envs must be at least 1"),
            (dict(seed=-1), "--seed must be in"),
            (dict(reward_clip=-1.0), "--reward-clip must be above 0"),
            (dict(replay_ratio=1e9), "--replay-ratio must be at most 1000"),
            (dict(horizon=1, puffer_compat=True), "--horizon must be at least 2 with --puffer-compat"),
            (dict(env_kwargs=dict(num_envs=3)), "--env-kwargs cannot hold num_envs: use --num-envs"),
            (dict(name="sharpwave/CueRecall", env_kwargs=dict(k="abc")), "--env sharpwave/CueRecall .* cannot be made"),
            (dict(name="os.path:join"), "--env os.path:join"),
            (dict(lr=math.nan), "--lr must be above 0"),
        ],
    )
    def test_errors_are_one_line_and_say_what_to_do(self, changes, words):
        with pytest.raises(UserError, match=words) as caught:
            trainer(**changes)
        assert "\n" not in str(caught.value)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_missing_gpu(self):
        with pytest.raises(UserError, match="use --device cpu"):
            trainer(device="cuda")

    def test_every_field_is_read(self):
        """A setting that nothing reads is a lie to the one who sets it."""
        source = (
            inspect.getsource(ppo)
            + inspect.getsource(segments)
            + inspect.getsource(environment)
            + inspect.getsource(ppo_config.PPOConfig.resolved)
        )
        source += "".join(
            inspect.getsource(p.fget) for p in vars(PPOConfig).values() if isinstance(p, property) and p.fget
        )
        tree = ast.parse(inspect.cleandoc("if True:\n" + source) if source.startswith(" ") else _unindent(source))
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        loop = {f.name for f in dataclasses.fields(RunConfig)}  # read by sharpwave.run
        unread = {f.name for f in dataclasses.fields(PPOConfig)} - read - loop
        assert not unread


def _unindent(source):
    """Methods cut out of a class, made parseable."""
    lines = source.splitlines()
    out, shift = [], 0
    for line in lines:
        stripped = line.lstrip()
        if stripped.startswith(("def resolved", "@property")) and line.startswith("    "):
            shift = 4
        elif line and not line.startswith(" "):
            shift = 0
        out.append(line[shift:] if shift else line)
    return "\n".join(out)


class TestParts:
    def test_advantage_takes_each_of_its_settings(self):
        agent = trainer(CartPole(8, max_episode_steps=7), gamma=0.9, gae_lambda=0.8, rho_clip=1.5, c_clip=0.5)
        agent._rollout()
        s = agent.segments
        s.ratio.uniform_(0, 2)
        want = puff_advantage(
            *(s.value, s.next_value, s.reward, s.terminated, s.truncated, s.ratio),
            **dict(gamma=0.9, lam=0.8, rho_clip=1.5, c_clip=0.5),
        )
        assert torch.equal(segment_advantage(s, agent.config)[0], want)

    def test_puffer_compat_never_resets_inside_a_segment(self, monkeypatch):
        agent = trainer(CartPole(8, max_episode_steps=7), puffer_compat=True)
        assert agent._reset_flag(0, agent.begins) is agent.begins and agent._reset_flag(1, agent.begins) is None
        agent._rollout()
        resets = []
        features = agent.policy.features

        def spy(obs, state, reset):
            resets.append(reset)
            return features(obs, state, reset)

        monkeypatch.setattr(agent.policy, "features", spy)
        one_update(agent)
        assert resets == [None]

    def test_puffer_compat_gives_the_last_step_no_advantage(self):
        agent = trainer(puffer_compat=True)
        agent._rollout()
        s = agent.segments
        a, _ = segment_advantage(s, agent.config)
        assert (a[:, -1] == 0).all()
        # Its steps are those of T - 1 steps bootstrapped from the last value.
        ends = s.terminated | s.truncated
        want = puff_advantage(
            *(x[:, :-1] for x in (s.value, s.value.roll(-1, 1), s.reward, ends, torch.zeros_like(ends), s.ratio)),
            gamma=agent.config.gamma,
            lam=agent.config.gae_lambda,
        )
        assert torch.equal(a[:, :-1], want)
        train(agent)


def test_the_histogram_is_of_the_segments_priorities():
    from sharpwave.algos.ppo_metrics import log_histogram

    values = torch.tensor([0.0, 0.001, 0.001, 0.1, 10.0, float("nan")])
    low, high, counts = log_histogram(values, bins=4)
    # log10: -3, -3, -1, 1; bins of width 1 from -3: the last one holds its upper end.
    assert (low, high) == (pytest.approx(0.001), pytest.approx(10.0)) and counts == [2, 0, 1, 1]
    assert log_histogram(torch.zeros(3)) is None
    trainer = PPO(PPOConfig(env="sharpwave/CartPole", num_envs=8, horizon=8, minibatch=32, total_steps=64, hidden=8))
    trainer.train_epoch()
    low, high, counts = trainer.histograms()["priorities"]
    assert 0 < low <= high and sum(counts) == 8


def test_an_environment_of_your_own_says_how_many_it_is():
    env = CartPole(12)
    trainer = PPO(PPOConfig(env="sharpwave/CartPole", horizon=8, minibatch=32, total_steps=192, hidden=8), env)
    assert trainer.config.num_envs == 12 and trainer.num_epochs == 2
