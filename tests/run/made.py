"""Runs made by hand, without training: directories as `sharpwave train` leaves them."""

import json
import math
from pathlib import Path

from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.run import rundir
from sharpwave.run.log import RunLog

SETTINGS = {"env": "sharpwave/CartPole", "device": "cpu", "num_envs": 4, "horizon": 8, "minibatch": 16}


def make_run(path: Path, returns=(10.0, 20.0), *, checkpoint: bool = True, seconds: float = 2.0, **settings) -> Path:
    """A run of an epoch of 32 steps for each of `returns`; complete where they are as many as total_steps // 32."""
    config = PPOConfig(**{"total_steps": 64, **SETTINGS, **settings})
    run = rundir.create(path, "ppo", config, ["sharpwave", "train", "ppo"])
    with RunLog(run) as log:
        for epoch, value in enumerate(returns, start=1):
            count = 0.0 if math.isnan(value) else 4.0
            log.write(
                32 * epoch,
                epoch,
                {
                    "episode/return": value,
                    "episode/count": count,
                    "loss/value": 1 / epoch,
                    "time/elapsed": seconds * epoch,
                },
            )
    (run / rundir.CHECKPOINTS).mkdir()
    if checkpoint:
        (run / rundir.CHECKPOINTS / f"step-{32 * len(returns):012d}").mkdir()
    return run


def settings_of(path: Path) -> dict:
    return json.loads((path / rundir.CONFIG).read_text())
