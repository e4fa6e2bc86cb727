"""Atari: transitions against the emulator stepped by hand, lost lives, and names."""

import sys

import gymnasium
import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.algos.ppo import PPO, PPOConfig

pytest.importorskip("ale_py")
PLAIN = dict(noop_max=0, use_fire_reset=False, repeat_action_probability=0.0)


class Emulator:
    """One game, one action at a time: four frames, the maximum of the last two in grey, scaled; four such in a row."""

    def __init__(self, rom: str, limit: int):
        from ale_py import ALEInterface, LoggerMode, roms

        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.ale, self.limit = ALEInterface(), limit
        self.ale.setInt("random_seed", 0)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(rom))
        self.actions = self.ale.getMinimalActionSet()
        self.reset()

    def reset(self):
        self.ale.reset_game()
        self.stack = [self.scaled(self.ale.getScreenGrayscale())]

    def step(self, action: int):
        frames, reward = [], 0
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            frames.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        self.stack = [*self.stack[-3:], self.scaled(np.maximum(*frames[-2:])) if len(frames) > 1 else None]
        over = self.ale.game_over()
        return reward, over, not over and self.ale.getEpisodeFrameNumber() >= self.limit

    @staticmethod
    def scaled(screen):
        return SHARES[0] @ screen @ SHARES[1].T


def shares(n: int) -> np.ndarray:
    """(84, n): how much of each of n pixels goes into each of 84, by their overlap, as OpenCV's INTER_AREA does it."""
    edges = np.arange(85) * n / 84
    low, high = edges[:-1, None], edges[1:, None]
    return np.clip(np.minimum(high, np.arange(n) + 1) - np.maximum(low, np.arange(n)), 0, 1) * 84 / n


SHARES = shares(210), shares(160)


@pytest.mark.long
@pytest.mark.parametrize("lives", [False, True], ids=["game over", "lost lives"])
def test_every_transition_is_the_emulators(lives):
    """Three games at once over ends of each kind; the last frame of each observation may differ by its rounding."""
    limit = 600
    env = envs.make(
        "ALE/Breakout-v5", 3, terminal_on_life_loss=lives, max_num_frames_per_episode=limit, num_threads=1, **PLAIN
    )
    assert env.observation == envs.Observation((4, 84, 84), torch.uint8) and env.action == envs.Discrete((4,))
    games = [Emulator("breakout", limit) for _ in range(3)]
    env.reset(0)
    rng, ends, scored = np.random.default_rng(0), {"over": 0, "late": 0, "life": 0}, 0.0
    for t in range(165):
        action = rng.integers(0, 4, 3)
        action[2] = t % 30 == 0  # Hardly ever serves, so that the limit comes first.
        before = [game.ale.lives() for game in games]
        step = env.step(torch.from_numpy(action))
        for i, game in enumerate(games):
            reward, over, late = game.step(int(action[i]))
            life = lives and game.ale.lives() < before[i] and not over
            assert (bool(step.terminated[i]), bool(step.truncated[i])) == (over or life, late), (t, i)
            assert step.reward[i] == reward
            scored += reward
            # A game's last picture is not made of its last two frames: test_adapters compares it with ale-py's own.
            if len(game.stack) == 4 and not (over or late):
                np.testing.assert_allclose(step.next_obs[i].numpy(), np.stack(game.stack), atol=1.01)
            if over or late:
                ends["over" if over else "late"] += 1
                game.reset()
                np.testing.assert_allclose(step.obs[i, 3].numpy(), game.stack[0], atol=1.01)
            else:
                ends["life"] += life
                assert torch.equal(step.obs[i], step.next_obs[i])
    assert ends["over"] and ends["late"] and (ends["life"] > 5) == lives and scored > 0
    env.close()


def test_seeds_and_preprocessing():
    options = dict(num_envs=2, num_threads=1)
    a, b = (envs.make("ALE/Pong-v5", **options) for _ in range(2))
    first = a.reset(1).obs
    assert torch.equal(first, b.reset(1).obs)
    for action in torch.randint(0, 6, (30, 2), generator=torch.Generator().manual_seed(0)):
        x, y = a.step(action), b.step(action)
        assert torch.equal(x.obs, y.obs) and torch.equal(x.reward, y.reward)
    assert not torch.equal(x.obs[0], x.obs[1]), "each game has a seed of its own"
    assert a.inexact_because and not a.load_state_dict(a.state_dict()).continued
    small = envs.make("ALE/Pong-v5", **options, stack_num=2, img_height=42, img_width=40)
    assert small.observation.shape == (2, 42, 40)


def test_other_vector_environments_are_left_alone():
    """ale-py writes its autoreset mode where every class without metadata of its own would read it as its own."""
    before = dict(gymnasium.vector.VectorEnv.metadata)
    envs.make("ALE/Pong-v5", 1, num_threads=1).close()
    assert gymnasium.vector.VectorEnv.metadata == before and "autoreset_mode" not in before


def test_trained_on_pictures():
    agent = PPO(
        PPOConfig(
            env="ALE/Pong-v5",
            device="cpu",
            encoder="cnn",
            num_envs=2,
            horizon=4,
            minibatch=4,
            hidden=16,
            total_steps=16,
            reward_clip=1.0,
            env_kwargs={"num_threads": 1},
        )
    )
    agent.train_epoch()
    assert agent.segments.obs.dtype == torch.uint8 and torch.isfinite(agent.segments.value).all()


def test_an_unknown_game_is_answered_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"'ALE/Pnog-v5': did you mean 'ALE/Pong-v5'\? .*ALE/Adventure-v5, .*Zaxxon-v5"
    ):
        envs.make("ALE/Pnog-v5", 1)
    with pytest.raises(ValueError, match=r"does not take these options.*'speed'"):
        envs.make("ALE/Pong-v5", 1, speed=2)


def test_without_ale_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ImportError, match=r"pip install 'sharpwave\[atari\]'"):
        envs.make("ALE/Pong-v5", 1)
