"""The adapter for Stable-Baselines3, against the real library."""

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'sharpwave[sb3]'")

import gymnasium
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sharpwave.replay.adapters.sb3 import PrioritizedDQN, PrioritizedReplayBuffer


def buffer(size=16, n_envs=2, **kwargs):
    return PrioritizedReplayBuffer(size, spaces.Box(-9, 9, (3,)), spaces.Discrete(4), "cpu", n_envs, **kwargs)


def add(b, value, done=(False, False), timeout=(False, False)):
    obs = np.full((2, 3), value, np.float32)
    infos = [{"TimeLimit.truncated": x} for x in timeout]
    b.add(obs, obs + 0.5, np.array([1, 2]), np.array([value, -value]), np.array(done), infos)


def test_batches_have_the_librarys_form():
    b = buffer()
    add(b, 1.0)
    add(b, 2.0)
    batch = b.sample(50)
    assert batch.observations.shape == (50, 3) and batch.observations.dtype == torch.float32
    assert batch.actions.shape == batch.rewards.shape == batch.dones.shape == (50, 1)
    torch.testing.assert_close(batch.next_observations, batch.observations + 0.5)
    assert set(batch.rewards[:, 0].tolist()) == {1.0, -1.0, 2.0, -2.0}
    assert b.size() == 4


@pytest.mark.parametrize("done, timeout, terminal", [(False, False, 0), (True, False, 1), (True, True, 0)])
def test_a_time_limit_is_bootstrapped_from(done, timeout, terminal):
    b = buffer()
    add(b, 1.0, (done, done), (timeout, timeout))
    assert (b.sample(20).dones == terminal).all()
    b = buffer(handle_timeout_termination=False)
    add(b, 1.0, (done, done), (timeout, timeout))
    assert (b.sample(20).dones == done).all()


def test_priorities_decide_and_weights_follow():
    b = buffer(alpha=1.0, beta=1.0)
    add(b, 1.0)
    b.sample(64)
    td = torch.where(b.last_batch.reward > 0, 3.0, 1.0)
    b.update_priorities(td[:, None])
    b.sample(4000)
    positive = b.last_batch.reward > 0
    assert abs(positive.float().mean() - 0.75) < 0.03
    torch.testing.assert_close(b.weights[positive], torch.full_like(b.weights[positive], 1 / 3), rtol=1e-4, atol=0)


def test_n_step_returns_stop_where_episodes_do():
    """Rewards 1, 2, 4 and gamma 1/2: 1 + 1 + 1 = 3 over three steps; 2 + 2 = 4 where the third ended the episode. A new
    episode that begins without an end, as `learn` begins one, counts as a truncation."""
    b = buffer(32, n_steps=3, gamma=0.5)

    def step(obs, reward, done=False, timeout=False):
        x = np.full((2, 3), obs, np.float32)
        infos = [{"TimeLimit.truncated": timeout}] * 2
        b.add(x, x + 1, np.array([1, 2]), np.full(2, reward), np.array([done, done]), infos)

    for obs, reward in ((0, 1), (1, 2), (2, 4)):
        step(obs, reward, done=obs == 2)
    step(50, 8)
    step(51, 16)
    step(90, 32)  # without an end at 52
    step(91, 64)
    batch = b.sample(500)
    seen = {}
    fields = (batch.observations[:, 0], batch.rewards[:, 0], batch.next_observations[:, 0], batch.dones[:, 0])
    for obs, reward, following, done, discount in zip(*fields, b.last_batch.discount, strict=True):
        seen[obs.item()] = (reward.item(), following.item(), done.item(), discount.item())
    assert seen == {
        0.0: (3.0, 3.0, 1.0, 0.0),
        1.0: (4.0, 3.0, 1.0, 0.0),
        2.0: (4.0, 3.0, 1.0, 0.0),
        50.0: (16.0, 52.0, 0.0, 0.25),
        51.0: (16.0, 52.0, 0.0, 0.5),
    }
    if batch.discounts is not None:  # the library's place for it, since 2.7
        torch.testing.assert_close((1 - batch.dones[:, 0]) * batch.discounts[:, 0], b.last_batch.discount)


def test_dqn_takes_n_steps(tmp_path):
    model = PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", n_steps=3, gamma=0.9, buffer_size=400, learning_starts=20, seed=0
    )
    model.learn(60)
    model.learn(60)
    replay = model.replay_buffer.replay
    assert (replay.n_step, replay.gamma) == (3, 0.9)
    assert set(model.replay_buffer.sample(200) and model.replay_buffer.last_batch.discount.tolist()) <= {
        torch.tensor(x, dtype=torch.float32).item() for x in (0.0, 0.9, np.float32(0.9) ** 2, np.float32(0.9) ** 3)
    }
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    other = PrioritizedDQN.load(tmp_path / "model", env=gymnasium.make("CartPole-v1"))
    other.load_replay_buffer(tmp_path / "buffer")
    assert torch.equal(model.replay_buffer.sample(64).observations, other.replay_buffer.sample(64).observations)
    other.learn(30)


def test_dictionaries_and_normalisation():
    class Env(gymnasium.Env):
        observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(0, 255, (3, 3), np.uint8)})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 1.0, False, False, {}

    env = VecNormalize(DummyVecEnv([Env, Env]), norm_obs_keys=["a"])
    model = PrioritizedDQN("MultiInputPolicy", env, buffer_size=100, learning_starts=10, seed=0)
    model.learn(60)
    sample = model.replay_buffer.sample(5, env=env)
    assert sample.observations["b"].dtype == torch.uint8 and sample.observations["a"].shape == (5, 2)


def test_saving_keeps_draws(tmp_path):
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", buffer_size=500, learning_starts=50, seed=0)
    model.learn(120)
    model.save_replay_buffer(tmp_path / "buffer")
    other = PrioritizedDQN("MlpPolicy", "CartPole-v1", buffer_size=500)
    other.load_replay_buffer(tmp_path / "buffer")
    for _ in range(3):
        assert torch.equal(model.replay_buffer.sample(64).observations, other.replay_buffer.sample(64).observations)
    assert other.replay_buffer.size() == model.replay_buffer.size()


def test_what_is_not_supported_says_so():
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        buffer(optimize_memory_usage=True)
    with pytest.raises(ValueError, match="sample"):
        buffer().update_priorities(torch.zeros(3))


@pytest.mark.long
def test_learns_cartpole_through_the_librarys_own_learn():
    env = make_vec_env("CartPole-v1", n_envs=4, seed=0)
    model = PrioritizedDQN(
        "MlpPolicy",
        env,
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=50_000,
        learning_starts=1000,
        target_update_interval=10,
        train_freq=64,
        gradient_steps=64,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs=dict(net_arch=[64, 64]),
        replay_buffer_kwargs=dict(alpha=0.6, beta=(0.4, 1.0, 1_000_000)),
        seed=0,
    )
    model.learn(16_000)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    assert np.mean(returns[-20:]) > 100, returns[-20:]
    stats = model.replay_buffer.replay.stats()
    assert stats["bad_td_errors"] == 0 and stats["drawn"] > 50_000
