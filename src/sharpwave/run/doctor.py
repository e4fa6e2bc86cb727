"""`sharpwave doctor`: whether this machine can run sharpwave, and what to do where it cannot.

Each check looks at one thing and never raises: what goes wrong in it is its finding. A problem is what stops sharpwave
or makes it wrong; a note is what makes it slower or leaves something out.
"""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]

PYTHON = ((3, 11), (3, 14))  # supported from the first, below the second
DISK = 2  # GiB free, below which a night's checkpoints may not fit
SHARED_MEMORY = (
    0.25  # GiB of /dev/shm: containers begin with 64 MiB, which a vector of environments' processes may fill
)
GPU_MEMORY = 2  # GiB free on a GPU
DRIVERS = {"12": 525, "13": 580}  # the oldest Linux driver of each CUDA (NVIDIA's CUDA compatibility table)
CUDA_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    state: State
    what: str
    """The thing looked at, in a word or two."""
    found: str
    advice: str = ""
    """What to do; empty where nothing needs to be done."""


def examine(folder: Path = Path("runs")) -> list[Finding]:
    """All findings, in the order of what depends on what. `folder` is where runs go."""
    findings: list[Finding] = []
    for check in (
        python,
        requirements,
        torch_build,
        gpu,
        ranks,
        triton,
        numba,
        lambda: disk(folder),
        threads,
        variables,
        extras,
    ):
        try:
            findings += check()
        except Exception as error:
            name = getattr(check, "__name__", "disk").replace("_", " ")
            findings.append(Finding("problem", name, _short(error), "this check failed itself: please report it"))
    return findings


def python() -> Iterator[Finding]:
    version = platform.python_version()
    low, high = PYTHON
    if low <= sys.version_info[:2] < high:
        yield Finding("ok", "Python", version)
    else:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
        yield Finding(
            "problem", "Python", version, f"sharpwave is for Python {wanted}: make a new environment with one"
        )


def requirements() -> Iterator[Finding]:
    """Every package that sharpwave needs, in a version that it takes."""
    if not _is_installed():
        yield Finding("note", "packages", "not checked, for sharpwave runs from its folder", "pip install -e .")
        return
    wrong = list(_unmet(""))
    for package, found, wanted in wrong:
        yield Finding("problem", package, found, f'pip install "{wanted}"')
    if not wrong:
        yield Finding("ok", "packages", "all that sharpwave needs, in versions it takes")


def torch_build() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        yield Finding("problem", "PyTorch", _short(error), "pip install torch, or see https://pytorch.org/get-started")
        return
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    yield Finding("ok", "PyTorch", f"{torch.__version__}, built for {build}")


def gpu() -> Iterator[Finding]:
    """A GPU there but not used, a driver too old, a GPU that cannot compute, little memory left on it."""
    torch = _torch()
    if torch is None:
        return
    driver, names = nvidia()
    if torch.cuda.is_available():
        if driver:
            yield Finding("ok", "driver", driver)
        for i in range(torch.cuda.device_count()):
            yield from _one_gpu(torch, i)
        return
    if names:
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            yield Finding("note", "GPU", f"{names[0]}, hidden by CUDA_VISIBLE_DEVICES", "unset it to train on the GPU")
            return
        if not torch.version.cuda:
            yield Finding(
                "note",
                "GPU",
                f"{names[0]}, which this PyTorch is built without CUDA to use",
                f"{CUDA_INSTALL} --force-reinstall",
            )
            return
        needed = DRIVERS.get(torch.version.cuda.split(".")[0])
        too_old = needed is not None and driver and int(driver.split(".")[0]) < needed
        advice = "if CUDA_VISIBLE_DEVICES is set, see that it names this GPU; else restart the machine"
        if too_old:
            advice = (
                f"CUDA {torch.version.cuda} needs driver {needed} or later: update it, or install an older CUDA build"
            )
        yield Finding("problem", "GPU", f"{names[0]}, driver {driver}, but PyTorch cannot use it", advice)
    elif torch.version.cuda:
        yield Finding(
            "note",
            "GPU",
            "none seen: no NVIDIA driver answers",
            "everything runs on the CPU; for a GPU install its driver",
        )
    elif torch.backends.mps.is_available():
        yield Finding("ok", "GPU", "Apple's (mps): ops run their PyTorch references there")
    else:
        yield Finding("ok", "GPU", "none; everything runs on the CPU")


