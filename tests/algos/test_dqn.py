"""The DQN trainer: what it stores, learns and resumes, and what it does with numbers that are not finite."""

import ast
import dataclasses
import hashlib
import inspect
import math
import textwrap

import pytest
import torch
from torch import Tensor

from sharpwave.algos import dqn, dqn_checks, dqn_config
from sharpwave.algos.dqn import DQN, DQNConfig
from sharpwave.algos.dqn_metrics import ReturnCheck, UpdateMetrics
from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv
from sharpwave.envs.cartpole import CartPole
from sharpwave.run.checkpoint import flatten, unflatten
from sharpwave.run.config import RunConfig
from sharpwave.run.distributed import World
from sharpwave.run.errors import UserError
from sharpwave.run.evaluate import evaluate
from sharpwave.run.presets import PRESETS
from tests.algos.toys import Clock, Masked, Target
from tests.conftest import backends

SMALL = dict(
    num_envs=4, epoch_steps=32, batch_size=16, hidden=16, buffer_size=600, learning_starts=64, total_steps=128 * 10,
    device="cpu",
)  # fmt: skip


class Pixels(TensorEnv):
    """36 x 36 images that show a count; action 1 where it is odd is rewarded; episodes of 9 steps, cut off."""

    def __init__(self, num_envs: int, device="cpu", length: int = 9):
        super().__init__("toy/Pixels", num_envs, device, Observation((36, 36), torch.uint8), Discrete((2,)))
        self.length = length
        self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))

    def _begin(self) -> None:
        torch.remainder(torch.arange(self.num_envs, device=self.device), self.length, out=self.t)

    def _show(self, t: Tensor) -> Tensor:
        image = torch.zeros(self.num_envs, 36 * 36, dtype=torch.uint8, device=self.device)
        return image.scatter_(1, (t * 31)[:, None], 255).view(-1, 36, 36)

    def _observe(self) -> Reset:
        return Reset(self._show(self.t))

    def _step(self, action: Tensor) -> Step:
        reward = (action == self.t % 2).float()
        next_obs = self._show(self.t + 1)
        last = self.t == self.length - 1
        self.t.add_(1).masked_fill_(last, 0)
        return Step(self._observe().obs, reward, torch.zeros_like(last), last, next_obs)


def trainer(env=None, name="sharpwave/CartPole", **changes):
    return DQN(DQNConfig(env=name, **(SMALL | changes)), env)


def train(agent):
    while agent.epoch < agent.num_epochs:
        agent.train_epoch()
    return agent


def fingerprint(agent):
    """A hash of everything that a checkpoint holds, and of what the environments do next."""
    state = agent.state_dict()
    del state["env"]
    for i in range(20):
        action = torch.full_like(agent.action, i % agent.num_actions)
        state[f"step {i}"] = agent.env.step(action)._asdict()
    tensors, structure = flatten(state)
    digest = hashlib.sha256(repr(structure).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class Chain(TensorEnv):
    """Episodes whose t-th step earns rewards[t]; they end after the last one, by termination or truncation. What is
    observed is (t / 10, 1). With `late`, an episode begins one step late, as Gymnasium's NEXT_STEP mode does."""

    def __init__(self, num_envs: int, rewards: list[float], truncates: bool = False, late: bool = False):
        super().__init__("toy/Chain", num_envs, "cpu", Observation((2,), torch.float32), Discrete((2,)))
        self.rewards, self.truncates, self.late = torch.tensor(rewards), truncates, late
        self.may_skip = late
        self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))

    def _begin(self) -> None:
        self.t.zero_()

    def _show(self, t: Tensor) -> Tensor:
        return torch.stack([t / 10, torch.ones(self.num_envs)], 1)

    def _observe(self) -> Reset:
        return Reset(self._show(self.t))

    def _step(self, action: Tensor) -> Step:
        length = len(self.rewards)
        skipped = self.t == length
        reward = torch.where(skipped, 0, self.rewards[self.t.clamp(max=length - 1)])
        last = self.t == length - 1
        next_obs = self._show(torch.where(skipped, 0, self.t + 1))
        self.t.copy_((self.t + 1) % (length + 1 if self.late else length))
        no = torch.zeros_like(last)
        ends = (no, last) if self.truncates else (last, no)
        return Step(self._observe().obs, reward, *ends, next_obs, ~skipped if self.late else None)


