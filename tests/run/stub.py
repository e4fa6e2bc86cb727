"""A trainer of a few lines, to test what surrounds one: a random walk that depends on every step before."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sharpwave import envs
from sharpwave.run import seeding
from sharpwave.run.config import RunConfig


@dataclass(frozen=True)
class StubConfig(RunConfig):
    """A random walk."""

    env: str
    """Environment."""
    seed: int = 0
    """Seed."""
    device: str = "cpu"
    """Device."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the environment."""
    epochs: int = 6
    """Epochs of the run (epochs, >= 1)."""
    rate: float = 0.5
    """Size of a step."""
    note: str | None = None
    """Anything."""
    sizes: tuple[int, ...] = (4, 4)
    """Sizes."""

    def validate(self) -> None:
        super().validate()
        if self.epochs < 1:
            raise ValueError(f"epochs must be >= 1; got {self.epochs}")


class Stub:
    """Each epoch moves the walk by a seeded draw; "walk/mean" is over the epochs since the last call of `metrics`."""

    def __init__(self, config: StubConfig):
        self.config = config
        self.device = torch.device(config.device)
        self.env = envs.make(config.env, 4, self.device, **config.env_kwargs)
        self.generator = seeding.generator("cpu", config.seed, 0, "walk")
        self.policy = torch.nn.Linear(3, 1, bias=False)
        self.walk = self.policy.weight.detach()[0].zero_()
        self.epoch = 0
        self.since: list[float] = []
        self.closed = False
        self.on_epoch = lambda epoch: None

    @property
    def num_epochs(self) -> int:
        return self.config.epochs

    @property
    def global_step(self) -> int:
        return 10 * self.epoch

    def train_epoch(self) -> None:
        self.walk.mul_(0.9).add_(torch.randn(3, generator=self.generator), alpha=self.config.rate)
        self.epoch += 1
        self.since.append(self.walk.mean().item())
        self.on_epoch(self.epoch)

    def metrics(self) -> dict[str, float]:
        mean, self.since = sum(self.since) / len(self.since), []
        return {
            "walk/mean": mean,
            "episode/return": float("nan") if self.epoch == 1 else float(self.epoch),
        }

    def faults(self) -> list[str]:
        return []

    def phases(self) -> dict[str, float]:
        return {"rollout": 0.25, "update": 0.75}

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "policy": self.policy.state_dict(),
            "generators": seeding.generator_states({"walk": self.generator}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.epoch = state["epoch"]
        seeding.restore_generators({"walk": self.generator}, state["generators"])

    def act(self, obs, state, reset, *, deterministic=False, mask=None):
        """Push to the side the pole falls to: most episodes reach CartPole's limit of 500."""
        return (obs[:, 2] + obs[:, 3] > 0).long(), state

    def close(self) -> None:
        self.closed = True
        self.env.close()


def make(**settings) -> Stub:
    return Stub(StubConfig(**{"env": "sharpwave/CartPole", **settings}))


def fields(config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
