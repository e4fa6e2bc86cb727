"""Metrics on disk: JSON lines, and the same numbers for TensorBoard."""

import json
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sharpwave.run import plain_json, rundir
from sharpwave.run.errors import UserError


class RunLog:
    """Appends to a run's metrics.jsonl and tensorboard/.

    A line is one JSON object: "step" (environment steps), "epoch", then the metrics by name. JSON has no NaN and no
    infinity: such a value is null, and "nonfinite" says what it was: {"loss/value": null, "nonfinite":
    {"loss/value": "inf"}}. Each line is written whole, in one call, before `write` returns.

    Resuming from a checkpoint repeats the epochs after it, so their lines would come twice: lines after `resume_step`
    and a last line that a kill cut short are removed from metrics.jsonl, and TensorBoard is told to forget them. What
    is removed is written again as training repeats it.

    Args:
        run_dir: the run's directory.
        resume_step: the step of the checkpoint from which the run continues; None for a new run.

    Raises:
        UserError: the disk refuses, here, in `write` or in `sync`: it is full, or something else is at a file's place.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None):
        self._run_dir = run_dir
        self._purge_step = None if resume_step is None else resume_step + 1
        path = run_dir / rundir.METRICS
        with self._writing():
            if resume_step is not None and path.exists():
                os.truncate(path, _bytes_until(path, resume_step))
            self._file = path.open("ab", buffering=0)
        self._tensorboard: Any = None

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Add one line; `step` must not be less than the last one's."""
        values = {name: float(value) for name, value in metrics.items()}
        odd = {name: repr(value) for name, value in values.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step, "epoch": epoch}
        line |= {name: None if name in odd else value for name, value in values.items()}
        if odd:
            line["nonfinite"] = odd
        text = memoryview((json.dumps(line, allow_nan=False) + "\n").encode())
        with self._writing():
            while text:  # a disk that is nearly full takes a part, and says so at the next write
                text = text[self._file.write(text) :]
            self._write_tensorboard(step, values)

    def sync(self) -> None:
        """Make all lines durable. Called before a checkpoint, so that no checkpoint is ahead of the log."""
        with self._writing():
            os.fsync(self._file.fileno())
            if self._tensorboard is not None:
                self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            with suppress(OSError):  # all but what `sync` made durable is repeated by a resume
                self._tensorboard.close()

    @contextmanager
    def _writing(self) -> Generator[None]:
        """What the disk refuses is the user's to mend, and the run goes on from its newest checkpoint."""
        try:
            yield
        except OSError as error:
            steps = sorted(path.name for path in (self._run_dir / rundir.CHECKPOINTS).glob("step-*"))
            go_on = f"; then go on from {steps[-1]}: sharpwave resume {self._run_dir}" if steps else ""
            what = error.filename or f"the log of {self._run_dir}"
            raise UserError(
                f"cannot write {what}: {error.strerror or error}; free its place, or space{go_on}"
            ) from error

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_tensorboard(self, step: int, values: Mapping[str, float]) -> None:
        # Imported at the first line and not at start-up: who only resumes, evaluates or fails does not wait for it.
        from tensorboard.compat.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]
        from torch.utils.tensorboard import SummaryWriter

        if self._tensorboard is None:
            directory = str(self._run_dir / rundir.TENSORBOARD)
            self._tensorboard = SummaryWriter(directory, purge_step=self._purge_step)
        # One event for all values: an add_scalar each costs ten times as much, 1.5 ms a line.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._tensorboard.file_writer.add_summary(summary, step)  # ty: ignore[missing-union-attribute]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; values that were not finite are floats again. A cut last line is left out."""
    return [decode_line(text) for text in (run_dir / rundir.METRICS).read_bytes().split(b"\n")[:-1]]


def decode_line(text: bytes) -> dict[str, Any]:
    """One line of metrics.jsonl, its values floats again where they were not finite.

    Raises:
        ValueError, TypeError, AttributeError: it is not a line that `RunLog` wrote.
    """
    line = plain_json.loads(text, parse_constant=_no_constant)
    counts = [line.get(name) for name in ("step", "epoch")]
    if not all(isinstance(count, int) and 0 <= count < 2**63 for count in counts):
        raise ValueError("step and epoch must be counts")
    line.update({name: float(value) for name, value in line.pop("nonfinite", {}).items()})
    if not all(value is None or isinstance(value, int | float) for value in line.values()):
        raise ValueError("a metric must be a number")
    return line


def _no_constant(name: str) -> float:
    raise ValueError(f"JSON has no {name}")


def _bytes_until(path: Path, step: int) -> int:
    """The length of the whole lines at the file's head whose step is at most `step`."""
    length = 0
    with path.open("rb") as file:
        for text in file:
            try:
                keep = text.endswith(b"\n") and plain_json.loads(text)["step"] <= step
            except (ValueError, KeyError, TypeError):
                keep = False
            if not keep:
                break
            length += len(text)
    return length