def values(agent, obs):
    with torch.no_grad():
        return agent.policy(torch.as_tensor(obs)).amax(1)


class TestTransitions:
    """What a step stores, as the batches show it."""

    def test_the_true_final_observation_and_the_four_kinds_of_end(self):
        for truncates in (False, True):
            agent = trainer(Chain(4, [1.0, 2.0, 4.0], truncates), name="toy/Chain", n_step=1, gamma=0.5)
            for _ in range(10):
                agent._step()
            batch = agent.replay.sample(512)
            t = batch.obs[:, 0] * 10
            assert torch.equal(batch.next_obs[:, 0] * 10, t + 1), "never the next episode's first observation"
            assert torch.equal(batch.reward, torch.tensor([1.0, 2.0, 4.0])[t.round().long()])
            last = t == 2
            assert torch.equal(batch.truncated if truncates else batch.terminated, last)
            assert not (batch.terminated if truncates else batch.truncated).any()
            # The bootstrap goes on from a truncation, and stops at a termination.
            want = torch.where(last & (not truncates), 0.0, 0.5)
            assert torch.equal(batch.discount, want)

    @pytest.mark.parametrize("rewards, want", [([1.0, 1.0, 1.0, 1.0], 1.75), ([1.0, 1.0], 1.5)])
    @pytest.mark.parametrize("truncates", [False, True])
    def test_n_step_returns_stop_where_episodes_do(self, rewards, want, truncates):
        """r = 1, gamma = 1/2, n = 3: 1 + 1/2 + 1/4; and 1 + 1/2 where the episode ends at the second."""
        agent = trainer(Chain(4, rewards, truncates), name="toy/Chain", n_step=3, gamma=0.5)
        for _ in range(20):
            agent._step()
        batch = agent.replay.sample(512)
        first = batch.obs[:, 0] == 0
        assert first.any() and (batch.reward[first] == want).all()
        length = min(3, len(rewards))
        assert (batch.next_obs[first, 0] * 10 == length).all()
        ended = len(rewards) == 2
        assert (batch.discount[first] == (0.0 if ended and not truncates else 0.5**length)).all()

    def test_the_action_stored_is_the_action_taken(self):
        taken = []
        env = Chain(4, [1.0] * 5)
        step = env._step
        env._step = lambda action: (taken.append(action.clone()), step(action))[1]
        agent = trainer(env, name="toy/Chain", n_step=1)
        for _ in range(4):
            agent._step()
        stored = agent.replay.storage.tensors["action"].view(4, -1)[:, :4]
        assert torch.equal(stored, torch.stack(taken, 1))
        assert len(torch.stack(taken).unique()) == 2, "epsilon is 1 at the start"

    def test_stacks_when_acting_are_those_of_the_replay(self, monkeypatch):
        agent = trainer(Pixels(4), name="toy/Pixels", frame_stack=3, n_step=1)
        seen = {}
        for _ in range(25):
            frames = agent.frames.clone()
            head = agent.replay.state.head + torch.arange(4) * agent.replay.state.layout.ring
            seen |= {int(slot): stack for slot, stack in zip(head, frames, strict=True)}
            agent._step()
        batch = agent.replay.sample(256)
        for slot, stack in zip(batch.indices.tolist(), batch.obs, strict=True):
            assert torch.equal(seen[slot], stack)

    def test_rewards_are_scaled_and_then_clipped(self):
        reward = torch.tensor([-4.0, 1.0, 4.0])
        assert trainer(reward_scale=0.5)._scale(reward).tolist() == [-2.0, 0.5, 2.0]
        assert trainer(reward_scale=0.5, reward_clip=1.0)._scale(reward).tolist() == [-1.0, 0.5, 1.0]

    def test_steps_that_were_none_are_left_out(self, monkeypatch):
        """An environment that begins its episodes one step late: what it skips has no weight and no TD error."""
        agent = trainer(Chain(4, [1.0, 2.0, 4.0], late=True), name="toy/Chain", n_step=2, gamma=0.5)
        for _ in range(40):
            agent._step()
        seen, given = {}, {}
        real, update = dqn.dqn_loss, agent.replay.update_priorities
        monkeypatch.setattr(
            dqn,
            "dqn_loss",
            lambda *args, **kw: (seen.update(obs=agent._batches[0].obs.clone(), weight=args[6]), real(*args, **kw))[1],
        )
        monkeypatch.setattr(
            agent.replay, "update_priorities", lambda i, td, g: (given.update(td=td.clone()), update(i, td, g))
        )
        agent._learn(1)
        batch = agent._batches[0]
        skipped = ~batch.valid
        assert skipped.any() and not seen["weight"][skipped].any() and not given["td"][skipped].any()
        assert seen["weight"][~skipped].all()
        for _ in range(3):
            batch = agent.replay.sample(256)
            real_ = batch.valid
            t = (batch.obs[:, 0] * 10).round().long()
            assert (t[~real_] == 3).all() and (t[real_] < 3).all()
            # Two steps where there are two; the last of an episode alone. Never past the step that was none.
            want = torch.tensor([2.0, 4.0, 4.0])[t[real_]]
            assert torch.equal(batch.reward[real_], want)


