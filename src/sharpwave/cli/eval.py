"""`sharpwave eval RUN`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from sharpwave.cli import _trainers
from sharpwave.run import config as configs
from sharpwave.run import options, rundir
from sharpwave.run.errors import UserError


@dataclass
class Evaluate:
    """Play whole episodes with a run's newest checkpoint, and print their mean return."""

    run_dir: tyro.conf.Positional[Path]
    """The run's directory."""

    episodes: int = 100
    """Episodes to play (>= 1)."""

    seed: int = 0
    """Seed of the environments and of drawn actions."""

    device: str | None = None
    """Where to play: cpu, cuda, ... None: where the run was trained."""

    deterministic: bool = True
    """Take the most likely action (the mean of a continuous one); otherwise draw."""

    video: Path | None = None
    """Film episodes into this file, .mp4 or .gif, after those that are counted."""

    video_episodes: int = 1
    """Episodes to film (>= 1)."""

    fps: float | None = None
    """Pictures a second. None: what the environment says, or 30."""

    force: bool = False
    """Replace the video if it exists."""


def main(args: list[str]) -> int:
    chosen = options.parse(Evaluate, args, "sharpwave eval")
    from sharpwave.run import loop

    for name in ("episodes", "video_episodes"):
        if getattr(chosen, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(chosen, name)}")
    if chosen.fps is not None and not 0 < chosen.fps <= 1000:
        raise UserError(f"--fps must be above 0 and at most 1000; got {chosen.fps}")
    if chosen.video is not None:
        from sharpwave.run import plot, video

        plot.check_target(chosen.video, video.SUFFIXES, option="--video", force=chosen.force)
    algorithm, config = rundir.read(chosen.run_dir)
    loop.newest(chosen.run_dir)  # an error before the work of making a trainer
    config = dataclasses.replace(config, seed=chosen.seed, device=chosen.device or config.device)
    if chosen.video is not None:
        video.check(config.env, config.env_kwargs, "cpu", chosen.video)
    trainer = _trainers.make(algorithm, configs.check(config).for_playing())
    loop.restore_policy(trainer, chosen.run_dir)
    print(_trainers.play(trainer, chosen.episodes, chosen.seed, chosen.deterministic), flush=True)
    if chosen.video is not None:
        print(_film(trainer, chosen, chosen.video))
    return 0


def _film(trainer: Any, chosen: Evaluate, path: Path) -> str:
    from sharpwave.run import threads, video
    from sharpwave.run.seeding import stream_seed

    with threads.use(trainer.config.threads):
        film = video.record(
            trainer,
            trainer.config.env,
            trainer.config.env_kwargs,
            trainer.device,
            path,
            episodes=chosen.video_episodes,
            seed=stream_seed(chosen.seed, 0, "video"),
            deterministic=chosen.deterministic,
            fps=chosen.fps,
            force=chosen.force,
        )
    returns = ", ".join(f"{value:.1f}" for value in film.returns) or "none"
    cut = f"; cut after {film.frames:,} pictures" if film.is_cut else ""
    return f"{path}: {film.frames} pictures, {film.seconds:.1f} s, returns of whole episodes {returns}{cut}"
