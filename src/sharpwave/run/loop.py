"""The loop around a trainer: epochs, log lines, checkpoints, and an orderly stop."""

import dataclasses
import json
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from sharpwave.envs.base import EnvFault, VectorEnv
from sharpwave.run import checkpoint, rundir, threads
from sharpwave.run.config import RunConfig, to_json
from sharpwave.run.display import Display, Silent
from sharpwave.run.distributed import ALONE, World
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
    shared: Sequence[str]
    """What of `state_dict` is the same on all ranks that train together."""
    policy: torch.nn.Module
    """What `act` reads; under "policy" in `state_dict`."""
    epoch: int
    """Epochs done."""
    num_epochs: int
    """Epochs in the whole run."""
    global_step: int
    """Environment steps done, by all ranks."""

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
    world: World = ALONE,
) -> bool:
    """Train to the end, or until a stop is requested.

    Checkpoints are written before the first epoch, every `checkpoint_interval` epochs, after the last one and at a
    stop; log lines every `log_interval` epochs and at each of these checkpoints but the first. Both follow the count of
    epochs, not the clock: a run that was killed and resumed does exactly what one that was not killed does.

    Of several ranks that train together each calls this. The first writes and shows everything; the others add their
    parts to its numbers and checkpoints. All stop after the same epoch.

    Args:
        trainer: freshly made.
        run_dir: made by `rundir.create`. One process trains in it at a time.
        resume: continue from the newest checkpoint in `run_dir`.
        display: where progress shows; None shows nothing.
        stop: asked after each epoch; None never stops. A request to one rank stops all.
        world: the ranks, as the trainer has it.

    Returns:
        True where the run is complete, False where it stopped; either way its newest checkpoint is of this moment.

    Raises:
        CheckpointError: there is no checkpoint to resume from, or it is damaged or of another configuration.
        UserError: another process trains in `run_dir`; an environment failed (the message names it, and the checkpoint
            to go on from).
    """
    config, first = trainer.config, world.is_first
    display = display or Silent()
    checkpoints = run_dir / rundir.CHECKPOINTS
    with rundir.lock(run_dir) if first else nullcontext(), threads.use(config.threads):
        elapsed = restore(trainer, run_dir, world) if resume else 0.0
        world.barrier()  # nobody goes on, or is done, while another cannot
        began = time.perf_counter() - elapsed
        settings = json.loads(to_json(config))
        with (
            RunLog(run_dir, trainer.global_step if resume else None) if first else nullcontext() as log,
            closing(
                Trackers(config.logger if first else (), config.project, run_dir, settings, display.message)
            ) as trackers,
            rundir.noting_failure(run_dir) if first else nullcontext(),
        ):
            if not resume:
                _save(trainer, checkpoints, log, 0.0, world)
            display.start(trainer.global_step, trainer.epoch)
            if resume and trainer.epoch >= trainer.num_epochs:
                display.message("this run was complete: nothing is left to train")
            last_step, last_time = trainer.global_step, time.perf_counter()
            final = _is_final(trainer, stop, world)
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
                final = _is_final(trainer, stop, world)
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
                    if log is not None:
                        log.write(trainer.global_step, trainer.epoch, metrics)
                    trackers.write(trainer.global_step, metrics)
                    histograms = getattr(trainer, "histograms", None)
                    display.update(trainer.global_step, trainer.epoch, metrics, phases, histograms)
                    if metrics.get("fault/skipped_updates"):
                        display.message(_fault(trainer, metrics["fault/skipped_updates"]))
                if save:
                    _save(trainer, checkpoints, log, time.perf_counter() - began, world)
    return trainer.epoch >= trainer.num_epochs


def _is_final(trainer: Trainer, stop: StopRequest | None, world: World) -> bool:
    """Whether the run ends here: it is complete, or one of the ranks is asked to stop."""
    asked = stop is not None and stop.requested
    return trainer.epoch >= trainer.num_epochs or bool(world.largest(int(asked)))


def newest(run_dir: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    path = checkpoint.latest(run_dir / rundir.CHECKPOINTS)
    if path is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint: start the run again in another directory")
    return path


def restore(trainer: Trainer, run_dir: Path, world: World = ALONE) -> float:
    """Load the newest checkpoint of a run into `trainer`; the seconds trained so far.

    Raises:
        CheckpointError: there is none, or it is damaged, of another configuration or of another number of ranks.
    """
    path = newest(run_dir)
    with _fitting(path):
        state = checkpoint.unflatten(*checkpoint.load(path))
        _refuse_other_ranks(state.get("ranks", 1), world.size, path)
        _refuse_other_settings(trainer.config, state["config"], path)
        if not world.is_first:
            state["trainer"] |= _load_own(path, world.rank, state["trainer"]["epoch"])
        trainer.load_state_dict(state["trainer"])
        if not (isinstance(trainer.epoch, int) and 0 <= trainer.epoch <= trainer.num_epochs):
            raise ValueError(f"its epoch is {trainer.epoch!r}, the run has {trainer.num_epochs}")
        return float(state["elapsed"])


def _load_own(path: Path, rank: int, epoch: int) -> dict[str, Any]:
    """What a rank has to itself in a checkpoint."""
    place = checkpoint.rank_path(path / checkpoint.RANKS, rank)
    try:
        own = checkpoint.unflatten(*checkpoint.load(place))
    except CheckpointError as error:
        raise CheckpointError(checkpoint.damaged(path, f"what rank {rank} keeps there ({error})")) from error
    if own.pop("of_epoch") != epoch:
        raise CheckpointError(checkpoint.damaged(path, f"what rank {rank} keeps there is of another checkpoint"))
    return own


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


def _refuse_other_ranks(saved: int, now: int, path: Path) -> None:
    """Every rank goes on with its own environments, random streams and experience."""
    if saved != now:
        start = f"torchrun --nproc-per-node {saved} -m sharpwave" if saved > 1 else "sharpwave"
        raise CheckpointError(
            f"checkpoint {path} is of {saved} rank{'s' * (saved != 1)}, this run has {now}: continue it with `{start} "
            f"resume {path.parents[1]}`"
        )


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


def _save(trainer: Trainer, directory: Path, log: RunLog | None, elapsed: float, world: World) -> None:
    """A checkpoint of this moment, of all ranks: when it returns, it is whole and on the disk."""
    path, ranks = checkpoint.step_path(directory, trainer.global_step), None
    if world.size > 1:
        ranks = directory / f".{path.name}.ranks"  # `prune` deletes it, if a kill left it there
        if world.is_first:
            shutil.rmtree(ranks, ignore_errors=True)
        world.barrier()
        if not world.is_first:
            own = {name: value for name, value in trainer.state_dict().items() if name not in trainer.shared}
            own["of_epoch"] = trainer.epoch
            checkpoint.save(checkpoint.rank_path(ranks, world.rank), *checkpoint.flatten(own))
        world.barrier()
    if log is not None:
        if ranks is not None and len(list(ranks.glob("rank-*"))) != world.size - 1:
            raise CheckpointError(
                f"{directory} is not the same directory on every rank's machine: give a --run-dir that they share"
            )
        log.sync()
        state = {"trainer": trainer.state_dict(), "elapsed": elapsed, "config": json.loads(to_json(trainer.config))}
        if ranks is not None:
            state["ranks"] = world.size
        checkpoint.save(path, *checkpoint.flatten(state), ranks)
        checkpoint.prune(directory, trainer.config.keep_checkpoints)
    world.barrier()
