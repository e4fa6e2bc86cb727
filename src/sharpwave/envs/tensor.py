"""What native environments share: their randomness, and keeping and restoring their tensors."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sharpwave.envs.base import Continuous, Discrete, Observation, Reset, VectorEnv


class TensorEnv(VectorEnv):
    """An environment made of tensor operations alone, on any device, that may be captured in a CUDA graph.

    A subclass keeps its whole state in tensors given to `_keep`, updates them in place, draws from `generator` only,
    and neither reads a value back nor branches on one: episodes end and begin by `torch.where`.

    Attributes:
        generator: the source of all randomness, on `device`. Before capturing `step` in a `torch.cuda.CUDAGraph`,
            register it: `graph.register_generator_state(env.generator)`.
    """

    inexact_because = None
    capturable = True

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str,
        observation: Observation,
        action: Discrete | Continuous,
    ):
        super().__init__(name, num_envs, device, observation, action)
        self.generator = torch.Generator(self.device)
        self.generators = (self.generator,)
        self._kept: dict[str, Tensor] = {}

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        """Make `tensor` part of what `state_dict` saves, and return it on the environment's device."""
        self._kept[name] = tensor = tensor.to(self.device)
        return tensor

    @abstractmethod
    def _begin(self) -> None:
        """Write the first state of N new episodes into the kept tensors."""

    @abstractmethod
    def _observe(self) -> Reset:
        """A fresh observation (and mask) of the kept tensors."""

    def _reset(self, seed: int) -> Reset:
        self.generator.manual_seed(seed)
        self._begin()
        return self._observe()

    def _state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), **{name: t.clone() for name, t in self._kept.items()}}

    def _load(self, state: Mapping[str, Any]) -> Reset:
        for name, tensor in self._kept.items():
            saved = state.get(name)
            if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                found = "nothing" if saved is None else f"{saved.dtype} of shape {tuple(saved.shape)}"
                raise ValueError(
                    f"{self.name}: the state must hold {name!r}, {tensor.dtype} of shape {tuple(tensor.shape)}; it "
                    f"holds {found}: make the environment with the options it was saved with"
                )
        generator = state["generator"]
        if generator.shape != self.generator.get_state().shape:
            raise ValueError(
                f"{self.name}: the state was saved on another kind of device than {self.device}, whose random streams "
                "differ: load it on the kind of device it was saved on"
            )
        # In place, so that a captured graph reads what was loaded.
        for name, tensor in self._kept.items():
            tensor.copy_(state[name])
        self.generator.set_state(generator.cpu())
        return self._observe()._replace(continued=True)
