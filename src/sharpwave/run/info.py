"""What this installation is made of, for bug reports and for `sharpwave info`."""

import os
import pkgutil
import platform

import torch

from sharpwave import ops
from sharpwave.ops import _backends
from sharpwave.run.errors import UserError
from sharpwave.run.rundir import versions


def op_names() -> list[str]:
    """Every op: the folders of sharpwave/ops."""
    return sorted(module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg)


def backends(device_type: str) -> dict[str, str]:
    """The backend that "auto" takes for each op on a device type."""
    return {op: _backends.choose(op, device_type) for op in op_names()}


def slow_backends(device_type: str) -> list[str]:
    """A line for a person where a GPU runs ops without their kernels; none where all is as it should be."""
    if device_type != "cuda":
        return []
    slow = [op for op, name in backends(device_type).items() if name != "triton"]
    if not slow:
        return []
    return [f"backends: {', '.join(slow)} run in plain PyTorch, for Triton is missing: pip install 'sharpwave[triton]'"]


def devices() -> dict[str, str]:
    """The devices that PyTorch can use here, by name, and what each is."""
    found = {
        "cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    }
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            found[f"cuda:{i}"] = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}"
    if torch.backends.mps.is_available():
        found["mps"] = platform.processor()
    if torch.xpu.is_available():
        found["xpu"] = torch.xpu.get_device_name()
    return found


def check_device(name: str) -> None:
    """UserError unless `name` is "auto" or a device that tensors can be made on here."""
    if name == "auto":
        return
    try:
        torch.Generator(device=torch.empty(0, device=name).device)
    except (RuntimeError, AssertionError, ImportError) as error:
        known = ", ".join(["auto", *devices()])
        raise UserError(f"--device {name} cannot be used here; these can: {known} (see sharpwave info)") from error


def text() -> str:
    """The report, in lines of text."""
    lines = ["versions"]
    lines += [f"  {name:12} {version or 'not installed'}" for name, version in versions().items()]
    lines += [f"  {'python':12} {platform.python_version()}", f"  {'system':12} {platform.platform()}"]
    lines += [f"  {'CUDA':12} {torch.version.cuda or 'this PyTorch is built without'}", "", "devices"]
    found = devices()
    lines += [f"  {name:12} {what}" for name, what in found.items()]
    types = list(dict.fromkeys(name.split(":")[0] for name in found))
    lines += ["", f"{'backends':14} " + "  ".join(f"{t:9}" for t in types)]
    for op in op_names():
        lines.append(f"  {op:12} " + "  ".join(f"{_backends.choose(op, t):9}" for t in types))
    return "\n".join(line.rstrip() for line in lines)
