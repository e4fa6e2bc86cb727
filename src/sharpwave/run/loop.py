"""The loop around a trainer: epochs, log lines, checkpoints, and an orderly stop."""

import dataclasses
import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from sharpwave.envs.base import EnvFault, VectorEnv
from sharpwave.run import checkpoint, rundir, threads
from sharpwave.run.config import RunConfig, to_json
from sharpwave.run.display import Display, Silent
from sharpwave.run.errors import CheckpointError, UserError
from sharpwave.run.evaluate import Agent
from sharpwave.run.log import RunLog
from sharpwave.run.signals import StopRequest
from sharpwave.run.trackers import Trackers


class Trainer(Agent, Protocol):
    """What the loop needs of a trainer, which is also the agent that is evaluated. `algos.ppo.PPO` and
    `algos.dqn.DQN` are."""

    config: Any
    """Its settings; the loop reads those of `sharpwave.run.config.RunConfig`."""
    device: torch.device
    env: VectorEnv
    policy: torch.nn.Module
    """What `act` reads; under "policy" in `state_dict`."""
    epoch: int
    """Epochs done."""
    num_epochs: int
    """Epochs in the whole run."""
    global_step: int
    """Environment steps done."""

    def train_epoch(self) -> None:
        """Collect and learn once: the smallest piece of training between two checkpoints."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the epochs since the last call, named "group/name": "episode/return", "loss/value". The only place
        where the host waits for the device."""
        ...

    def faults(self) -> Sequence[str]:
        """What was not finite in updates that the last `metrics` call counted as skipped ("fault/skipped_updates")."""
        ...

    def phases(self) -> Mapping[str, float]:
        """Seconds by phase since the last call (`PhaseTimer.take`)."""
        ...

    # A trainer may have `histograms()`, see `display.Histograms`, for the dashboard.

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on: nested dicts of what `checkpoint.flatten` takes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Release the environments."""
        ...


def run(
    trainer: Trainer,
    run_dir: Path,
    *,
    resume: bool = False,
    display: Display | None = None,
    stop: StopRequest | None = None,
) -> bool:
    """Train to the end, or until a stop is requested.

    Checkpoints are written before the first epoch, every `checkpoint_interval` epochs, after the last one and at a
    stop; log lines every `log_interval` epochs and at each of these checkpoints but the first. Both follow the count of
    epochs, not the clock: a run that was killed and resumed does exactly what one that was not killed does.

    Args:
        trainer: freshly made.
        run_dir: made by `rundir.create`. One process trains in it at a time.
        resume: continue from the newest checkpoint in `run_dir`.
        display: where progress shows; None shows nothing.
        stop: asked after each epoch; None never stops.

    Returns:
        True where the run is complete, False where it stopped; either way its newest checkpoint is of this moment.

    Raises:
        CheckpointError: there is no checkpoint to resume from, or it is damaged or of another configuration.
        UserError: another process trains in `run_dir`; an environment failed (the message names it, and the checkpoint
            to go on from).
    """
    config = trainer.config
    display = display or Silent()
    checkpoints = run_dir / rundir.CHECKPOINTS
    with rundir.lock(run_dir), threads.use(config.threads):
        elapsed = restore(trainer, run_dir) if resume else 0.0
        began = time.perf_counter() - elapsed
        settings = json.loads(to_json(config))
        with (
            RunLog(run_dir, trainer.global_step if resume else None) as log,
            closing(Trackers(config.logger, config.project, run_dir, settings, display.message)) as trackers,
            rundir.noting_failure(run_dir),
        ):
            if not resume:
                _save(trainer, checkpoints, log, 0.0)
            display.start(trainer.global_step, trainer.epoch)
            if resume and trainer.epoch >= trainer.num_epochs:
                display.message("this run was complete: nothing is left to train")
            last_step, last_time = trainer.global_step, time.perf_counter()
            final = trainer.epoch >= trainer.num_epochs or (stop is not None and stop.requested)
            while not final:
                try:
                    trainer.train_epoch()
                except EnvFault as fault:
                    # What the epoch had done so far is lost: half a rollout is no state to go on from.
                    raise UserError(
                        f"{fault}; mend the environment, then go on from {newest(run_dir).name}: "
                        f"sharpwave resume {run_dir}"
                    ) from fault
                # Asked once an epoch: a request that comes while this one is saved is answered after the next.
                final = trainer.epoch >= trainer.num_epochs or (stop is not None and stop.requested)
                save = final or trainer.epoch % config.checkpoint_interval == 0
                # A checkpoint follows a log line, so that no metric is half gathered in what is saved.
                if save or trainer.epoch % config.log_interval == 0:
                    metrics, phases = dict(trainer.metrics()), trainer.phases()
                    now = time.perf_counter()
                    metrics["time/elapsed"] = now - began
                    metrics["time/sps"] = (trainer.global_step - last_step) / (now - last_time)
                    metrics |= {f"time/{name}": seconds for name, seconds in phases.items()}
                    metrics |= _memory(trainer.device)
                    last_step, last_time = trainer.global_step, now
                    log.write(trainer.global_step, trainer.epoch, metrics)
                    trackers.write(trainer.global_step, metrics)
                    histograms = getattr(trainer, "histograms", None)
                    display.update(trainer.global_step, trainer.epoch, metrics, phases, histograms)
                    if metrics.get("fault/skipped_updates"):
                        display.message(_fault(trainer, metrics["fault/skipped_updates"]))
                if save:
                    _save(trainer, checkpoints, log, time.perf_counter() - began)
    return trainer.epoch >= trainer.num_epochs


def newest(run_dir: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    path = checkpoint.latest(run_dir / rundir.CHECKPOINTS)
    if path is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint: start the run again in another directory")
    return path


def restore(trainer: Trainer, run_dir: Path) -> float:
    """Load the newest checkpoint of a run into `trainer`; the seconds trained so far.

    Raises:
        CheckpointError: there is none, or it is damaged or of another configuration.
    """
    path = newest(run_dir)
    with _fitting(path):
        state = checkpoint.unflatten(*checkpoint.load(path))
        _refuse_other_settings(trainer.config, state["config"], path)
        trainer.load_state_dict(state["trainer"])
        if not (isinstance(trainer.epoch, int) and 0 <= trainer.epoch <= trainer.num_epochs):
            raise ValueError(f"its epoch is {trainer.epoch!r}, the run has {trainer.num_epochs}")
        return float(state["elapsed"])


def restore_policy(trainer: Trainer, run_dir: Path) -> None:
    """Load only what plays, from the newest checkpoint of a run, on any device. Errors: as `restore`."""
    path = newest(run_dir)
    with _fitting(path):
        trainer.policy.load_state_dict(checkpoint.unflatten(*checkpoint.load(path))["trainer"]["policy"])


@contextmanager
def _fitting(path: Path) -> Generator[None]:
    """What PyTorch and the trainers raise when a state is not theirs, as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {path} is not of this configuration: {reason}") from error