def ranks() -> Iterator[Finding]:
    """What connects the ranks of a data-parallel run: gloo on CPUs, NCCL on GPUs."""
    torch = _torch()
    if torch is None:
        return
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("note", "torchrun", "this PyTorch is built without gloo", "runs of one process are not affected")
        return
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1
    if dist.is_nccl_available():
        yield Finding("ok", "torchrun", f"gloo; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} for GPUs")
    elif several:
        advice = f"to train on several GPUs: {CUDA_INSTALL}"
        yield Finding("note", "torchrun", "gloo; no NCCL, by which GPUs talk", advice)
    else:
        yield Finding("ok", "torchrun", "gloo, for CPUs")


def triton() -> Iterator[Finding]:
    """Kernels for a GPU; without one Triton is of no use but to tests."""
    torch = _torch()
    if torch is None:
        return
    try:
        version = importlib.import_module("triton").__version__
    except Exception as error:
        if torch.cuda.is_available():
            yield Finding("problem", "Triton", _short(error), "pip install 'sharpwave[triton]'")
        else:
            yield Finding("ok", "Triton", "not installed; only GPUs need it")
        return
    if os.environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
        yield Finding(
            "problem",
            "Triton",
            f"{version}, interpreted",
            "unset TRITON_INTERPRET: kernels run thousands of times slower",
        )
    else:
        yield Finding("ok", "Triton", version)


def numba() -> Iterator[Finding]:
    """The CPU kernels compile, give what their reference gives, and are kept for the next start."""
    if _torch() is None:
        return
    try:
        version = importlib.import_module("numba").__version__
        error = _cdf_error("cpu")
    except Exception as problem:
        yield Finding("problem", "CPU kernels", _short(problem), 'pip install --upgrade "numba>=0.61"')
        return
    if not error < 1e-5:
        yield Finding(
            "problem",
            "CPU kernels",
            f"numba {version}: wrong by {error:.1e}",
            "please report it: sharpwave info, sharpwave parity cdf",
        )
        return
    import sharpwave

    where = Path(sharpwave.__file__).parent
    kept = any(where.rglob("*.nbc")) or "NUMBA_CACHE_DIR" in os.environ or os.access(where, os.W_OK)
    if kept:
        yield Finding("ok", "CPU kernels", f"numba {version}; they compute what their reference does")
    else:
        yield Finding(
            "note", "CPU kernels", f"numba {version}; {where} is read-only, so they may be compiled at every start",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )  # fmt: skip


def disk(folder: Path) -> Iterator[Finding]:
    """Room for runs where they go, and permission to write there."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding(
            "problem",
            "disk",
            f"{there} cannot be written: {error.strerror}",
            "work in another folder, or give --run-dir",
        )
        return
    free = shutil.disk_usage(there).free / 2**30
    if free < DISK:
        yield Finding(
            "note", "disk", f"{free:.1f} GiB free at {there}", "free some space, or give --run-dir on another disk"
        )
    else:
        yield Finding("ok", "disk", f"{free:.0f} GiB free at {there}")
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).total / 2**30 < SHARED_MEMORY:
        size = shutil.disk_usage(shm).total / 2**20
        yield Finding(
            "note",
            "shared memory",
            f"{size:.0f} MiB at /dev/shm",
            "for environments in processes start the container with --shm-size=1g",
        )


def threads() -> Iterator[Finding]:
    """How many cores this process may use, and whether others use them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{allowed} of {os.cpu_count()} cores may be used; a run uses one unless --threads says more"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 1.5 * (os.cpu_count() or 1):
        yield Finding(
            "note",
            "threads",
            f"{found}; {load:.0f} processes want the {os.cpu_count()} cores",
            "speeds measured now will be low",
        )
    else:
        yield Finding("ok", "threads", found)


