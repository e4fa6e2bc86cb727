"""`sharpwave bench train`: how fast the PPO trainer collects and trains, by phase."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainBenchmark:
    """PPO's speed on an environment that costs next to nothing; by default at a size for a large GPU."""

    device: str = "auto"
    """cpu, cuda, or auto (cuda where there is one)."""
    num_envs: int = 8192
    """Environments."""
    horizon: int = 128
    """Steps of a segment."""
    minibatch: tuple[int, ...] = (32768, 8192)
    """Minibatches to measure, steps."""
    observation_size: int = 843
    """Width of an observation, float32."""
    num_actions: int = 43
    """Discrete actions."""
    hidden: int = 256
    """Width of the network."""
    layers: int = 3
    """MinGRU layers."""
    dtype: str = "auto"
    """float32, bfloat16, or auto."""
    updates: int = 20
    """Updates in a timed run."""
    repeats: int = 7
    """Timed runs; the median is reported."""
    json: bool = False
    """Print JSON instead of a table."""


def measure(options: TrainBenchmark, minibatch: int) -> dict[str, Any]:
    """Rates of one minibatch size: train SPS (updates alone), rollout SPS, end to end, and what they cost."""
    import torch

    from sharpwave.algos.ppo import PPO, PPOConfig

    n_steps = options.num_envs * options.horizon
    config = PPOConfig(
        env="sharpwave/Synthetic",
        env_kwargs=dict(observation_size=options.observation_size, num_actions=options.num_actions),
        device=options.device,
        num_envs=options.num_envs,
        horizon=options.horizon,
        minibatch=minibatch,
        hidden=options.hidden,
        layers=options.layers,
        dtype=options.dtype,  # ty: ignore[invalid-argument-type]
        total_steps=n_steps * 1000,
    )
    agent = PPO(config)
    cuda = agent.device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def seconds(fn, count: int) -> tuple[float, float]:
        """Median and largest seconds of `count` calls."""
        times = []
        for _ in range(options.repeats):
            wait()
            start = time.perf_counter()
            for _ in range(count):
                fn()
            wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times), max(times)

    for _ in range(3):
        agent._run_rollout()
    for _ in range(3):
        agent._run_update()
    update, update_max = (t / options.updates for t in seconds(agent._run_update, options.updates))
    rollout, _ = seconds(agent._run_rollout, 1)
    updates = agent.config.updates_per_epoch
    result = {
        "minibatch": minibatch,
        "dtype": agent.config.dtype,
        "train_sps": minibatch / update,
        "train_sps_worst": minibatch / update_max,
        "rollout_sps": n_steps / rollout,
        "sps": n_steps / (rollout + updates * update),
        "update_us": update * 1e6,
        "rollout_us_per_step": rollout / options.horizon * 1e6,
        "updates_per_epoch": updates,
    }
    if cuda:
        graph = agent._run_update.graph
        assert graph is not None
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    agent.close()
    return result


def machine(device: str) -> dict[str, str]:
    """What a number was measured on."""
    import torch

    name = torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "threads": str(torch.get_num_threads())}


def main(options: TrainBenchmark) -> int:
    """Measure every minibatch size and print the table, or JSON."""
    rows = [measure(options, m) for m in options.minibatch]
    if options.json:
        print(json.dumps({"machine": machine(options.device), "options": asdict(options), "results": rows}, indent=2))
        return 0
    print(", ".join(machine(options.device).values()))
    print(
        f"{'minibatch':>9} {'dtype':>9} {'train SPS':>12} {'rollout SPS':>12} {'SPS':>12} {'us/update':>10} {'GiB':>6}"
    )
    for r in rows:
        print(
            f"{r['minibatch']:>9} {r['dtype']:>9} {r['train_sps']:>12,.0f} {r['rollout_sps']:>12,.0f} "
            f"{r['sps']:>12,.0f} {r['update_us']:>10.1f} {r.get('peak_memory_gib', 0):>6.1f}"
        )
    return 0
