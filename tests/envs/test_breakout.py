"""Breakout by hand, against a loop over its rules, and learnt from its pictures."""

import pytest
import torch

from sharpwave import envs
from sharpwave.envs.breakout import BALL, BRICK, PADDLE, TRAIL, Breakout

STAY, LEFT, RIGHT = 0, 1, 2


def table(*, ball, moves, paddle=4, bricks=(), met=0):
    """One environment in a given state; the ball came from where it is."""
    env = Breakout(1, sticky_action_prob=0)
    env.reset(0)
    (x, y), (dx, dy) = ball, moves
    env._game.copy_(torch.tensor([[x, y, dx, dy, paddle, x, y, met, 0, 0]]))
    env._bricks.zero_()
    for bx, by in bricks:
        env._bricks[0, 10 * by + bx] = True
    return env


def play(env, *actions):
    """The steps' (x, y, dx, dy), rewards and the last step."""
    ball, rewards, step = [], [], None
    for action in actions:
        step = env.step(torch.tensor([action]))
        ball.append(tuple(env._game[0, :4].tolist()))
        rewards.append(step.reward.item())
    return ball, rewards, step


class Rules:
    """One game, cell by cell, as the docstring tells it."""

    def __init__(self, from_left: bool):
        self.x, self.y, self.dx, self.dy = (0, 3, 1, 1) if from_left else (9, 3, -1, 1)
        self.before, self.paddle, self.met = (self.x, self.y), 4, False
        self.bricks = {(x, y) for x in range(10) for y in (1, 2, 3)}

    def picture(self):
        cells = torch.zeros(10, 10, 4, dtype=torch.bool)
        cells[9, self.paddle, PADDLE] = cells[self.y, self.x, BALL] = cells[self.before[1], self.before[0], TRAIL] = (
            True
        )
        for x, y in self.bricks:
            cells[y, x, BRICK] = True
        return cells

    def step(self, action):
        self.paddle = min(9, max(0, self.paddle + (0, -1, 1)[action]))
        old_x, old_y = self.before = self.x, self.y
        x, y, reward, over, met = self.x + self.dx, self.y + self.dy, 0.0, False, False
        if not 0 <= x <= 9:
            x, self.dx = old_x, -self.dx
        if y < 0:
            y, self.dy = 0, -self.dy
        elif (x, y) in self.bricks:
            met = True
            if not self.met:
                self.bricks.remove((x, y))
                reward, y, self.dy = 1.0, old_y, -self.dy
        elif y == 9:
            if not self.bricks:
                self.bricks = {(x, y) for x in range(10) for y in (1, 2, 3)}
            if old_x == self.paddle:
                y, self.dy = old_y, -self.dy
            elif x == self.paddle:
                y, self.dx, self.dy = old_y, -self.dx, -self.dy
            else:
                over = True
        self.x, self.y, self.met = x, y, met
        return reward, over