def _refuse_other_settings(config: Any, saved: Mapping[str, Any], path: Path) -> None:
    """A run goes on with the settings it began with; only what the loop around it does may change, and the device."""
    free = {field.name for field in dataclasses.fields(RunConfig)} | {"device"}
    now = json.loads(to_json(config))
    changed = [f"{name} is {now.get(name)}, was {was}" for name, was in saved.items() if now.get(name) != was]
    changed = [text for text in changed if text.split()[0] not in free]
    if changed:
        raise CheckpointError(
            f"the settings are not those of checkpoint {path}: {'; '.join(changed)}; put config.json back as it was, "
            "or begin a new run with --config"
        )


def _memory(device: torch.device) -> dict[str, float]:
    """GiB that PyTorch has reserved, that are used on the whole device, and that it has; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    sizes = {"reserved": torch.cuda.memory_reserved(device), "device_used": total - free, "device": total}
    return {f"memory/{name}_gib": size / 2**30 for name, size in sizes.items()}


def _fault(trainer: Trainer, count: float) -> str:
    what = ", ".join(trainer.faults()) or "the loss"
    return f"epoch {trainer.epoch}: {count:.0f} updates skipped, for these were not finite: {what}"


def _save(trainer: Trainer, directory: Path, log: RunLog, elapsed: float) -> None:
    path = checkpoint.step_path(directory, trainer.global_step)
    log.sync()
    tensors, structure = checkpoint.flatten(
        {"trainer": trainer.state_dict(), "elapsed": elapsed, "config": json.loads(to_json(trainer.config))}
    )
    checkpoint.save(path, tensors, structure)
    checkpoint.prune(directory, trainer.config.keep_checkpoints)
