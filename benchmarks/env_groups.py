"""Steps a second of a PPO rollout, the environments in one group and in several: `python -m benchmarks.env_groups`.

Each environment has a process of its own and keeps a core busy for `--step-ms` a step; `--env` takes another one. The
groups' rollouts are taken by turns, so that a busy machine is busy for all; one line of JSON, medians and tenths.
"""

import argparse
import json
import time

import gymnasium
import numpy as np
import torch

from benchmarks._timing import interleaved_us, machine
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.run import threads


class Busy(gymnasium.Env):
    """Takes `step_ms` of a core's time for a step, and shows noise: 16 numbers, or four frames of 84 x 84."""

    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, step_ms: float = 1.0, pixels: bool = False):
        self.seconds, self.t = step_ms / 1000, 0
        box = gymnasium.spaces.Box
        self.observation_space = box(0, 255, (4, 84, 84), np.uint8) if pixels else box(0, 1, (16,), np.float32)

    def reset(self, *, seed=None, options=None):
        """Begin an episode of 200 steps."""
        super().reset(seed=seed)
        self.t = 0
        return self._noise(), {}

    def step(self, action):
        """Be busy."""
        del action
        self.t += 1
        until = time.process_time() + self.seconds
        while time.process_time() < until:
            pass
        return self._noise(), 1.0, False, self.t == 200, {}

    def _noise(self) -> np.ndarray:
        if self.observation_space.dtype == np.uint8:
            return np.full((4, 84, 84), self.np_random.integers(256), np.uint8)
        return self.np_random.random(16, dtype=np.float32)


def main() -> None:
    """Measure every number of groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--env", default=None, help="another environment, stepped in processes")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--pixels", action="store_true")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    gymnasium.register("Busy-v0", entry_point=Busy, disable_env_checker=True)
    kwargs: dict = {"vectorization_mode": "async"}
    if args.env is None:
        kwargs |= {"step_ms": args.step_ms, "pixels": args.pixels}
    agents = {
        groups: PPO(
            PPOConfig(
                env=args.env or "Busy-v0", env_kwargs=kwargs, device=args.device, num_envs=args.num_envs,
                env_groups=groups, hidden=args.hidden, encoder="cnn" if args.pixels else "linear", horizon=32,
            )
        )
        for groups in args.groups
    }  # fmt: skip

    def rollout(agent: PPO) -> None:
        agent._run_rollout()
        if agent.device.type == "cuda":
            torch.cuda.synchronize()

    with threads.use(1):
        times = interleaved_us({str(g): lambda agent=a: rollout(agent) for g, a in agents.items()}, args.rounds)
    steps = args.num_envs * 32
    names = {"median": "median", "p90": "slowest tenth", "p10": "fastest tenth"}
    found = {g: {names[name]: round(steps / us * 1e6) for name, us in x.items()} for g, x in times.items()}
    print(json.dumps(vars(args) | {"steps_per_second": found} | machine(args.device)))
    for agent in agents.values():
        agent.close()


if __name__ == "__main__":
    main()
