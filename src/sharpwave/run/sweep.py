"""Sweeps: Optuna chooses settings, `sharpwave train` tries them in processes of their own, and nothing gets lost.

A sweep is a directory:

    sweeps/ppo-CartPole-v1-20260131-142501/
      sweep.json      algorithm, settings that all trials share, search space
      journal.log     Optuna's study, a journal that is appended to
      trials/0007/    an ordinary run: `sharpwave runs`, `plot`, `eval` and `resume` take it
      trials/0007.json, 0007.log    the settings it was started with, and what it printed
      pareto.svg      score against time

One process conducts: it asks Optuna for settings, starts trainings, reads their metrics.jsonl, stops those that fall
behind, and tells Optuna how they ended. Whichever process is killed, and when: `Sweep.run` goes on. A trial whose
training was killed is resumed from its newest checkpoint; one that trains still is watched until it ends.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from sharpwave.run import config as configs
from sharpwave.run import rundir, runs, spaces
from sharpwave.run.errors import UserError
from sharpwave.run.seeding import stream_seed
from sharpwave.run.signals import StopRequest

SWEEP, JOURNAL, TRIALS, PARETO = "sweep.json", "journal.log", "trials", "pareto.svg"
STUDY = "sweep"
POLL = 0.5  # seconds between two looks at the trainings
WARMUP = 20  # percent of a training before it may be stopped for falling behind
STARTUP = 4  # trials that are complete before one may be stopped
FAILURES = 5  # trials that fail one after the other, before any that does not, end the sweep


@dataclass(frozen=True)
class Result:
    """How a trial ended."""

    number: int
    state: str
    """complete, pruned, failed, or running."""
    score: float
    """Mean return over the last ten log lines; of a pruned one when it was stopped. NaN where it failed."""
    seconds: float
    """Training time."""
    params: Mapping[str, Any]
    why: str = ""
    """Of a failed one: the last line that it printed."""


@dataclass
class _Job:
    """A training that is going on."""

    trial: Any  # optuna.trial.Trial
    path: Path
    process: subprocess.Popen | None  # None: another process's, which is watched
    percent: int = -1
    is_pruned: bool = False
    was_resumed: bool = False


class Sweep:
    """A sweep's directory, opened.

    Args:
        path: made by `create`.

    Raises:
        UserError: there is no sweep, its files are damaged, or Optuna is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / SWEEP).is_file():
            raise UserError(f"no sweep at {path}: give a directory that `sharpwave sweep` made")
        record = configs.read_file(path / SWEEP)
        try:
            self.algorithm, settings, tables = record["algorithm"], record["settings"], record["space"]
            self.prune, self.trials = bool(record["prune"]), int(record["trials"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path / SWEEP} is not a file that sharpwave wrote") from None
        self.config = configs.build(self.algorithm, settings, str(path / SWEEP))
        self.space = spaces.build(self.algorithm, tables, str(path / SWEEP))
        self._optuna = optuna()

    def run(
        self,
        trials: int,
        workers: int,
        *,
        report: Callable[[Result], None] = lambda result: None,
        stop: StopRequest | None = None,
    ) -> bool:
        """Go on until the study holds `trials` trials that have ended, `workers` at a time.

        Args:
            trials: counted over the whole life of the sweep, failed ones included.
            workers: trainings side by side (>= 1).
            report: called as each trial ends.
            stop: once requested, the trainings are stopped with a checkpoint each, for the next `run` to resume.

        Returns:
            True where all trials have ended, False where it was stopped.

        Raises:
            UserError: another process conducts this sweep, or the first trials all fail.
        """
        with self._lock():
            study = self._study()
            jobs = [self._adopt(study, trial) for trial in study.trials if trial.state.name == "RUNNING"]
            ended = sum(trial.state.is_finished() for trial in study.trials)
            failures = 0
            try:
                while jobs or ended < trials:
                    if stop is not None and stop.requested:
                        return False
                    while len(jobs) < workers and ended + len(jobs) < trials:
                        jobs.append(self._start(study))
                    time.sleep(POLL)
                    for job in list(jobs):
                        if not self._look(study, job):
                            continue
                        jobs.remove(job)
                        ended += 1
                        result = self._result(study.trials[job.trial.number])
                        report(result)
                        failures = failures + 1 if result.state == "failed" else -trials
                        if failures >= FAILURES:
                            raise UserError(
                                f"the first {FAILURES} trials failed, the last with: {result.why}; see "
                                f"{self.path / TRIALS}, and narrow the search space"
                            )
            finally:
                _end(jobs)
            return True

    def results(self) -> list[Result]:
        """All trials so far, by number. Writes nothing."""
        if not (self.path / JOURNAL).exists():
            return []  # it was never run
        with self._readable():
            study = self._optuna.load_study(storage=self._storage(), study_name=STUDY)
            return [self._result(trial) for trial in study.trials]

    def run_dir(self, number: int) -> Path:
        return self.path / TRIALS / f"{number:04d}"

    def _study(self) -> Any:
        optuna = self._optuna
        with self._readable():
            study = optuna.create_study(
                storage=self._storage(), study_name=STUDY, direction="maximize", load_if_exists=True
            )
        # A stream of its own after each interruption: from its beginning the sampler would propose what it has before.
        seed = stream_seed(self.config.seed, 0, f"sweep/{len(study.trials)}") % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study.pruner = optuna.pruners.NopPruner()
        if self.prune:
            study.pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=WARMUP)
        if not study.trials:
            given = {d.name: getattr(self.config, d.name) for d in self.space}
            if all(given[d.name] in d for d in self.space):
                study.enqueue_trial(given)  # the settings as they are come first, so that a sweep never ends below them
        return study

    def _storage(self) -> Any:
        storages = self._optuna.storages
        return storages.JournalStorage(storages.journal.JournalFileBackend(str(self.path / JOURNAL)))

    def _start(self, study: Any) -> _Job:
        trial = study.ask()
        for dimension in self.space:
            dimension.suggest(trial)
        return self._launch(trial, trial.params)

    def _launch(self, trial: Any, params: Mapping[str, Any]) -> _Job:
        path = self.run_dir(trial.number)
        settings = json.loads(configs.to_json(self.config)) | dict(params)
        settings |= {"seed": self.config.seed + trial.number, "eval_episodes": 0}
        path.parent.mkdir(exist_ok=True)
        file = path.with_suffix(".json")
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        arguments = ["train", self.algorithm, "--config", str(file), "--run-dir", str(path)]
        return _Job(trial, path, _command(arguments, path.with_suffix(".log")))

    def _adopt(self, study: Any, frozen: Any) -> _Job:
        """Take over a trial whose conductor has gone."""
        trial = self._optuna.trial.Trial(study, frozen._trial_id)
        path = self.run_dir(trial.number)
        if not path.exists():
            for dimension in self.space:
                dimension.suggest(trial)  # those that were not drawn yet
            return self._launch(trial, trial.params)
        return _Job(trial, path, None, percent=max(frozen.intermediate_values, default=-1))

    def _look(self, study: Any, job: _Job) -> bool:
        """Report what a training has logged, stop it if it falls behind; whether it has ended, and the study knows."""
        running = job.process.poll() is None if job.process is not None else rundir.is_locked(job.path)
        run = runs.read(job.path) if job.path.is_dir() else None
        if run is not None and run.num_epochs and math.isfinite(run.last_return):
            percent = 100 * run.epoch // run.num_epochs
            if percent > job.percent:
                job.percent = percent
                job.trial.report(run.last_return, percent)
                if running and percent < 100 and not job.is_pruned and job.trial.should_prune():
                    job.is_pruned = True
                    _stop(job)
        if running:
            return False
        tell = self._optuna.trial.TrialState
        if run is not None:
            job.trial.set_user_attr("seconds", run.elapsed)
        if job.is_pruned and run is not None and run.status != "complete":
            study.tell(job.trial.number, state=tell.PRUNED)
        elif run is not None and run.status == "complete" and math.isfinite(run.last_return):
            study.tell(job.trial.number, run.last_return)
        elif run is not None and run.status == "complete":
            job.trial.set_user_attr("why", "no episode ended in its last ten log lines")
            study.tell(job.trial.number, state=tell.FAIL)
        elif run is not None and rundir.is_locked(job.path):
            job.process = (
                None  # one that an earlier conductor started just before it was killed holds the run: watch it
            )
            return False
        elif run is not None and run.checkpoint is not None and _was_killed(job) and not job.was_resumed:
            job.process = _command(["resume", str(job.path)], job.path.with_suffix(".log"))
            job.was_resumed = True
            return False
        else:
            job.trial.set_user_attr("why", _last_line(job.path.with_suffix(".log")))
            study.tell(job.trial.number, state=tell.FAIL)
        return True

    def _result(self, trial: Any) -> Result:
        state = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}.get(trial.state.name, "running")
        values = trial.intermediate_values
        score = trial.value if trial.value is not None else values[max(values)] if values else math.nan
        attributes = trial.user_attrs
        return Result(
            trial.number, state, score, attributes.get("seconds", math.nan), trial.params, attributes.get("why", "")
        )

    @contextmanager
    def _lock(self) -> Generator[None]:
        held = filelock.FileLock(self.path / rundir.LOCK, timeout=0)
        try:
            held.acquire()
        except filelock.Timeout:
            raise UserError(f"{self.path} is conducted by another process: wait for it, or stop it first") from None
        except OSError as error:
            raise UserError(f"cannot write in {self.path}: {error.strerror}") from error
        try:
            # Nobody else writes here now: a lock that a killed process left would be waited for.
            for leftover in self.path.glob(f"{JOURNAL}.*"):
                leftover.unlink(missing_ok=True)
            self._repair()
            yield
        finally:
            held.release()

    @contextmanager
    def _readable(self) -> Generator[None]:
        """What Optuna raises where its journal is not what it wrote, as a UserError."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{self.path / JOURNAL} is damaged ({' '.join(str(error).split())}): the trials are whole; begin a new "
                "sweep, and see them with `sharpwave runs`"
            ) from error

    def _repair(self) -> None:
        """Cut off a last line that a kill cut short: with another behind it Optuna could not read the journal."""
        journal = self.path / JOURNAL
        if journal.exists():
            whole = journal.read_bytes().rfind(b"\n") + 1
            if whole < journal.stat().st_size:
                os.truncate(journal, whole)


def create(
    path: Path, algorithm: str, config: Any, tables: Mapping[str, Any], source: str, prune: bool, trials: int
) -> Sweep:
    """Make a sweep's directory, which must not exist. `source`, named in errors, is where `tables` is from."""
    optuna()
    spaces.build(algorithm, tables, source)
    if os.path.lexists(path):
        advice = f"; go on with it by `sharpwave sweep --resume {path}`" if (path / SWEEP).is_file() else ""
        raise UserError(f"{path} exists: choose another --dir{advice}")
    record = {
        "algorithm": algorithm,
        "settings": json.loads(configs.to_json(config)),
        "space": dict(tables),
        "prune": prune,
        "trials": trials,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": rundir.versions(),
    }
    try:
        path.mkdir(parents=True)
        (path / SWEEP).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot make the sweep directory {path}: {error.strerror}; choose another --dir") from error
    return Sweep(path)