class TestUpdate:
    def spy(self, monkeypatch, agent):
        """What one update gave back as priorities, and the batch it was of."""
        given = {}
        real = agent.replay.update_priorities

        def update(indices, td_error, generation):
            given.update(indices=indices.clone(), td_error=td_error.clone(), generation=generation.clone())
            real(indices, td_error, generation)

        monkeypatch.setattr(agent.replay, "update_priorities", update)
        agent._learn(1)
        return given

    @pytest.mark.parametrize("beta", [0.0, 1.0])
    def test_priorities_are_td_errors_without_weights(self, monkeypatch, beta):
        """Whatever beta is: the loss weighted by w is never written back."""
        agent = trainer(beta0=beta, double=True, n_step=1)
        for _ in range(4):
            agent.train_epoch()
        policy, target = ({k: v.clone() for k, v in net.state_dict().items()} for net in (agent.policy, agent.target))
        given = self.spy(monkeypatch, agent)
        batch = agent._batches[0]
        assert (batch.weights < 1).any()
        other = trainer()
        other.policy.load_state_dict(policy)
        other.target.load_state_dict(target)
        rows = torch.arange(len(batch.indices))
        with torch.no_grad():
            best = other.policy(batch.next_obs).argmax(1)
            want = batch.reward + batch.discount * other.target(batch.next_obs)[rows, best]
            want = want - other.policy(batch.obs)[rows, batch.action]
        assert torch.allclose(given["td_error"], want, atol=1e-5)
        assert torch.equal(given["indices"], batch.indices) and torch.equal(given["generation"], batch.generations)
        leaf = agent.replay.priorities(batch.indices)
        winner = {int(i): float(td) for i, td in zip(batch.indices, given["td_error"], strict=True)}
        want = torch.tensor([(abs(winner[int(i)]) + 1e-6) ** 0.6 for i in batch.indices])
        assert torch.allclose(leaf, want, rtol=1e-4)

    def test_the_loss_is_weighted(self, monkeypatch):
        agent = trainer()
        agent.train_epoch()
        seen = {}
        real = dqn.dqn_loss
        monkeypatch.setattr(dqn, "dqn_loss", lambda *a, **kw: (seen.update(weight=a[6].clone()), real(*a, **kw))[1])
        agent._learn(1)
        assert torch.equal(seen["weight"], agent._batches[0].weights)

    @pytest.mark.parametrize("changes", [dict(), dict(dueling=False, double=False, target_interval=1, tau=0.1)])
    def test_the_loss_in_three_launches_is_the_same(self, changes):
        plain, fused = trainer(**changes), trainer(**changes)
        fused._is_fused = True
        for agent in (plain, fused):
            for _ in range(4):
                agent.train_epoch()
        assert plain.updates == fused.updates > 10
        for x, y in zip(plain.policy.parameters(), fused.policy.parameters(), strict=True):
            assert torch.allclose(x, y, atol=1e-5)
        assert fused.metrics() == pytest.approx(plain.metrics(), rel=1e-3, abs=1e-4, nan_ok=True)

    def test_a_block_is_its_updates_one_by_one(self):
        """The next batch is drawn before the backward pass, from priorities already written: nothing changes."""
        one, block = trainer(), trainer()
        for agent in (one, block):
            for _ in range(2):
                agent.train_epoch()
        for _ in range(6):
            one._learn(1)
        block._learn(6)
        assert fingerprint(one) == fingerprint(block)

    @pytest.mark.parametrize("interval, tau", [(3, 1.0), (1, 0.25), (2, 0.5)])
    def test_the_target_network_moves_when_it_is_due(self, interval, tau):
        agent = trainer(target_interval=interval, tau=tau, learning_starts=2000, total_steps=4000)
        for _ in range(2):
            agent.train_epoch()
        want = [p.clone() for p in agent.target.parameters()]
        for count in range(1, 8):
            agent.update(1)
            if count % interval == 0:
                online = [p.detach().clone() for p in agent.policy.parameters()]
                want = online if tau == 1 else [w + tau * (p - w) for w, p in zip(want, online, strict=True)]
            for w, p in zip(want, agent.target.parameters(), strict=True):
                assert torch.equal(w, p) if tau == 1 else torch.allclose(w, p, atol=1e-7)

    def test_how_many_updates_follow_a_step(self):
        """4 environments, 0.3 updates a step: 1.2 a step of all; 64 steps of 128 come before the first."""
        agent = trainer(updates_per_step=0.3)
        agent.train_epoch()
        assert agent.updates == int(17 * 1.2)  # the step that reaches 64 is followed by updates too
        agent.train_epoch()
        assert agent.updates == int((17 + 32) * 1.2)

    def test_epsilon(self):
        agent = trainer(epsilon_start=0.8, epsilon_end=0.1, epsilon_fraction=0.5, total_steps=1280)
        assert [round(agent._epsilon(step), 6) for step in (0, 320, 640, 1280)] == [0.8, 0.45, 0.1, 0.1]
        agent.num_actions = 1000
        action = torch.full((20_000,), -1)
        explored = agent._explore(action, torch.tensor(0.25)) >= 0
        assert explored.float().mean().item() == pytest.approx(0.25, abs=0.015)  # five standard errors

    def test_beta_rises_to_one(self):
        agent = train(trainer(beta0=0.4, learning_starts=0))
        assert agent.replay.beta.item() == pytest.approx(1.0, abs=0.02)

    def test_learning_rate(self):
        agent = trainer(lr=0.1, lr_schedule="linear", total_steps=128 * 10)
        for _ in range(6):
            agent.train_epoch()
        assert agent.lr.item() == pytest.approx(0.1 * (1 - 5 / 10))
        assert agent.optimizer.param_groups[0]["lr"] is agent.lr


