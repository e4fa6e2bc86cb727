"""What the commands share that make a trainer: making it, training it, and letting it play."""

import importlib.util
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sharpwave
from sharpwave.run.errors import UserError

if TYPE_CHECKING:
    from sharpwave.run.distributed import World


def make(algorithm: str, config: Any, world: "World | None" = None) -> Any:
    """The trainer, of one of the ranks of `world` if given.

    What its settings and its environment's name and options make impossible is the user's to mend.
    """
    from sharpwave.envs.base import EnvFault
    from sharpwave.run import trackers
    from sharpwave.run.config import to_json, trainer_class
    from sharpwave.run.info import check_device

    check_device(config.device)
    trackers.require(config.logger)
    ranks = {}
    if world is not None and world.size > 1:
        world.require_same(to_json(config), "settings")
        ranks["world"] = world
    try:
        return trainer_class(algorithm)(config, **ranks)
    except (ValueError, EnvFault) as error:
        raise UserError(str(error)) from error


def train(trainer: Any, run_dir: Path, algorithm: str, resume: bool, world: "World") -> int:
    """Train, print what comes of it, and evaluate; ranks but the first only train."""
    from sharpwave.run import display as displays
    from sharpwave.run import loop
    from sharpwave.run.environment import clipping
    from sharpwave.run.info import slow_backends
    from sharpwave.run.signals import StopRequest

    config, here = trainer.config, shlex.quote(str(run_dir))
    start = f"torchrun --nproc-per-node {world.size} -m sharpwave" if world.size > 1 else "sharpwave"
    where = f"{world.size} x {trainer.device}" if world.size > 1 else trainer.device
    header = [
        f"sharpwave {sharpwave.__version__}: {algorithm} {config.env} seed {config.seed} on {where}",
        f"run directory: {run_dir}",
        *slow_backends(trainer.device.type),
        *clipping(trainer.env.action),
    ]
    if not _are_compiled(trainer.device.type):
        name = {"cpu": "CPU", "cuda": "GPU"}[trainer.device.type]
        header.append(f"compiling the {name}'s kernels: this once, the first epoch takes up to a minute longer")
    display = displays.Silent()
    if world.is_first:
        display = displays.make(displays.SurvivingConsole(), trainer.num_epochs, header)
    with StopRequest(display.stopping, together=0 if world.size == 1 else 2) as stop:
        try:
            complete = loop.run(trainer, run_dir, resume=resume, display=display, stop=stop, world=world)
        finally:
            display.close()
    if world.size > 1:  # from here on only the first has something to do
        trainer.release_graphs()
        world.close()
    if not world.is_first:
        trainer.close()
        return 0 if complete else 128 + (stop.signal or signal.SIGINT)
    print(f"checkpoint: {loop.newest(run_dir)}")
    if not complete:
        print(f"stopped at epoch {trainer.epoch} of {trainer.num_epochs}; continue with: {start} resume {here}")
        return 128 + (stop.signal or signal.SIGINT)
    print(f"draw its learning curve with: sharpwave plot {here}")
    print(f"evaluate again with: sharpwave eval {here}", flush=True)
    if config.eval_episodes:
        print(play(trainer, config.eval_episodes, config.seed, deterministic=True))
    return 0


def _are_compiled(device_type: str) -> bool:
    """Whether an earlier run has left compiled kernels for a kind of device; true where none are compiled."""
    if device_type == "cpu":
        return any(Path(sharpwave.__file__).parent.rglob("*.nbc"))
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from triton import knobs

        return any(Path(knobs.cache.dir).glob("*"))
    return True


def play(trainer: Any, episodes: int, seed: int, deterministic: bool) -> str:
    """The line that `train` and `eval` end with. UserError where an environment fails."""
    from sharpwave.envs.base import EnvFault
    from sharpwave.run import evaluate, threads
    from sharpwave.run.seeding import stream_seed

    # The trainer's own environments: it is done with them, and another vector may cost processes and memory.
    env_seed = stream_seed(seed, 0, "evaluation")
    try:
        with threads.use(trainer.config.threads):
            returns = evaluate.evaluate(trainer, trainer.env, episodes, env_seed, deterministic=deterministic)
    except EnvFault as fault:
        raise UserError(str(fault)) from fault
    trainer.close()
    return evaluate.summary(returns)