def front(results: list[Result]) -> list[Result]:
    """The complete trials that no other one beats in both score and time, the fastest first."""
    best, kept = -math.inf, []
    for result in sorted((r for r in results if r.state == "complete"), key=lambda r: (r.seconds, -r.score)):
        if result.score > best:
            best = result.score
            kept.append(result)
    return kept


def optuna() -> Any:
    """The optuna module, silent; or a UserError that names the extra."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(f"sweeps need Optuna: pip install 'sharpwave[sweep]' ({error})") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _command(arguments: list[str], log: Path) -> subprocess.Popen:
    # A session of its own: Ctrl-C at the terminal is for the conductor, who asks the trainings to stop.
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "sharpwave", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _was_killed(job: _Job) -> bool:
    """Whether a training ended for no fault of its own: by a signal, or with its conductor."""
    return job.process is None or job.process.returncode < 0 or job.process.returncode > 128


def _stop(job: _Job) -> None:
    """Ask for a checkpoint and an end. Another conductor's training, which has no process here, goes on to its own."""
    if job.process is not None and job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)


def _end(jobs: list[_Job]) -> None:
    for job in jobs:
        _stop(job)
    for job in jobs:
        if job.process is not None:
            job.process.wait()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "its log cannot be read"
    return lines[-1].removeprefix("sharpwave: error: ") if lines else "it printed nothing"