class TestLearning:
    @pytest.mark.parametrize("changes", [dict(n_step=1), dict(n_step=3, atoms=41)], ids=str)
    def test_truncated_value_goes_on(self, changes):
        """Reward 1 for ever, cut after 10 steps, gamma 0.9: V tends to 1 / (1 - 0.9) = 10, not to 6.51."""
        env = Clock(4, length=10, choose_at=None, truncates=True)
        agent = self.constant_reward(env, v_min=0.0, v_max=12.0, **changes)
        obs = torch.stack([env._show(torch.full((4,), t), torch.zeros(4))[0] for t in range(11)])
        if agent.atoms is None:
            assert values(agent, obs).tolist() == pytest.approx([10.0] * 11, abs=0.4)
        else:
            q = (agent.policy(obs).softmax(2) @ agent.atoms).amax(1)
            assert q.tolist() == pytest.approx([10.0] * 11, abs=0.4)

    def test_terminated_value_stops(self):
        """The same with termination: V at the first step tends to (1 - 0.9^10) / (1 - 0.9) = 6.51, at the last to 1."""
        agent = self.constant_reward(Chain(4, [1.0] * 10), n_step=1)
        first, last = values(agent, [[0.0, 1.0], [0.9, 1.0]]).tolist()
        assert first == pytest.approx((1 - 0.9**10) / 0.1, abs=0.5) and last == pytest.approx(1.0, abs=0.5)

    def constant_reward(self, env, **changes):
        changes = dict(gamma=0.9, lr=0.006, target_interval=12, updates_per_step=1.0, total_steps=128 * 8) | changes
        return train(trainer(env, name="toy/Clock", buffer_size=1000, hidden=32, lr_schedule="linear", **changes))

    def test_images(self):
        """Whether the count shown is odd: convolutions, frames in the replay, uint8."""
        agent = trainer(
            Pixels(4),
            name="toy/Pixels",
            total_steps=128 * 5,
            frame_stack=2,
            gamma=0.0,
            epsilon_fraction=1.0,
            lr=0.002,
            n_step=1,
            batch_size=32,
        )
        train(agent)
        assert evaluate(agent, Pixels(4), 8, seed=1).mean() >= 7

    def test_cartpole(self):
        """A part of the preset's steps: 271, 298 and 181 for seeds 0 to 2, where random actions earn 22."""
        changes = PRESETS["dqn", "CartPole-v1"] | dict(total_steps=12_288, batch_size=64, num_envs=8)
        agent = train(DQN(DQNConfig(env="sharpwave/CartPole", device="cpu", **changes)))
        assert evaluate(agent, agent.env, 48, seed=1).mean() >= 120


