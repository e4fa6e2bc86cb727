"""CartPole against Gymnasium's; cue recall by hand; both kept, restored, on a GPU and captured."""

import json

import gymnasium
import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.envs import Discrete, Observation
from sharpwave.envs.bars import Bars
from sharpwave.envs.breakout import Breakout
from sharpwave.envs.cartpole import CartPole
from sharpwave.envs.cue_recall import CueRecall
from sharpwave.envs.synthetic import Synthetic

NATIVE = {
    "bars": lambda device="cpu": Bars(33, device, window=3, episode_length=7, instruments=2, length=60),
    "breakout": lambda device="cpu": Breakout(33, device, sticky_action_prob=0, max_episode_steps=30),
    "cartpole": lambda device="cpu": CartPole(33, device, max_episode_steps=30),
    "recall": lambda device="cpu": CueRecall(33, device, k=5, delay=3),
    "previous": lambda device="cpu": CueRecall(33, device, k=5, delay=3, target="previous"),
    "synthetic": lambda device="cpu": Synthetic(33, device, observation_size=7, num_actions=3, length=5, rows=11),
}
native = pytest.mark.parametrize("build", NATIVE.values(), ids=NATIVE)


def random_actions(env, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(0, env.action.nvec[0], (steps, env.num_envs), generator=generator)
    return actions.to(env.device)


def assert_equal_steps(got, want):
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), name


class TestCartPole:
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 2e-6)])
    def test_every_step_is_gymnasiums(self, dtype, tolerance, gen):
        """Each step starts both from one state; a step of the other's float64 is rounded to float32 as ours is."""
        env = CartPole(256, dtype=dtype)
        env.reset(0)
        theirs = gymnasium.make("CartPole-v1").unwrapped
        spread = torch.tensor([2.4, 3.0, 0.21, 3.0], dtype=dtype)
        start = (torch.rand(256, 4, generator=gen, dtype=dtype) * 2 - 1) * spread
        env._physics.copy_(start)
        action = random_actions(env, 1)[0]
        step = env.step(action)
        want, ended = [], []
        for i in range(256):
            theirs.reset(seed=0)
            theirs.state = tuple(start[i].double().tolist())
            obs, reward, terminated, _, _ = theirs.step(int(action[i]))
            want.append(obs)
            ended.append(terminated)
            assert reward == step.reward[i]
        np.testing.assert_allclose(step.next_obs.numpy(), np.stack(want), rtol=0, atol=tolerance)
        assert step.terminated.tolist() == ended
        assert 20 < sum(ended) < 236

    def test_the_pole_has_fallen_past_12_degrees_and_2_4_metres(self):
        """Without speed the position after a step is the one before: 0.209439 = 12 pi / 180."""
        env = CartPole(8)
        env.reset(0)
        env._physics.zero_()
        env._physics[:4, 0] = torch.tensor([2.3999, -2.3999, 2.4001, -2.4001])
        env._physics[4:, 2] = torch.tensor([0.20943, -0.20943, 0.20945, -0.20945])
        step = env.step(torch.zeros(8, dtype=torch.int64))
        assert step.terminated.tolist() == [False, False, True, True] * 2

    def test_a_whole_episode_is_gymnasiums(self):
        """Same length and end; a pole multiplies the last bits' differences, so each step starts from one state."""
        env = CartPole(1, dtype=torch.float64)
        obs, _, _ = env.reset(0)
        theirs = gymnasium.make("CartPole-v1")
        theirs.reset(seed=0)
        for t in range(1, 501):
            theirs.unwrapped.state = tuple(env._physics[0].tolist())
            x, dx, theta, dtheta = obs[0].tolist()
            action = int(theta + 0.3 * dtheta + 0.03 * x + 0.07 * dx > 0)
            want, _, terminated, truncated, _ = theirs.step(action)
            step = env.step(torch.tensor([action]))
            np.testing.assert_allclose(step.next_obs[0].numpy(), want, rtol=1e-6, atol=1e-6)
            assert (bool(step.terminated), bool(step.truncated)) == (terminated, truncated)
            assert truncated == (t == 500) and not terminated
            obs = step.obs

    def test_truncated_at_the_limit_and_begun_anew(self):
        env = CartPole(3, max_episode_steps=2)
        env.reset(0)
        push = torch.ones(3, dtype=torch.int64)
        first = env.step(push)
        assert not first.truncated.any() and torch.equal(first.obs, first.next_obs)
        second = env.step(push)
        assert second.truncated.all() and not second.terminated.any()
        assert (second.next_obs[:, 1] > 0.2).all(), "two pushes have moved the cart"
        assert (second.obs.abs() <= 0.05).all() and not torch.equal(second.obs[0], second.obs[1])
        assert not env.step(push).truncated.any()

    def test_starts_are_uniform(self):
        obs = CartPole(20000).reset(0).obs
        assert obs.abs().max() <= 0.05
        np.testing.assert_allclose(obs.mean(0), 0, atol=4 * 0.05 / np.sqrt(3 * 20000))
        np.testing.assert_allclose(obs.std(0), 0.05 / np.sqrt(3), rtol=0.02)

    def test_later_steps_leave_earlier_results_alone(self):
        env = CartPole(8)
        env.reset(0)
        actions = random_actions(env, 40)
        steps = [env.step(a) for a in actions]
        copies = [step.obs.clone() for step in steps]
        for a in actions:
            env.step(a)
        assert all(torch.equal(step.obs, copy) for step, copy in zip(steps, copies, strict=True))

    def test_options(self):
        with pytest.raises(ValueError, match="max_episode_steps"):
            CartPole(1, max_episode_steps=0)
        with pytest.raises(ValueError, match="dtype"):
            CartPole(1, dtype=torch.float16)
        with pytest.raises(ValueError, match="num_envs"):
            CartPole(0)


