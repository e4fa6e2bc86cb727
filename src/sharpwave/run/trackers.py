"""Experiment trackers beside metrics.jsonl and TensorBoard: Weights & Biases and trackio, where they are asked for.

A tracker is a guest: what it raises once training has begun is told once, and never ends the training.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpwave.run import rundir
from sharpwave.run.errors import UserError

KNOWN = ("wandb", "trackio")


def require(names: Sequence[str]) -> None:
    """UserError where one of `names` is not installed; called before anything is made."""
    for name in names:
        _module(name)


class Trackers:
    """The trackers of one run.

    Args:
        names: of KNOWN.
        project: under which the run is filed.
        run_dir: its name is the run's; a resumed run goes on under the same identity.
        settings: the run's configuration, by name.
        warn: called with one line where a tracker has failed; it is not used again.

    Raises:
        UserError: one is not installed, or refuses to begin.
    """

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        run_dir: Path,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
    ):
        self._warn = warn
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            module = _module(name)
            try:
                self._open[name] = _begin(module, name, project, run_dir, dict(settings))
            except Exception as error:  # of each library its own kinds
                self.close()
                reason = " ".join(str(error).split())
                advice = " (or work offline: WANDB_MODE=offline)" if name == "wandb" else ""
                raise UserError(f"--logger {name} cannot begin: {reason}{advice}") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass one log line on. Values that are not finite are left out, for not every tracker takes them."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._each(lambda run: run.log(finite, step=step))

    def close(self) -> None:
        self._each(lambda run: run.finish())
        self._open.clear()

    def _each(self, call: Callable[[Any], object]) -> None:
        for name, run in list(self._open.items()):
            try:
                call(run)
            except Exception as error:
                del self._open[name]
                self._warn(f"{name} failed and is not used any more: {' '.join(str(error).split())}")


def _begin(module: Any, name: str, project: str, run_dir: Path, settings: dict[str, Any]) -> Any:
    if name == "wandb":
        return module.init(
            project=project, name=run_dir.name, id=_identity(run_dir), resume="allow", config=settings, dir=str(run_dir)
        )
    return module.init(project=project, name=run_dir.name, config=settings, resume="allow", embed=False)


def _identity(run_dir: Path) -> str:
    """The same however often a run is resumed, and another one for each run: from run.json's time and command."""
    record = (run_dir / rundir.RUN).read_bytes() if (run_dir / rundir.RUN).exists() else run_dir.name.encode()
    return hashlib.blake2b(record + run_dir.name.encode(), digest_size=8).hexdigest()


def _module(name: str) -> Any:
    if name not in KNOWN:
        raise UserError(f"--logger must be among {', '.join(KNOWN)}; got {name}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"--logger {name} needs it: pip install 'sharpwave[{name}]' ({error})") from error
