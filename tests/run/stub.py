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
    """After epoch e the walk is the sum of e seeded draws; "walk/last" is the mean of the latest."""

    def __init__(self, config: StubConfig):
        self.config = config
        self.device = torch.device(config.device)
        self.env = envs.make(config.env, 4, self.device, **config.env_kwargs)
        self.generator = seeding.generator("cpu", config.seed, 0, "walk")
        self.walk = torch.zeros(3)
        self.epoch = 0
        self.closed = False
        self.on_epoch = lambda epoch: None

    @property
    def num_epochs(self) -> int:
        return self.config.epochs

    @property
    def global_step(self) -> int:
        return 10 * self.epoch

    def train_epoch(self) -> None:
        self.walk = self.walk * 0.9 + self.config.rate * torch.randn(3, generator=self.generator)
        self.epoch += 1
        self.on_epoch(self.epoch)

    def metrics(self) -> dict[str, float]:
        return {
            "walk/mean": self.walk.mean().item(),
            "episode/return": float("nan") if self.epoch == 1 else float(self.epoch),
        }

    def faults(self) -> list[str]:
        return []

    def phases(self) -> dict[str, float]:
        return {"rollout": 0.25, "update": 0.75}

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "walk": self.walk,
            "generators": seeding.generator_states({"walk": self.generator}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["walk"].shape != self.walk.shape:
            raise ValueError(f"walk must have shape {tuple(self.walk.shape)}; got {tuple(state['walk'].shape)}")
        self.epoch = state["epoch"]
        self.walk = state["walk"].clone()
        seeding.restore_generators({"walk": self.generator}, state["generators"])

    def act(self, obs, state, reset, *, deterministic=False, mask=None):
        """Push against the pole's fall."""
        return (obs[:, 2] + obs[:, 3] > 0).long(), state

    def close(self) -> None:
        self.closed = True
        self.env.close()


def make(**settings) -> Stub:
    return Stub(StubConfig(**{"env": "sharpwave/CartPole", **settings}))


def fields(config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