class TestCueRecall:
    @pytest.mark.parametrize("delay", [0, 1, 4])
    @pytest.mark.parametrize("target", ["cue", "previous"])
    def test_by_hand(self, delay, target):
        k, n = 3, 50
        env = CueRecall(n, k=k, delay=delay, target=target)
        assert env.observation == Observation((k + 2,), torch.float32) and env.action == Discrete((k,))
        obs = env.reset(0).obs
        previous = None
        for _ in range(4):
            cue = obs.argmax(1)
            assert torch.equal(obs, torch.nn.functional.one_hot(cue, k + 2).float()) and (cue < k).all()
            for t in range(delay + 1):
                step = env.step(cue)
                shows = torch.zeros(n, k + 2)
                shows[:, k if t == delay else k + 1] = 1
                assert torch.equal(step.obs, shows) and torch.equal(step.next_obs, shows)
                assert not (step.reward.any() or step.terminated.any() or step.truncated.any())
            answer = cue if target == "cue" else previous
            action = cue if answer is None else torch.where(torch.arange(n) % 2 == 0, answer, (answer + 1) % k)
            step = env.step(action)
            if answer is not None:
                assert step.reward.tolist() == [1.0, 0.0] * (n // 2)
            assert step.terminated.all() and not step.truncated.any()
            assert (step.next_obs.argmax(1) == k + 1).all()
            obs, previous = step.obs, cue

    def test_the_first_answer_of_previous_is_not_seen(self):
        """Whatever is done with the first cue, its episode is answered at chance: 1/4 within 4 standard errors."""
        env = CueRecall(20000, k=4, delay=0, target="previous")
        cue = env.reset(0).obs.argmax(1)
        env.step(cue)
        assert float(env.step(cue).reward.mean()) == pytest.approx(0.25, abs=4 * (0.1875 / 20000) ** 0.5)

    def test_cues_are_uniform_and_independent(self):
        env = CueRecall(20000, k=4, delay=0)
        first = env.reset(0).obs.argmax(1)
        env.step(first)
        second = env.step(first).obs.argmax(1)
        counts = torch.bincount(first * 4 + second, minlength=16).double()
        chi_square = float(((counts - 1250) ** 2 / 1250).sum())
        assert chi_square < 37.7, "15 degrees of freedom, p = 0.001"

    @pytest.mark.parametrize("options", [{"k": 1}, {"delay": -1}, {"target": "next"}])
    def test_options(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            envs.make("sharpwave/CueRecall", 2, **options)


@native
class TestEveryNative:
    def test_same_seed_same_episodes(self, build):
        a, b = build(), build()
        assert torch.equal(a.reset(3).obs, b.reset(3).obs)
        for action in random_actions(a, 50):
            assert_equal_steps(a.step(action), b.step(action))
        assert torch.equal(a.reset(3).obs, build().reset(3).obs), "reset forgets what went before"
        assert not torch.equal(a.reset(3).obs, a.reset(4).obs)

    def test_written_where_it_is_wanted(self, build):
        """The observation in a column of a rollout, everything else the same, true final observations included."""
        env, other = build(), build()
        env.reset(3)
        other.reset(3)
        rollout = torch.full((env.num_envs, 51, *env.observation.shape), 7).to(env.observation.dtype)
        untouched = rollout[:, 50].clone()
        ended = 0
        for t, action in enumerate(random_actions(env, 50)):
            step = env.step(action, out=rollout[:, t])
            want = other.step(action)
            assert_equal_steps(step, want)
            assert step.obs.data_ptr() == rollout[:, t].data_ptr()
            ended += int((want.terminated | want.truncated).sum())
        assert ended and torch.equal(rollout[:, 50], untouched)
        step, want = env.step(action, out=rollout[:, 50], need_next_obs=False), other.step(action)
        assert_equal_steps(step._replace(next_obs=want.next_obs), want)
        with pytest.raises(ValueError, match="out must have shape"):
            env.step(action, out=rollout)
        with pytest.raises(TypeError, match="out must be"):
            env.step(action, out=rollout[:, 0].to(torch.complex64))

    def test_written_rounded_where_it_is_wanted(self, build):
        env, other = build(), build()
        if env.observation.dtype != torch.float32:
            pytest.skip("no rounding")
        env.reset(3)
        other.reset(3)
        size = env.observation.size
        for width in (size + 3, size + -size % 8):
            rollout = torch.full((env.num_envs, 2, width), 7, dtype=torch.bfloat16)
            for action in random_actions(env, 3):
                step, want = env.step(action, out=rollout[:, 1]), other.step(action)
                assert step.obs.data_ptr() == rollout[:, 1].data_ptr()
                assert torch.equal(rollout[:, 1, :size], want.obs.flatten(1).bfloat16())
                assert_equal_steps(step._replace(obs=want.obs), want)
            assert (rollout[:, 0] == 7).all() and not rollout[:, 1, size:].any()
        with pytest.raises(ValueError, match="out must have shape"):
            env.step(action, out=rollout[:, 0, : size - 1])

    def test_saved_and_continued_bit_for_bit(self, build):
        env, again = build(), build()
        env.reset(0)
        for action in random_actions(env, 17):
            last = env.step(action)
        state = env.state_dict()
        plain = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        state = {**state, **json.loads(json.dumps(plain))}
        loaded = again.load_state_dict(state)
        assert env.exact_resume and loaded.continued and torch.equal(loaded.obs, last.obs)
        for action in random_actions(env, 60, seed=2):
            assert_equal_steps(again.step(action), env.step(action))

    def test_state_is_copied_both_ways(self, build):
        env, again = build(), build()
        env.reset(0)
        state = env.state_dict()
        before = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
        again.load_state_dict(state)
        for action in random_actions(env, 20):
            env.step(action)
            again.step(action)
        assert all(torch.equal(state[k], v) for k, v in before.items())

    def test_a_state_that_does_not_fit_is_refused_whole(self, build):
        env = build()
        obs = env.reset(0).obs
        state = env.state_dict()
        name = next(k for k in state if k in env._kept)
        for wrong in (state[name][:1], state[name].to(torch.complex64), None):
            with pytest.raises(ValueError, match=f"the state must hold '{name}'"):
                env.load_state_dict({**state, name: wrong})
        with pytest.raises(ValueError, match="another kind of device"):
            env.load_state_dict({**state, "generator": torch.zeros(16, dtype=torch.uint8)})
        assert torch.equal(env._observe().obs, obs)

    @pytest.mark.gpu
    def test_no_step_waits_for_the_gpu(self, build):
        env = build("cuda")
        env.reset(0)
        actions = random_actions(env, 40)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for action in actions:
                env.step(action)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_cuda_steps_as_the_cpu_does(self, build):
        """Random streams differ, so both are set to one state; transcendental functions differ in the last bits."""
        host, there = build(), build("cuda")
        host.reset(0)
        there.reset(0)
        for action in random_actions(host, 40):
            for name, tensor in host._kept.items():
                there._kept[name].copy_(tensor)
            a, b = host.step(action), there.step(action.cuda())
            torch.testing.assert_close(b.next_obs.cpu(), a.next_obs, rtol=1e-5, atol=1e-6)
            assert torch.equal(b.reward.cpu(), a.reward) and torch.equal(b.truncated.cpu(), a.truncated)
            assert torch.equal(b.terminated.cpu(), a.terminated)

    @pytest.mark.gpu
    def test_captured_equals_eager(self, build):
        eager, captured = build("cuda"), build("cuda")
        eager.reset(5)
        captured.reset(0)
        action = torch.zeros(eager.num_envs, dtype=torch.int64, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured.step(action)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(captured.generator)
        with torch.cuda.graph(graph):
            out = captured.step(action)

        captured.reset(5)
        for t, fresh in enumerate(random_actions(eager, 80)):
            if t == 40:
                captured.load_state_dict(eager.state_dict())
            action.copy_(fresh)
            graph.replay()
            assert_equal_steps(out, eager.step(fresh))


class TestSynthetic:
    def test_by_hand(self):
        env = Synthetic(4, observation_size=3, num_actions=2, length=3, rows=10)
        obs = env.reset(0).obs
        row = env._row.clone()
        assert torch.equal(obs, env._table[row])
        assert env._t.tolist() == [0, 1, 2, 0]
        action = torch.tensor([0, 1, 0, 1])
        step = env.step(action)
        assert step.reward.tolist() == [float(a == r % 2) for a, r in zip(action.tolist(), row.tolist(), strict=True)]
        assert step.terminated.tolist() == [False, False, True, False]
        goes_on = ~step.terminated
        assert torch.equal(env._row[goes_on], ((row + 1 + action) % 10)[goes_on])
        assert torch.equal(step.obs, env._table[env._row])

    def test_triton_launch_is_the_many(self):
        """The GPU's kernel against the operations it stands for; rows of `out` lie apart, or columns too."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        many, one = (Synthetic(9, device, observation_size=5, num_actions=3, length=4, rows=7) for _ in range(2))
        many._triton, one._triton = False, True
        many.writes_rounded, one.writes_rounded = False, True
        assert torch.equal(many.reset(1).obs, one.reset(1).obs)
        for t, action in enumerate(random_actions(many, 12)):
            room = torch.full((2, 9, 3, 5), torch.nan, device=device)
            if t % 3 == 0:
                room = torch.full((2, 9, 5, 3), torch.nan, device=device).transpose(2, 3)
            want = many.step(action, out=room[0, :, 1])
            got = one.step(action, out=room[1, :, 1])
            assert_equal_steps(got, want)
            assert want.truncated.dtype == got.truncated.dtype == torch.bool
            assert room[:, :, 0].isnan().all() and room[:, :, 2].isnan().all()
            for name, tensor in many._kept.items():
                assert torch.equal(one._kept[name], tensor), name
        got = one.step(action, out=room[1, :, 1], need_next_obs=False)
        assert torch.equal(got.obs, many.step(action).obs)
        rounded = torch.full((9, 3, 8), torch.nan, dtype=torch.bfloat16, device=device)
        got, want = one.step(action, out=rounded[:, 1]), many.step(action)
        assert torch.equal(got.next_obs, want.next_obs) and torch.equal(got.reward, want.reward)
        assert torch.equal(got.obs[:, :5], want.obs.bfloat16()) and not got.obs[:, 5:].any()
        assert rounded[:, [0, 2]].isnan().all()

    @pytest.mark.parametrize("options", [{"num_actions": 1}, {"rows": 0}, {"length": 0}, {"observation_size": 0}])
    def test_options(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            envs.make("sharpwave/Synthetic", 2, **options)