class TestResume:
    @pytest.mark.parametrize(
        "changes",
        [
            dict(name="CartPole-v1"),
            dict(noisy=True, optimizer="muon"),
            dict(frame_stack=3, updates_per_step=0.3, atoms=11, lr_schedule="linear"),
        ],
        ids=["gymnasium", "noisy", "frames"],
    )
    def test_six_epochs_are_three_and_three(self, changes):
        """Weights, target, optimizer, schedules, streams, replay, environment: bit for bit, through the file format."""
        changes |= dict(total_steps=128 * 6)
        straight = train(trainer(**changes))
        half = trainer(**changes)
        for _ in range(3):
            half.train_epoch()
        state = unflatten(*flatten(half.state_dict()))
        half.train_epoch()  # the state must not change with the trainer it was taken from
        resumed = trainer(**changes)
        resumed.load_state_dict(state)
        assert fingerprint(train(resumed)) == fingerprint(straight)

    def test_same_seed_same_run(self):
        first, second, other = (fingerprint(train(trainer(seed=seed, total_steps=128 * 3))) for seed in (0, 0, 1))
        assert first == second != other

    def test_without_the_replay_it_is_filled_again_first(self):
        half = trainer(save_replay=False)
        for _ in range(5):
            half.train_epoch()
        state = half.state_dict()
        assert "replay" not in state
        resumed = trainer(save_replay=False)
        resumed.load_state_dict(state)
        assert len(resumed.replay) == 0 and resumed.updates == half.updates
        assert torch.equal(resumed.replay.beta, half.replay.beta)
        assert torch.equal(resumed.replay.max_priority, half.replay.max_priority)
        resumed.train_epoch()
        assert resumed.updates - half.updates == 17  # of 32: the first 64 steps fill it
        train(resumed)

    def test_loading_does_not_alias(self):
        agent, other = trainer(), trainer(seed=1)
        agent.train_epoch()
        state = agent.state_dict()
        other.load_state_dict(state)
        before = [t.clone() for t in flatten(state)[0].values()]
        other.train_epoch()
        assert all(torch.equal(a, b) for a, b in zip(before, flatten(state)[0].values(), strict=True))

    def test_an_environment_that_cannot_continue_begins_new_episodes(self):
        agent = trainer()
        for _ in range(3):
            agent.train_epoch()
        agent._begin(agent.env.reset(5))
        assert agent.begins.all() and torch.equal(agent.frames[:, 0], agent.obs)
        assert not agent._check.state()["return"].any()

    def test_streams_follow_seed_and_rank(self):
        def streams(seed, rank):
            agent = DQN(DQNConfig(env="sharpwave/CartPole", seed=seed, **SMALL), world=World(rank))
            seed_of_draws = int(agent.replay.state.seed)
            return agent.obs, agent.generator.initial_seed(), seed_of_draws, next(agent.policy.parameters()).detach()

        base, other_rank, other_seed = streams(0, 0), streams(0, 1), streams(1, 0)
        for other in (other_rank, other_seed):
            assert not torch.equal(base[0], other[0]) and base[1] != other[1] and base[2] != other[2]
        assert torch.equal(base[3], other_rank[3]), "all ranks begin with the same weights"
        assert not torch.equal(base[3], other_seed[3])


