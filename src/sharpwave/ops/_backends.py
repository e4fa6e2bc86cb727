"""The one rule that says which implementation of an op runs.

An op is a folder `ops/NAME/` with up to three modules of equal interface: `reference.py` (plain PyTorch, any device),
`cpu.py` (Numba) and `triton.py` (Triton). `load` picks one by the tensor's device, or the one the caller asked for.
"""

import functools
import importlib
import importlib.util
import operator
import os
from types import ModuleType
from typing import Any, Literal, get_args

import torch

Backend = Literal["auto", "reference", "cpu", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def triton_interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors, by its interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def present(device: torch.device | str) -> torch.device:
    """The device, the current GPU for "cuda". Raises RuntimeError where PyTorch has no GPU."""
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device={str(device)!r}, but PyTorch sees no GPU here: use device='cpu'")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def require_tensors(**values: object) -> None:
    """TypeError for the first that is no tensor, by its name."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor; got {type(value).__name__}: pass torch.as_tensor(..., dtype=..., "
                "device=...) as documented"
            )


def integer(name: str, number: Any, least: int) -> int:
    """`number` as an int, NumPy's integers too; ValueError, by its name, unless it is one and at least `least`."""
    if type(number) is not int and not isinstance(number, torch.SymInt):
        try:
            if isinstance(number, bool):
                raise TypeError
            number = operator.index(number)
        except TypeError:
            raise ValueError(f"{name} must be an integer >= {least}; got {number!r}") from None
    if number < least:
        raise ValueError(f"{name} must be an integer >= {least}; got {number!r}")
    return number


def require_apart(out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """ValueError where `out` shares memory with an input, unless it is that very tensor: results would mix with it.

    By the span from each one's first element to its last: views that interleave count as sharing.
    """
    if torch.compiler.is_compiling():
        return
    begin, end = _span(out)
    for name, given in inputs.items():
        if given is None or given.device != out.device:
            continue
        first, last = _span(given)
        if first < end and begin < last and not (first == begin and given.stride() == out.stride()):
            raise ValueError(f"out shares memory with {name}: give it memory of its own, torch.empty_like({name})")


def _span(x: torch.Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    if x.numel() == 0:
        return begin, begin
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.element_size()


@functools.cache
def choose(op: str, device_type: str, backend: str = "auto") -> str:
    """Name of the backend that serves `op` on a device type.

    "auto" takes `cpu` for CPU tensors and `triton` for CUDA tensors where the op has that module (and Triton is
    installed), else `reference`. Any other name is taken as it is.

    Raises:
        ValueError: `backend` is not one of BACKENDS.
        RuntimeError: the backend named cannot serve this device, or the op does not have it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "reference":
        return backend
    if backend == "auto":
        fast = {"cpu": "cpu", "cuda": "triton"}.get(device_type)
        usable = fast is not None and _has(op, fast) and (fast != "triton" or installed("triton"))
        return fast if usable and fast is not None else "reference"
    if not _has(op, backend):
        raise RuntimeError(f"{op} has no {backend} backend; use backend='auto' or 'reference'")
    if backend == "cpu" and device_type != "cpu":
        raise RuntimeError(f"backend='cpu' serves CPU tensors; {op} got tensors on {device_type}: use backend='auto'")
    if backend == "triton":
        if not installed("triton"):
            raise RuntimeError("backend='triton' needs Triton: pip install 'sharpwave[triton]'")
        if device_type != "cuda" and not (device_type == "cpu" and triton_interpreted()):
            raise RuntimeError(
                f"backend='triton' serves CUDA tensors; {op} got tensors on {device_type}: use backend='auto' "
                "(for tests, TRITON_INTERPRET=1 runs the kernels on a CPU)"
            )
    return backend


def load(op: str, device: torch.device, backend: str = "auto") -> ModuleType:
    """The module of `ops/<op>/` that serves tensors on `device`. Rules and errors: `choose`."""
    return _module(op, choose(op, device.type, backend))


@functools.cache
def _module(op: str, backend: str) -> ModuleType:
    return importlib.import_module(f"sharpwave.ops.{op}.{backend}")


def _has(op: str, backend: str) -> bool:
    return importlib.util.find_spec(f"sharpwave.ops.{op}.{backend}") is not None


@functools.cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
