"""The pictures of the docs, made from real runs: python docs/_make/pictures.py (about three minutes on one core).

dashboard.svg is the last picture of a run's dashboard; cartpole.svg and cartpole.gif come from five seeds of CartPole.
"""

import io
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.run import loop, plot, rundir, runs, video
from sharpwave.run.display import Dashboard
from sharpwave.run.presets import PRESETS

IMAGES = Path(__file__).parents[1] / "img"
SEEDS = 5
WIDTH = 110


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for seed in range(SEEDS):
            settings = PRESETS[("ppo", "sharpwave/CartPole")] | {
                "env": "sharpwave/CartPole",
                "seed": seed,
                "device": "cpu",
            }
            trainer = PPO(PPOConfig(**settings))
            run_dir = rundir.create(Path(folder) / f"seed{seed}", "ppo", trainer.config, command=[])
            terminal = Console(file=io.StringIO(), force_terminal=True, width=WIDTH)
            dashboard = Dashboard(terminal, trainer.num_epochs)
            loop.run(trainer, run_dir, display=dashboard)
            dashboard.close()
            paths.append(run_dir)
        paper = Console(record=True, file=io.StringIO(), force_terminal=True, width=WIDTH)
        paper.print(dashboard._live.renderable)
        paper.save_svg(str(IMAGES / "dashboard.svg"), title="sharpwave train ppo --env sharpwave/CartPole")
        plot.save(plot.figure([runs.read(path) for path in paths]), IMAGES / "cartpole.svg", force=True)
        film = Path(folder) / "cartpole.gif"
        video.record(trainer, trainer.config.env, {"max_episode_steps": 150}, "cpu", film)
        shutil.copy(film, IMAGES / film.name)


if __name__ == "__main__":
    main()