class TestByHand:
    def test_the_first_picture(self):
        obs = Breakout(64).reset(0).obs
        assert obs.shape == (64, 10, 10, 4) and obs.dtype == torch.bool
        assert (obs[:, 9, 4, PADDLE]).all() and obs[..., PADDLE].sum() == 64
        assert obs[..., BRICK].sum() == 64 * 30 and obs[:, 1:4, :, BRICK].all()
        assert torch.equal(obs[..., BALL], obs[..., TRAIL]) and obs[..., BALL].sum() == 64
        left, right = obs[:, 3, 0, BALL], obs[:, 3, 9, BALL]
        assert (left ^ right).all() and 16 < left.sum() < 48

    def test_the_ball_falls_past_the_paddle(self):
        ball, rewards, step = play(table(ball=(0, 3), moves=(1, 1)), *[STAY] * 6)
        assert [b[:2] for b in ball[:5]] == [(1, 4), (2, 5), (3, 6), (4, 7), (5, 8)]
        assert step.terminated.item() and not step.truncated.item() and not any(rewards)
        assert step.next_obs[0, 9, 6, BALL] and step.next_obs[0, 8, 5, TRAIL], "where it fell"
        assert step.obs[0, 3, :, BALL].any() and step.obs[0, 9, 4, PADDLE], "the next game"

    def test_above_the_paddle_it_turns_up(self):
        """At x = 5 above the paddle at 5: it still goes on to 6, at the same height."""
        ball, _, step = play(table(ball=(5, 8), moves=(1, 1), paddle=5), STAY, STAY)
        assert ball == [(6, 8, 1, -1), (7, 7, 1, -1)] and not step.terminated.item()

    def test_coming_down_on_the_paddle_it_goes_back(self):
        ball, _, _ = play(table(ball=(5, 8), moves=(1, 1), paddle=5), RIGHT, STAY)
        assert ball == [(6, 8, -1, -1), (5, 7, -1, -1)]

    def test_the_paddle_stops_at_the_walls(self):
        env = table(ball=(0, 3), moves=(1, 1), paddle=1)
        assert [int(play(env, a)[2].obs[0, 9, :, PADDLE].nonzero()) for a in (LEFT, LEFT)] == [0, 0]
        env = table(ball=(0, 3), moves=(1, 1), paddle=8)
        assert [int(play(env, a)[2].obs[0, 9, :, PADDLE].nonzero()) for a in (RIGHT, RIGHT)] == [9, 9]

    def test_walls_and_ceiling(self):
        ball, _, _ = play(table(ball=(9, 5), moves=(1, -1)), STAY, STAY)
        assert ball == [(9, 4, -1, -1), (8, 3, -1, -1)]
        ball, _, _ = play(table(ball=(4, 0), moves=(1, -1)), STAY, STAY)
        assert ball == [(5, 0, 1, 1), (6, 1, 1, 1)]
        ball, _, _ = play(table(ball=(0, 0), moves=(-1, -1)), STAY)
        assert ball == [(0, 0, 1, 1)]

    def test_a_brick_breaks_and_the_ball_turns_round(self):
        env = table(ball=(7, 4), moves=(1, -1), bricks=[(8, 3), (0, 1)])
        ball, rewards, step = play(env, STAY, STAY)
        assert ball == [(8, 4, 1, 1), (9, 5, 1, 1)] and rewards == [1.0, 0.0]
        assert not step.obs[0, 3, 8, BRICK] and step.obs[0, 1, 0, BRICK]

    def test_after_a_brick_the_ball_flies_through_the_next(self):
        """It breaks (6, 1), stands inside (6, 2), flies through (7, 3) and is out; the brick after that breaks."""
        env = table(ball=(5, 2), moves=(1, -1), bricks=[(6, 1), (6, 2), (7, 3)])
        ball, rewards, step = play(env, STAY, STAY, STAY)
        assert ball == [(6, 2, 1, 1), (7, 3, 1, 1), (8, 4, 1, 1)] and rewards == [1.0, 0.0, 0.0]
        assert step.obs[..., BRICK].sum() == 2
        env = table(ball=(5, 2), moves=(1, -1), bricks=[(6, 1)], met=1)
        assert play(env, STAY)[1] == [0.0] and env._bricks.sum() == 1

    def test_bricks_are_put_back_when_the_ball_is_down(self):
        env = table(ball=(5, 8), moves=(1, 1), paddle=5)
        _, _, step = play(env, STAY)
        assert step.obs[..., BRICK].sum() == 30 and step.obs[0, 1:4, :, BRICK].all()
        _, _, step = play(table(ball=(5, 7), moves=(1, 1), paddle=5), STAY)
        assert step.obs[..., BRICK].sum() == 0, "not before"


def test_every_step_is_the_rules_one(gen):
    """Games of two players, one that follows the ball and one that does not look."""
    n = 8
    env = Breakout(n, sticky_action_prob=0, max_episode_steps=200)
    obs = env.reset(0).obs
    games = [Rules(bool(obs[i, 3, 0, BALL])) for i in range(n)]
    age, ends, broken = [0] * n, [0, 0], 0
    for _ in range(450):
        action = torch.randint(0, 3, (n,), generator=gen)
        for i in range(n // 2):
            aim = games[i].x + games[i].dx * (games[i].y == 7)
            action[i] = (aim > games[i].paddle) * RIGHT + (aim < games[i].paddle) * LEFT
        step = env.step(action)
        for i, game in enumerate(games):
            reward, over = game.step(int(action[i]))
            age[i] += 1
            late = age[i] == 200
            assert torch.equal(step.next_obs[i], game.picture()) and step.reward[i] == reward
            assert (bool(step.terminated[i]), bool(step.truncated[i])) == (over, late)
            broken += reward
            if over or late:
                ends[late] += 1
                games[i], age[i] = Rules(bool(step.obs[i, 3, 0, BALL])), 0
            assert torch.equal(step.obs[i], games[i].picture())
    assert min(ends) > 5 and broken > 150


def test_actions_stick_as_often_as_asked():
    """The paddle goes left where the action of the step before, LEFT, was taken instead of RIGHT."""
    env = Breakout(4000, sticky_action_prob=0.25)
    env.reset(0)
    env.step(torch.full((4000,), LEFT))
    before = env._game[:, 4].clone()
    env.step(torch.full((4000,), RIGHT))
    stuck = (env._game[:, 4] <= before).double().mean().item()
    # The first LEFT itself stuck to staying in a quarter of the games: both then stay or go left.
    assert stuck == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 4000) ** 0.5)
    env.step(torch.full((4000,), RIGHT))


def test_no_limit_of_steps():
    env = envs.make("sharpwave/Breakout", 2, max_episode_steps=None)
    assert not env.may_truncate
    env.reset(0)
    assert not env.step(torch.zeros(2, dtype=torch.int64)).truncated.any()


@pytest.mark.parametrize("options", [{"sticky_action_prob": 1.5}, {"max_episode_steps": 0}])
def test_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        envs.make("sharpwave/Breakout", 2, **options)