class TestNormalizer:
    def test_it_follows_what_was_seen_and_travels_with_the_weights(self):
        agent = trainer(Chain(4, [1.0] * 10), name="toy/Chain", normalize_obs=True)
        agent.train_epoch()
        moments = agent.policy.normalizer
        assert moments.count == 4 * 32 and moments.mean.tolist() == pytest.approx([0.45, 1.0], abs=0.05)
        other = trainer(Chain(4, [1.0] * 10), name="toy/Chain", normalize_obs=True, seed=1)
        other.policy.load_state_dict(agent.policy.state_dict())
        obs = torch.tensor([[0.3, 1.0], [0.9, 1.0]])
        assert torch.equal(agent.policy(obs), other.policy(obs))
        assert torch.equal(agent.policy.prepare(obs), moments(obs))

    def test_targets_read_observations_as_the_policy_does(self, monkeypatch):
        agent = trainer(Chain(4, [1.0] * 10), name="toy/Chain", normalize_obs=True)
        agent.train_epoch()
        seen = []
        real = agent.target.output
        monkeypatch.setattr(agent.target, "output", lambda x: (seen.append(x), real(x))[1])
        agent._learn(1)
        assert torch.equal(seen[0], agent.policy.normalizer(agent._batches[0].next_obs))


class TestActing:
    def test_greedy_and_exploring(self):
        agent = trainer(epsilon_end=1.0)
        obs = torch.randn(400, 4)
        greedy_, state = agent.act(obs, deterministic=True)
        assert torch.equal(greedy_, agent.policy(obs).argmax(1)) and state.shape == (400, 1, 4)
        drawn, _ = agent.act(obs)
        assert 120 < (drawn != greedy_).sum() < 280

    def test_noise_is_of_each_environment_its_own_and_off_when_deterministic(self):
        agent = trainer(noisy=True)
        obs = torch.randn(1, 4).expand(64, 4).contiguous()
        agent.policy.draw_noise(64, agent.generator)
        assert len(agent.policy(obs)[:, 0].unique()) == 64
        agent.policy.draw_noise(1, agent.generator)
        shared = agent.policy(obs)[:, 0]
        assert torch.allclose(shared, shared[0])
        first, second = (agent.act(obs, deterministic=True)[0] for _ in range(2))
        assert torch.equal(first, second) and len(first.unique()) == 1
        assert agent.metrics()["schedule/epsilon"] == 0

    def test_the_state_is_the_frames(self):
        agent = trainer(Pixels(4), name="toy/Pixels", frame_stack=3)
        env = Pixels(4)
        obs, state = env.reset(0).obs, None
        begins = torch.ones(4, dtype=torch.bool)
        for _ in range(12):
            _, state = agent.act(obs, state, begins, deterministic=True)
            assert torch.equal(state[:, -1], obs)
            assert torch.equal(state[begins], obs[begins][:, None].expand(-1, 3, -1, -1))
            step = env.step(torch.zeros(4, dtype=torch.int64))
            obs, begins = step.obs, step.begins


