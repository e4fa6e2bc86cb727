"""A run's directory: what is in it, and that nothing in it is ever overwritten.

runs/ppo-CartPole-v1-seed0-20260131-142501/
  config.json     every setting, resolved
  run.json        algorithm, command, versions, machine, time of creation
  metrics.jsonl   a line of numbers every `log_interval` epochs
  tensorboard/    the same, for TensorBoard
  checkpoints/    step-000000040960/, the newest `keep_checkpoints`
  failure.txt     why training ended early, where an error ended it; deleted when it goes on
"""

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from sharpwave.run import config as configs
from sharpwave.run.errors import UserError

CONFIG, RUN, METRICS, TENSORBOARD, CHECKPOINTS, FAILURE, LOCK = (
    "config.json",
    "run.json",
    "metrics.jsonl",
    "tensorboard",
    "checkpoints",
    "failure.txt",
    ".lock",
)
PACKAGES = ("sharpwave", "torch", "triton", "numba", "numpy", "gymnasium", "safetensors", "tyro", "rich", "tensorboard")


def create(
    path: Path | None,
    algorithm: str,
    config: Any,
    command: Sequence[str],
    backends: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Path:
    """Make a run's directory, with config.json and run.json in it.

    Args:
        path: must not exist, not even empty; its parents are made. None takes
            runs/ALGORITHM-ENV-seedS-YYYYmmdd-HHMMSS, with -2, -3, ... behind it where that is taken.
        algorithm: a key of config.ALGORITHMS.
        config: the algorithm's settings.
        command: the command line, for the record.
        backends: of every op, for the record.
        ranks: how many train together, for the record.

    Raises:
        UserError: `path` exists, cannot be made, or its name is not UTF-8.
    """
    if path is not None:
        _require_text(path)
    made = _make(path) if path is not None else _make_default(algorithm, config)
    record = {
        "algorithm": algorithm,
        "command": list(command),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        **({"backends": dict(backends)} if backends is not None else {}),
        **({"ranks": ranks} if ranks > 1 else {}),
    }
    try:
        (made / CONFIG).write_text(configs.to_json(config), encoding="utf-8")
        (made / RUN).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)  # this call made it
        raise UserError(
            f"cannot write the run directory {made}: {error.strerror}; free some space or choose another"
        ) from error
    return made


def refuse_existing(path: Path) -> None:
    """UserError where something is at `path`, be it an empty directory, or where nothing can be."""
    _require_text(path)
    if os.path.lexists(path):
        advice = "choose another --run-dir"
        if (path / RUN).is_file():
            raise UserError(f"run directory {path} exists: {advice}, or continue it with `sharpwave resume {path}`")
        raise UserError(f"run directory {path} exists: {advice}; nothing was overwritten")


def read(path: Path) -> tuple[str, Any]:
    """The algorithm and the settings of a run.

    Raises:
        UserError: `path` is not a run's directory, or its files are not what sharpwave wrote.
    """
    _require_text(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}: give a directory that `sharpwave train` made")
    if not (path / RUN).is_file() or not (path / CONFIG).is_file():
        raise UserError(f"{path} is not a run: it holds no {RUN} or no {CONFIG}")
    record = configs.read_file(path / RUN)
    if not isinstance(record.get("algorithm"), str):
        raise UserError(f"{path / RUN} names no algorithm: it is not a file that sharpwave wrote")
    settings = configs.read_file(path / CONFIG)
    return record["algorithm"], configs.build(record["algorithm"], settings, str(path / CONFIG))


@contextmanager
def lock(path: Path) -> Generator[None]:
    """Hold a run for writing: of two processes only one trains in a directory. Released when the process ends, however.

    Raises:
        UserError: another process holds it.
    """
    held = filelock.FileLock(path / LOCK, timeout=1)  # longer than `is_locked` may hold it
    try:
        held.acquire()
    except filelock.Timeout:
        raise UserError(f"{path} is being trained by another process: wait for it, or stop it first") from None
    except OSError as error:
        raise UserError(f"cannot write in the run directory {path}: {error.strerror}") from error
    try:
        yield
    finally:
        held.release()


@contextmanager
def noting_failure(path: Path) -> Generator[None]:
    """Around training in a run: the error that ends it is written into the run, the one from before is deleted."""
    (path / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk, say: the error itself matters more
            (path / FAILURE).write_text(" ".join(reason.split()) + "\n", encoding="utf-8")
        raise


def is_locked(path: Path) -> bool:
    """Whether a process trains in the run at `path` now. Writes nothing, so that it works in a read-only folder."""
    if fcntl is None:  # Windows, where only a writer can ask
        try:
            with filelock.FileLock(path / LOCK, timeout=0):
                return False
        except filelock.Timeout:
            return True
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back as the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return False  # nobody has ever trained here, or it cannot be told
    return False


def versions() -> dict[str, str | None]:
    """The version of each package that matters, or None where it is not installed. Imports none of them."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in PACKAGES}


def _require_text(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the name of run directory {str(path)!r} is not UTF-8, which TensorBoard needs: give it another"
        ) from None


def _make(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run directory {path}: {error.strerror}") from error
    try:
        path.mkdir()
    except FileExistsError:
        refuse_existing(path)
        raise
    except OSError as error:
        raise UserError(f"cannot make the run directory {path}: {error.strerror}") from error
    return path


def _make_default(algorithm: str, config: Any) -> Path:
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", config.env).strip("-.")
    name = f"{algorithm}-{env}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = Path("runs") / name, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return _make(path)
