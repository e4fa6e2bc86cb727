"""The parity harness: every kernel of an op against its serial reference, on the machine at hand.

An op takes part by a module `ops/NAME/parity.py` with

    def cases(device: str) -> Iterator[Outcome]

that runs its kernels on that device, over shapes and dtypes, and yields what it found; `backends_on` says which kernels
the device has.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sharpwave import ops
from sharpwave.ops import _backends


@dataclass(frozen=True)
class Outcome:
    """What one case showed."""

    case: str
    """Backend, shape, dtype and data, in a few words."""
    error: float
    """Largest relative error against the reference."""
    limit: float
    """Largest error allowed; 0 asks for equality."""
    repeats: bool
    """Whether repeated runs gave the same bits."""
    monotone: bool | None = None
    """For prefix sums: whether they never fall, and stay where the weight is 0."""

    @property
    def passed(self) -> bool:
        # A NaN error is not within any limit.
        return self.error <= self.limit and self.repeats and self.monotone is not False


def main(op: str, device: str | None = None) -> int:
    """Run an op's cases, print one line each, and return the number of the process's exit: 0 if all passed.

    Args:
        op: the name of a folder of `sharpwave.ops` that has a `parity.py`.
        device: "cpu" or "cuda" (with a number, if wanted); by default the GPU if there is one.

    Raises:
        ValueError: the op has no parity cases, or the device is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} needs a CUDA GPU, and PyTorch sees none: use device='cpu'")
    outcomes = list(_print_all(cases(op)(device)))
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"{op} on {describe(device)}: {len(outcomes) - failed} of {len(outcomes)} cases passed")
    return 1 if failed or not outcomes else 0


def cases(op: str) -> Callable[[str], Iterator[Outcome]]:
    """The op's generator of outcomes."""
    known = ops_with_cases()
    if op not in known:
        raise ValueError(
            f"op must have parity cases, a module sharpwave/ops/OP/parity.py; {op!r} has none, these have: "
            f"{', '.join(known)}"
        )
    return importlib.import_module(f"sharpwave.ops.{op}.parity").cases


def ops_with_cases() -> list[str]:
    """The names that `cases` takes."""
    return sorted(path.parent.name for path in Path(ops.__path__[0]).glob("*/parity.py"))


def backends_on(op: str, device: str) -> list[_backends.Backend]:
    """The fast backends of an op that run on a device; on a CPU, Triton's too under its interpreter."""
    kind = torch.device(device).type
    names: list[_backends.Backend] = []
    fast: tuple[_backends.Backend, ...] = ("cpu", "triton")
    for backend in fast:
        try:
            _backends.load(op, torch.device(kind), backend)
        except (RuntimeError, ImportError):
            continue
        names.append(backend)
    return names


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / |want|, in float64; infinite where got is not 0 and want is, NaN if got has one."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = (got - want).abs() / want.abs()
    return torch.where(got == want, 0, error).amax().item()


def describe(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU" + (" (Triton interpreted)" if _backends.triton_interpreted() else "")


def _print_all(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    for outcome in outcomes:
        monotone = {None: "", True: "  monotone", False: "  NOT MONOTONE"}[outcome.monotone]
        repeats = "same bits" if outcome.repeats else "BITS DIFFER"
        verdict = "ok  " if outcome.passed else "FAIL"
        bound = f"{outcome.error:.1e} (limit {outcome.limit:.0e})"
        print(f"{verdict}  {outcome.case:<58} error {bound}  {repeats}{monotone}", flush=True)
        yield outcome