class TestFaults:
    def test_an_infinite_loss_skips_the_step_and_is_named(self):
        agent = trainer(huber=math.inf)
        agent.train_epoch()
        weights = [p.detach().clone() for p in agent.policy.parameters()]
        rewards = agent.replay.storage.tensors["reward"]
        kept = rewards.clone()
        rewards.fill_(3e38)
        agent.metrics()
        agent.update(1)
        assert all(torch.equal(p, w) for p, w in zip(agent.policy.parameters(), weights, strict=True))
        metrics = agent.metrics()
        assert metrics["fault/skipped_updates"] == 1 and "loss" in agent.faults()
        rewards.copy_(kept)
        agent.train_epoch()
        assert agent.metrics()["fault/skipped_updates"] == 0 and agent.faults() == []

    def test_a_bad_gradient_names_the_parameter(self):
        agent = trainer()
        agent.train_epoch()
        agent.metrics()
        agent.policy.advantage.bias.register_hook(lambda grad: grad * math.nan)
        agent.update(1)
        agent.metrics()
        assert agent.faults() == ["the gradient of advantage.bias"]

    def test_nan_td_errors_keep_the_largest_priority_and_are_counted(self):
        agent = trainer()
        agent.train_epoch()
        agent.replay.storage.tensors["reward"].fill_(math.nan)
        agent.update(1)
        assert agent.metrics()["replay/bad_td_errors"] == SMALL["batch_size"]
        assert all(torch.isfinite(p).all() for p in agent.policy.parameters())


class TestMetrics:
    def test_a_line_before_the_first_update_and_after(self):
        agent = trainer(learning_starts=200)
        agent.train_epoch()
        before = agent.metrics()
        assert before["update/count"] == 0 and not any(name.startswith(("loss/", "q/", "td/")) for name in before)
        agent.train_epoch()
        after = agent.metrics()
        assert after["update/count"] > 0 and all(math.isfinite(x) for name, x in after.items() if "episode" not in name)
        assert after["td/p50"] <= after["td/p90"] <= after["td/max"]
        assert after["replay/priority_p10"] <= after["replay/priority_p50"] <= after["replay/priority_p90"]
        assert 256 - 4 * 2 <= after["replay/held"] <= 256  # all steps but those whose three are not complete
        assert set(agent.phases()) >= {"act", "env", "insert", "sample", "train", "priorities"}

    def test_histograms(self):
        agent = trainer()
        assert agent.histograms() == {}
        agent.train_epoch()
        agent._metrics.td_error[:2] = torch.tensor([math.nan, math.inf])
        shown = agent.histograms()
        assert sum(shown["priorities"][2]) == agent.metrics()["replay/held"]
        assert sum(shown["TD errors"][2]) == SMALL["batch_size"] - 2

    def test_means_are_over_the_updates_taken(self):
        metrics = UpdateMetrics(torch.device("cpu"), 2, window=3)
        td = torch.tensor([1.0, -3.0])
        for number in (1.0, 3.0, math.inf):
            metrics.update(torch.full((5,), number), torch.tensor(number), td)
        numbers, faults = metrics.read()
        assert numbers["loss/td"] == numbers["q/mean"] == numbers["grad/norm"] == 2
        assert numbers["q/max"] == 3 and numbers["td/max"] == 3 and numbers["td/p50"] == 2
        assert numbers["fault/skipped_updates"] == 1 and "loss" in faults and "gradient" in faults
        for number in range(10):  # only the latest three are kept
            metrics.update(torch.full((5,), float(number)), torch.tensor(1.0), td)
        numbers, faults = metrics.read()
        assert numbers["update/count"] == 10 and numbers["loss/td"] == 8 and faults == []

    @backends("triton")
    def test_the_kernel_writes_what_the_definition_does(self, backend, device):
        from sharpwave.algos._log_triton import log_update

        ours, wanted = (UpdateMetrics(torch.device(where), 300, window=2) for where in (device, "cpu"))
        for _ in range(3):
            stats, (norm,), td_error = (torch.randn(n) for n in (5, 1, 300))
            wanted.update(stats, norm, td_error)
            given = (x.to(device) for x in (stats, norm, td_error))
            log_update(*given, ours._log, ours._place, ours._count, ours.td_error)
        for name in ("_log", "_place", "_count", "td_error"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(wanted, name)), name

    def test_overestimation_by_hand(self):
        """gamma 1/2. Environment 0: V(s_0) = 5, rewards 1, 2, 4 and a termination: 5 - (1 + 1 + 1) = 2.
        Environment 1 is truncated, with V(s_2) = 8 before: 5 - (1 + 1 + 1 + 8/8) = 1. Mean 1.5."""
        check = ReturnCheck(2, 0.5, torch.device("cpu"))
        begins = torch.tensor([True, True])
        no = torch.zeros(2, dtype=torch.bool)
        for t, reward in enumerate((1.0, 2.0, 4.0)):
            check.value(torch.tensor([5.0, 5.0]) if t == 0 else torch.tensor([8.0, 8.0]), begins)
            ends = (torch.tensor([True, False]), torch.tensor([False, True])) if t == 2 else (no, no)
            rewards = torch.full((2,), reward)
            step = Step(rewards, rewards, *ends, rewards)
            check.step(step, rewards)
            begins = step.begins
        assert check.read() == 1.5 and math.isnan(check.read())


