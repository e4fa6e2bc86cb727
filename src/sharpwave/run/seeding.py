"""One seed, many independent streams: a stream for every rank and purpose."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def stream_seed(seed: int, rank: int, purpose: str) -> int:
    """The seed of one stream, an integer in [0, 2^63).

        blake2b(f"{seed}/{rank}/{purpose}", digest_size=8, person=b"sharpwave") as a big-endian integer, >> 1

    Equal on every machine, Python and version. Two different triples share a seed with probability 2^-63, and
    neighbouring seeds give unrelated streams, which seed + rank would not.

    Args:
        seed: the run's seed, any integer.
        rank: the process in a distributed run, >= 0; 0 otherwise.
        purpose: what the stream is for, e.g. "actions", "segments", "env". No "/" is needed and none is forbidden:
            seed and rank are numbers, so the first two slashes separate.

    Raises:
        TypeError: `seed` or `rank` is not an integer.
        ValueError: `rank` is negative.
    """
    for name, value in {"seed": seed, "rank": rank}.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int; got {value!r}")
    if rank < 0:
        raise ValueError(f"rank must be >= 0; got {rank}")
    digest = hashlib.blake2b(f"{seed}/{rank}/{purpose}".encode(), digest_size=8, person=b"sharpwave").digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device | str, seed: int, rank: int, purpose: str) -> torch.Generator:
    """A new generator on `device`, at the start of the stream of (seed, rank, purpose)."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, rank, purpose))


def generator_states(generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """The state of each generator, a uint8 CPU tensor, for a checkpoint."""
    return {name: g.get_state() for name, g in generators.items()}


def restore_generators(generators: Mapping[str, torch.Generator], states: Mapping[str, Tensor]) -> None:
    """Put the states of `generator_states` back, in place.

    A state belongs to one kind of device: one saved from a CUDA generator cannot continue on a CPU.

    Raises:
        ValueError: the names differ, or a state is of another kind of device.
    """
    if generators.keys() != states.keys():
        raise ValueError(
            f"states must be of the generators {sorted(generators)}; got {sorted(states)}: "
            "the checkpoint is of another version or configuration"
        )
    for name, g in generators.items():
        state = states[name].detach().to("cpu", torch.uint8)
        expected = g.get_state().numel()
        if state.numel() != expected:
            raise ValueError(
                f"the state of generator {name!r} has {state.numel()} bytes, a {g.device.type} generator's has "
                f"{expected}: resume on the kind of device that wrote the checkpoint"
            )
        g.set_state(state)
