"""MinAtar's Breakout as tensors: a game on a 10 x 10 grid, for networks that look at pictures."""

import torch
from torch import Tensor

from sharpwave.envs.base import Discrete, Observation, Reset, Step
from sharpwave.envs.tensor import TensorEnv

SIZE = 10
PADDLE, BALL, TRAIL, BRICK = range(4)  # channels


class Breakout(TensorEnv):
    """Keep a ball in the air with a paddle and break three rows of bricks: the rules of MinAtar's Breakout.

    The grid is 10 x 10, x to the right and y down. The paddle is a cell of the lowest row, and begins at x = 4. Rows
    1 to 3 are bricks. The ball moves one cell along a diagonal each step. It begins at y = 3 moving down, at x = 0 to
    the right or at x = 9 to the left, as likely either way. In one step, in this order:

        1. the paddle moves: action 0 stays, 1 goes left, 2 goes right, up to the walls;
        2. the ball would go to (x + dx, y + dy); where x would leave the grid it stays, and dx turns round;
        3. where y would leave it at the top it stays, and dy turns round;
           else where a brick is there, and the ball did not meet one in the step before: the brick is gone, the reward
           is 1, y stays and dy turns round. If it did meet one, the ball flies on through;
           else where it comes to the lowest row: if no brick is left, all are put back; if the ball was above the
           paddle before its move, y stays and dy turns round; else if it comes down on the paddle, y stays and both
           turn round; else the episode is over (`terminated`).

    Args:
        num_envs: N.
        device: any.
        sticky_action_prob: in [0, 1], with which the action of the step before is taken instead (at first: stay). 0.1
            is MinAtar's.
        max_episode_steps: `truncated` after so many; at least 1. None, as MinAtar has it, plays on for ever if it can.

    Observation: (10, 10, 4) bool, [y, x, channel]: paddle, ball, where the ball was a step ago, bricks.
    Action: Discrete((3,)). Deterministic for a seed, device and N: each step draws N numbers for starts and, where
    actions stick, N for that.
    Source: Young and Tian 2019, MinAtar (arXiv 1903.03176), with its minimal action set.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        sticky_action_prob: float = 0.1,
        max_episode_steps: int | None = 1000,
    ):
        if not 0 <= sticky_action_prob <= 1:
            raise ValueError(f"sticky_action_prob must be in [0, 1]; got {sticky_action_prob}")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, or None; got {max_episode_steps}")
        observation = Observation((SIZE, SIZE, 4), torch.bool)
        super().__init__("sharpwave/Breakout", num_envs, device, observation, Discrete((3,)))
        self.sticky_action_prob = sticky_action_prob
        self.max_episode_steps = max_episode_steps
        self.may_truncate = max_episode_steps is not None

        #                     x  y  dx dy paddle, x and y a step ago, brick met, last action, steps
        left = torch.tensor([[0, 3, 1, 1, 4, 0, 3, 0, 0, 0]])
        right = torch.tensor([[9, 3, -1, 1, 4, 9, 3, 0, 0, 0]])
        self._left, self._right = left.to(self.device), right.to(self.device)
        self._game = self._keep("game", torch.zeros(num_envs, 10, dtype=torch.int64))
        self._bricks = self._keep("bricks", torch.zeros(num_envs, SIZE * SIZE, dtype=torch.bool))
        self._wall = torch.zeros(1, SIZE, SIZE, dtype=torch.bool, device=self.device)
        self._wall[:, 1:4] = True
        self._wall = self._wall.flatten(1)
        self._drawn = torch.zeros(num_envs, device=self.device)
        self._moves = torch.tensor([0, -1, 1], device=self.device)
        self._channel = torch.tensor([PADDLE, BALL, TRAIL], device=self.device)

    def _first(self) -> Tensor:
        self._drawn.uniform_(generator=self.generator)
        return torch.where((self._drawn < 0.5).unsqueeze(1), self._left, self._right)

    def _begin(self) -> None:
        self._game.copy_(self._first())
        self._bricks.copy_(self._wall)

    def _observe(self) -> Reset:
        return Reset(self._obs())

    def _obs(self) -> Tensor:
        x, y, _, _, paddle, last_x, last_y, _, _, _ = self._game.unbind(1)
        cell = torch.stack([(SIZE - 1) * SIZE + paddle, y * SIZE + x, last_y * SIZE + last_x], 1)
        obs = torch.zeros(self.num_envs, SIZE * SIZE, 4, dtype=torch.bool, device=self.device)
        obs[..., BRICK] = self._bricks
        obs.flatten(1).scatter_(1, cell * 4 + self._channel, True)
        return obs.view(-1, SIZE, SIZE, 4)

    def _step(self, action: Tensor) -> Step:
        last_x, last_y, dx, dy, paddle, _, _, met, last_action, steps = self._game.unbind(1)
        if self.sticky_action_prob:
            self._drawn.uniform_(generator=self.generator)
            action = torch.where(self._drawn < self.sticky_action_prob, last_action, action)
        paddle = (paddle + self._moves.index_select(0, action)).clamp(0, SIZE - 1)

        aim_x, aim_y = last_x + dx, last_y + dy
        x, y = aim_x.clamp(0, SIZE - 1), aim_y.clamp(min=0)
        dx = torch.where(aim_x == x, dx, -dx)

        cell = (y * SIZE + x).unsqueeze(1)
        brick = self._bricks.gather(1, cell).squeeze(1)
        broken = brick & (met == 0)
        self._bricks.scatter_(1, cell, (brick & ~broken).unsqueeze(1))

        down = y == SIZE - 1
        refill = down & ~self._bricks.any(1)
        on_top = down & (last_x == paddle)
        on_corner = down & ~on_top & (x == paddle)
        terminated = down & ~on_top & ~on_corner
        bounced = broken | on_top | on_corner
        dy = torch.where(bounced | (aim_y < 0), -dy, dy)
        dx = torch.where(on_corner, -dx, dx)
        y = torch.where(bounced, last_y, y)
        steps = steps + 1
        truncated = torch.zeros_like(down) if self.max_episode_steps is None else steps >= self.max_episode_steps

        self._game.copy_(torch.stack([x, y, dx, dy, paddle, last_x, last_y, brick, action, steps], 1))
        self._bricks.logical_or_(refill.unsqueeze(1) & self._wall)
        next_obs = self._obs()

        ended = (terminated | truncated).unsqueeze(1)
        torch.where(ended, self._first(), self._game, out=self._game)
        torch.where(ended, self._wall, self._bricks, out=self._bricks)
        return Step(self._obs(), broken.to(torch.float32), terminated, truncated, next_obs)