class TestConfig:
    @pytest.mark.parametrize(
        "changes, words",
        [
            (dict(gamma=1.5), r"--gamma must be in \[0, 1\]; got 1.5"),
            (dict(lr=0.0), "--lr must be above 0"),
            (dict(total_steps=100), "--total-steps must be at least one epoch of 128"),
            (dict(buffer_size=20), "--buffer-size must be at least 24"),
            (dict(buffer_size=2**31), "--buffer-size must be at most 2,000,000,000"),
            (
                dict(buffer_size=2_000_000_000, env_kwargs=dict(observation_size=10_000), name="sharpwave/Synthetic"),
                "GiB",
            ),
            (dict(learning_starts=5000), "--learning-starts 5000 is not below --total-steps 1280"),
            (dict(tau=0.0), r"--tau must be in \(0, 1\]"),
            (dict(v_min=3.0, v_max=3.0), "--v-max must be above --v-min 3 and finite"),
            (dict(num_envs=0), "--num-envs must be at least 1"),
            (dict(reward_clip=-1.0), "--reward-clip must be above 0"),
            (dict(updates_per_step=math.nan), "--updates-per-step must be in"),
            (dict(env_kwargs=dict(num_envs=3)), "--env-kwargs cannot hold num_envs: use --num-envs"),
            (dict(network="nature"), "network 'nature' needs an image"),
        ],
    )
    def test_errors_are_one_line_and_say_what_to_do(self, changes, words):
        with pytest.raises((UserError, ValueError), match=words) as caught:
            trainer(**changes)
        assert "\n" not in str(caught.value)

    def test_a_trainer_that_only_plays_holds_no_large_replay(self):
        config = DQNConfig(env="sharpwave/CartPole", **SMALL).for_playing()
        assert DQN(config).replay.capacity == 4 * (3 + 1 + 2)

    @pytest.mark.parametrize(
        "env, words",
        [(Target(4), "continuous actions"), (Masked(4), "action masks"), (None, "2 heads of actions")],
        ids=["continuous", "masked", "heads"],
    )
    def test_other_actions_are_refused(self, env, words):
        if env is None:
            env = CartPole(4)
            env.action = Discrete((2, 3))
        with pytest.raises(UserError, match=f"dqn needs one discrete action.*{words}: use sharpwave train ppo"):
            trainer(env)

    def test_every_field_is_read(self):
        """A setting that nothing reads is a lie to the one who sets it."""
        sources = [
            inspect.getsource(dqn),
            inspect.getsource(dqn_checks),
            inspect.getsource(dqn_config.DQNConfig.resolved),
        ]
        sources += [inspect.getsource(p.fget) for p in vars(DQNConfig).values() if isinstance(p, property)]
        nodes = [node for text in sources for node in ast.walk(ast.parse(textwrap.dedent(text)))]
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        loop = {f.name for f in dataclasses.fields(RunConfig)}  # read by sharpwave.run
        assert not {f.name for f in dataclasses.fields(DQNConfig)} - read - loop - {"env", "env_kwargs"}
