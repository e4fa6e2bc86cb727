"""The DQN trainer: what it stores, learns and resumes, and what it does with numbers that are not finite."""

import hashlib

import torch
from torch import Tensor

from sharpwave.algos.dqn import DQN, DQNConfig
from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv
from sharpwave.run.checkpoint import flatten

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