def variables() -> Iterator[Finding]:
    """Variables of the environment that slow everything down and are easily left behind."""
    for name, effect in {
        "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
        "NUMBA_DISABLE_JIT": "the CPU kernels run as plain Python",
        "TORCH_SHOW_DISPATCH_TRACE": "every operation is printed",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated anew, and nothing can be captured",
    }.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield Finding("note", name, effect, f"unset {name}")


def extras() -> Iterator[Finding]:
    """What is not installed, and what it would add; and what is installed in a version that sharpwave cannot use."""
    if not _is_installed():
        return
    missing = []
    for extra in metadata.metadata("sharpwave").get_all("Provides-Extra") or []:
        wrong = [] if extra in FOR_DEVELOPERS else list(_unmet(extra))
        for package, found, wanted in wrong:
            if found != ABSENT:
                yield Finding("note", package, f"{found}, too old for sharpwave[{extra}]", f'pip install "{wanted}"')
        if any(found == ABSENT for _, found, _ in wrong):
            missing.append(f"{extra} ({PURPOSES[extra]})" if extra in PURPOSES else extra)
    if missing:
        advice = "where you want one: pip install 'sharpwave[NAME]'"
        yield Finding("ok", "extras", "not installed: " + ", ".join(missing), advice)
    else:
        yield Finding("ok", "extras", "all installed")


ABSENT = "not installed"
FOR_DEVELOPERS = ("dev", "docs", "triton")
PURPOSES = {"plot": "sharpwave plot", "video": "eval --video", "sweep": "sharpwave sweep", "wandb": "W&B logs"}


def _torch() -> Any:
    """PyTorch, or None where it cannot be imported, which `torch_build` reports."""
    try:
        return importlib.import_module("torch")
    except Exception:
        return None


def nvidia() -> tuple[str, list[str]]:
    """The NVIDIA driver's version and the names of the GPUs it sees, without PyTorch; ("", []) where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", []
    query = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "", []
    rows = [line.split(", ", 1) for line in answer.splitlines() if ", " in line]
    return (rows[0][0], [name for _, name in rows]) if rows else ("", [])


def _one_gpu(torch, index: int) -> Iterator[Finding]:
    device = f"cuda:{index}"
    name = f"{torch.cuda.get_device_name(index)}"
    try:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        with torch.cuda.device(index):
            error = _cdf_error(device)
    except Exception as problem:
        text = _short(problem)
        advice = (
            f"this PyTorch may lack kernels for this GPU: {CUDA_INSTALL}; or see nvidia-smi for what else runs there"
        )
        if re.search(r"C compiler|Python\.h|gcc", text):
            advice = "install a C compiler (gcc) and Python's headers, which Triton builds its launcher with"
        yield Finding("problem", device, f"{name}: {text}", advice)
        return
    if not error < 1e-5:
        yield Finding(
            "problem",
            device,
            f"{name}: a kernel is wrong by {error:.1e}",
            "please report it: sharpwave info, sharpwave parity cdf",
        )
    elif free < GPU_MEMORY:
        yield Finding(
            "note", device, f"{name}, {free:.1f} of {total:.0f} GiB free", "see nvidia-smi for who holds the rest"
        )
    else:
        yield Finding(
            "ok", device, f"{name}, {free:.0f} of {total:.0f} GiB free; kernels compute what their reference does"
        )


def _cdf_error(device: str) -> float:
    """Largest relative error of the device's own kernel against float64: it compiles, launches, and is right."""
    import torch

    from sharpwave.ops.cdf import build_cdf

    weights = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    exact = weights.double().cumsum(0)
    return ((build_cdf(weights.to(device)).cpu().double() - exact).abs() / exact).max().item()


def _is_installed() -> bool:
    try:
        metadata.version("sharpwave")
    except metadata.PackageNotFoundError:
        return False
    return True


def _unmet(extra: str) -> Iterator[tuple[str, str, str]]:
    """(package, what is installed, what is wanted) of each unmet requirement of an extra; "" is sharpwave itself."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires("sharpwave") or []):
        marker = requirement.marker
        of_base = marker is None or marker.evaluate({"extra": ""})
        if of_base if extra else not of_base:
            continue
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield requirement.name, ABSENT, wanted
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, version, wanted


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
