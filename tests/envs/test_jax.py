"""JAX environments: shared memory, ends, exact resume, and what is refused. Run where the extra `jax` is installed."""

import json
import sys
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.algos.ppo import PPO, PPOConfig

jax = pytest.importorskip("jax")
pytest.importorskip("gymnax")

from sharpwave.envs.jax import JaxVector  # noqa: E402


def counter(num_envs, device="cpu", *, batch=None, limit=6):
    """Counts to a random number: a small world with every kind of state. Its reward is the count."""
    import jax.numpy as jnp

    def reset(key):
        world = {"t": jnp.int32(0), "until": jax.random.randint(key, (), 1, limit), "key": key}
        return jnp.zeros(3), world

    def step(key, world, action):
        t = world["t"] + 1
        obs = jnp.stack([t, world["until"], action]).astype(jnp.float32)
        obs = jnp.where(action == 2, jnp.nan, obs)
        late = t == 4
        return obs, {**world, "t": t}, t, t >= world["until"], late

    return JaxVector("counter", num_envs, device, envs.Discrete((3,)), reset, step, reset_batch=batch)


class TestMemory:
    @pytest.mark.parametrize("name", ["gymnax/CartPole-v1", "gymnax/Breakout-MinAtar"])
    def test_nothing_is_copied(self, name):
        env = envs.make(name, 8)
        obs = env.reset(0).obs
        assert obs.data_ptr() == env._obs.unsafe_buffer_pointer()
        seen = []
        advance = env._compiled.result()

        def spy(key, world, stock, action):
            result = advance(key, world, stock, action)
            seen.append((action.unsafe_buffer_pointer(), *(x.unsafe_buffer_pointer() for x in result[-1][:4])))
            return result

        env._compiled = Future()
        env._compiled.set_result(spy)
        action = torch.zeros(8, dtype=torch.int64)
        cast = torch.zeros(8, dtype=torch.int32)
        action.to = lambda *_: cast
        step = env.step(action)
        given, final, reward, terminated, truncated = seen[0]
        assert given == cast.data_ptr()
        assert final == step.next_obs.data_ptr() and reward == step.reward.data_ptr()
        assert terminated == step.terminated.data_ptr() and truncated == step.truncated.data_ptr()
        assert step.obs.data_ptr() == env._obs.unsafe_buffer_pointer() != final

    def test_later_steps_leave_earlier_results_alone(self):
        env = envs.make("gymnax/CartPole-v1", 8)
        env.reset(0)
        steps = [env.step(torch.ones(8, dtype=torch.int64)) for _ in range(30)]
        copies = [step.obs.clone() for step in steps]
        for _ in range(30):
            env.step(torch.zeros(8, dtype=torch.int64))
        assert all(torch.equal(step.obs, copy) for step, copy in zip(steps, copies, strict=True))


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_begun_together_or_in_batches(batch):
    import jax.numpy as jnp

    def reset(key):
        return jax.random.uniform(key, (3,)), {"until": jax.random.randint(key, (), 1, 9)}

    def step(key, world, action):
        return jnp.full(3, world["until"], dtype=jnp.float32), world, 0.0, False, False

    together, apart = (JaxVector("w", 6, "cpu", envs.Discrete((2,)), reset, step, reset_batch=b) for b in (None, batch))
    assert torch.equal(together.reset(3).obs, apart.reset(3).obs)
    action = torch.zeros(6, dtype=torch.int64)
    assert torch.equal(together.step(action).obs, apart.step(action).obs)


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_every_beginning_in_stock_is_used(batch):
    """Those that end take the next ones in line, in order, also where more end at a time than there are in stock."""
    env = counter(7, batch=batch)
    env.reset(4)
    key = jax.numpy.asarray(np.random.SeedSequence(4).generate_state(2), dtype=jax.numpy.uint32)
    later = jax.random.split(key, 3)[2]
    made = []
    while len(made) < 100:
        later, sub = jax.random.split(later)
        made += [int(jax.random.randint(one, (), 1, 6)) for one in jax.random.split(sub, batch)]
    served = []
    for _ in range(30):
        step = env.step(torch.ones(7, dtype=torch.int64))
        served += np.asarray(env._world["until"])[step.begins.numpy()].tolist()
    assert len(served) > 50 and served == made[: len(served)]


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_ends_and_beginnings(batch):
    """However many episodes are begun at a time, each end shows its own last observation and a fresh first one."""
    env = counter(7, batch=batch)
    assert not env.reset(0).obs.any()
    t = np.zeros(7)
    ends, untils = [0, 0], set()
    for action in torch.randint(0, 2, (40, 7), generator=torch.Generator().manual_seed(0)):
        step = env.step(action)
        t += 1
        until = step.next_obs[:, 1].numpy()
        np.testing.assert_array_equal(step.next_obs[:, 0].numpy(), t)
        np.testing.assert_array_equal(step.next_obs[:, 2].numpy(), action.numpy())
        np.testing.assert_array_equal(step.reward.numpy(), t)
        np.testing.assert_array_equal(step.terminated.numpy(), t >= until)
        np.testing.assert_array_equal(step.truncated.numpy(), t == 4)
        ended = step.begins.numpy()
        assert not step.obs[ended].any() and torch.equal(step.obs[~ended], step.next_obs[~ended])
        ends[0] += int(step.terminated.sum())
        ends[1] += int((step.truncated & ~step.terminated).sum())
        untils |= set(until[ended].tolist())
        t[ended] = 0
    assert min(ends) > 5 and untils == {1.0, 2.0, 3.0, 4.0, 5.0}


@pytest.mark.parametrize(
    "build", [counter, lambda n: counter(n, batch=2), lambda n: envs.make("gymnax/CartPole-v1", n)]
)
def test_saved_and_continued_bit_for_bit(build):
    env, again = build(5), build(5)
    env.reset(0)
    actions = torch.randint(0, 2, (60, 5), generator=torch.Generator().manual_seed(1))
    for action in actions[:17]:
        last = env.step(action)
    state = env.state_dict()
    plain = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
    loaded = again.load_state_dict({**state, **json.loads(json.dumps(plain))})
    assert env.exact_resume and loaded.continued and torch.equal(loaded.obs, last.obs)
    for action in actions:
        for a, b in zip(env.step(action)[:5], again.step(action)[:5], strict=True):
            assert torch.equal(a, b)


def test_numbers_of_no_fixed_type():
    """A world may hold them, though a step that is compiled once needs the type that the first step will give."""

    def step(key, world, action):
        return jax.numpy.zeros(2), world + 1, 0.0, world > 3, False

    env = JaxVector("loose", 2, "cpu", envs.Discrete((2,)), lambda key: (jax.numpy.zeros(2), 0), step, reset_batch=1)
    env.reset(0)
    ends = [env.step(torch.zeros(2, dtype=torch.int64)).terminated.tolist() for _ in range(10)]
    assert ends == ([[False] * 2] * 4 + [[True] * 2]) * 2


def test_seeds():
    a, b = counter(6), counter(6)
    a.reset(1), b.reset(1)
    assert torch.equal(
        a.step(torch.ones(6, dtype=torch.int64)).next_obs, b.step(torch.ones(6, dtype=torch.int64)).next_obs
    )
    b.reset(2)
    action = torch.ones(6, dtype=torch.int64)
    a.reset(1)
    assert not torch.equal(a.step(action).next_obs, b.step(action).next_obs)


def test_nan_is_named():
    env = counter(4)
    env.reset(0)
    env.step(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(envs.EnvFault, match=r"environment 3 returned a NaN .* at step 2") as caught:
        env.step(torch.tensor([0, 1, 0, 2]))
    assert (caught.value.index, caught.value.step) == (3, 2)


def test_continuous_actions_are_clipped():
    env = envs.make("gymnax/Pendulum-v1", 3, max_steps_in_episode=5)
    assert env.action == envs.Continuous(1, (-2.0,), (2.0,))
    far, near = [], []
    for action, found in ((99.0, far), (2.0, near)):
        env.reset(0)
        found += [env.step(torch.full((3, 1), action)) for _ in range(5)]
    assert all(torch.equal(a.next_obs, b.next_obs) for a, b in zip(far, near, strict=True))
    assert far[-1].truncated.all() and not far[-1].terminated.any() and not far[-2].truncated.any()


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"'gymnax/CartPol': did you mean 'gymnax/CartPole-v1'\? There are: .*MinAtar"):
        envs.make("gymnax/CartPol", 1)
    with pytest.raises(ValueError, match=r"does not take speed: its parameters are .*gravity"):
        envs.make("gymnax/CartPole-v1", 1, speed=1)
    with pytest.raises(ValueError, match=r"There are: craftax/Craftax-Symbolic-v1"):
        envs.make("craftax/Craftax", 1)
    with pytest.raises(ValueError, match="other options"):
        small = counter(2)
        small.reset(0)
        envs.make("gymnax/CartPole-v1", 2).load_state_dict({**small.state_dict(), "name": "gymnax/CartPole-v1"})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="JAX does not see it"):
            counter(1, "cuda")
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ImportError, match=r"pip install 'sharpwave\[jax\]'"):
        envs.make("gymnax/CartPole-v1", 1)


def test_trained():
    agent = PPO(
        PPOConfig(env="gymnax/CartPole-v1", device="cpu", num_envs=8, horizon=16, minibatch=64, total_steps=256)
    )
    agent.train_epoch()
    agent.train_epoch()
    assert torch.isfinite(agent.segments.value).all()


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_copied_or_waited_for():
    env = envs.make("gymnax/Breakout-MinAtar", 64, "cuda")
    env.reset(0)
    action = torch.zeros(64, dtype=torch.int64, device="cuda")
    env.step(action)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step = env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.obs.is_cuda and step.obs.data_ptr() == env._obs.unsafe_buffer_pointer()


@pytest.mark.gpu
def test_trained_on_a_gpu():
    """JAX's threads do not disturb the capture of the policy's graphs, nor these JAX's arrays."""
    settings = dict(num_envs=64, horizon=16, minibatch=256, total_steps=1024 * 8, seed=3)
    weights = []
    for captured in (True, False):
        agent = PPO(PPOConfig(env="gymnax/CartPole-v1", device="cuda", **settings))
        (group,) = agent.groups
        for run in (group.run_act, group.run_next_value, agent._run_draw, agent._run_update, agent._run_last_update):
            run.enabled &= captured
        for _ in range(agent.num_epochs):
            agent.train_epoch()
        assert (group.run_act.graph is not None) is captured
        weights.append([p.detach().clone() for p in agent.policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
