"""`sharpwave bench train`: how fast the PPO trainer collects and trains, by phase. Under torchrun, on several GPUs."""

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sharpwave.run.errors import UserError

if TYPE_CHECKING:
    from sharpwave.run.distributed import World


@dataclass(frozen=True)
class TrainBenchmark:
    """PPO's speed on an environment that costs next to nothing. Sizes not given suit the device."""

    device: str = "auto"
    """cpu, cuda, or auto (cuda where there is one)."""
    num_envs: int | None = None
    """Environments. Default: 8192 on a GPU, 64 on a CPU."""
    horizon: int | None = None
    """Steps of a segment. Default: 128 on a GPU, 64 on a CPU."""
    minibatch: tuple[int, ...] | None = None
    """Minibatches to measure, steps. Default: 32768 8192 on a GPU, 2048 512 on a CPU."""
    observation_size: int | None = None
    """Width of an observation, float32. Default: 843 on a GPU, 32 on a CPU."""
    num_actions: int | None = None
    """Discrete actions. Default: 43 on a GPU, 8 on a CPU."""
    hidden: int | None = None
    """Width of the network. Default: 256 on a GPU, 128 on a CPU."""
    layers: int | None = None
    """MinGRU layers. Default: 3 on a GPU, 2 on a CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the network computes in; auto: bfloat16 on a GPU, float32 on a CPU."""
    threads: int = 1
    """CPU threads, as in a run."""
    repeats: int | None = None
    """Timed epochs; the median is reported. Default: 7 on a GPU, 3 on a CPU."""
    json: bool = False
    """Print JSON instead of a table."""

    def resolved(self, cuda: bool) -> "TrainBenchmark":
        """With every size filled in. Raises UserError where a count is not positive."""
        on_gpu = self.device.startswith("cuda") or (self.device == "auto" and cuda)
        given = {name: value for name, value in asdict(self).items() if value is not None}
        full = replace(self, **((ON_GPU if on_gpu else ON_CPU) | given))
        for name in ("repeats", "threads"):
            if getattr(full, name) < 1:
                raise UserError(f"--{name} must be at least 1; got {getattr(full, name)}")
        return full


ON_GPU: dict[str, Any] = {
    "num_envs": 8192, "horizon": 128, "minibatch": (32768, 8192), "observation_size": 843, "num_actions": 43,
    "hidden": 256, "layers": 3, "repeats": 7,
}  # fmt: skip
ON_CPU: dict[str, Any] = {
    "num_envs": 64, "horizon": 64, "minibatch": (2048, 512), "observation_size": 32, "num_actions": 8,
    "hidden": 128, "layers": 2, "repeats": 3,
}  # fmt: skip


def measure(options: TrainBenchmark, minibatch: int, world: "World | None" = None) -> dict[str, Any]:
    """Rates of one minibatch size: train SPS (updates alone), rollout SPS, end to end, and what they cost.

    `options` are resolved; sizes are each rank's, and rates those of all ranks together.
    """
    import torch

    from sharpwave.algos.ppo import PPO, PPOConfig
    from sharpwave.run.distributed import ALONE

    assert options.num_envs is not None and options.horizon is not None
    assert options.hidden is not None and options.layers is not None
    assert options.repeats is not None
    repeats = options.repeats
    world = world or ALONE
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
        dtype=options.dtype,
        total_steps=n_steps * 1000 * world.size,
    )
    agent = PPO(config, world=world)
    cuda = agent.device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def seconds(fn) -> tuple[float, float]:
        """Median and largest seconds of a call."""
        times = []
        for _ in range(repeats):
            wait()
            world.barrier()
            start = time.perf_counter()
            fn()
            wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times), max(times)

    for _ in range(3):
        agent._run_rollout()
        agent._train()
    updates = agent.config.updates_per_epoch
    train, train_max = seconds(agent._train)
    rollout, _ = seconds(agent._run_rollout)
    result = {
        "minibatch": minibatch,
        "dtype": agent.config.dtype,
        "ranks": world.size,
        "train_sps": world.size * updates * minibatch / train,
        "train_sps_worst": world.size * updates * minibatch / train_max,
        "rollout_sps": world.size * n_steps / rollout,
        "sps": world.size * n_steps / (rollout + train),
        "update_us": train / updates * 1e6,
        "rollout_us_per_step": rollout / options.horizon * 1e6,
        "updates_per_epoch": updates,
    }
    if cuda:
        result["phases_us"] = _phases(agent)
        result["nodes"] = agent._run_update.nodes()
        result["rollout_nodes_per_step"] = (agent._run_rollout.nodes() or 0) / options.horizon
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    agent.release_graphs()
    agent.close()
    return result


def _phases(agent) -> dict[str, float]:
    """Microseconds by phase in an update's graph, captured anew with events in it: the median of a few replays."""
    from sharpwave.run.graphs import Captured

    agent.timer.in_graphs = True
    update = Captured(agent._update, agent.device)
    for _ in range(Captured.WARM_UP + 1):
        update()
    replays = []
    for _ in range(9):
        update()
        replays.append(agent.timer.last_replay())
    agent.timer.in_graphs = False
    return {phase: statistics.median(r[phase] for r in replays) * 1e6 for phase in replays[0]}


def machine(device: str) -> dict[str, str]:
    """What a number was measured on."""
    import torch

    name = torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "threads": str(torch.get_num_threads())}


def main(options: TrainBenchmark) -> int:
    """Measure every minibatch size and print the table, or JSON."""
    import torch

    from sharpwave.run import threads
    from sharpwave.run.distributed import joined

    options = options.resolved(torch.cuda.is_available())
    with joined(options.device) as world, threads.use(options.threads):
        rows = [measure(options, m, world) for m in options.minibatch or ()]
        world.close()
    if not world.is_first:
        return 0
    if options.json:
        print(json.dumps({"machine": machine(options.device), "options": asdict(options), "results": rows}, indent=2))
        return 0
    several = [f"{world.size} ranks"] if world.size > 1 else []
    print(", ".join([*several, *machine(options.device).values()]))
    print(
        f"{'minibatch':>9} {'dtype':>9} {'train SPS':>12} {'rollout SPS':>12} {'SPS':>12} "
        f"{'us/update':>10} {'nodes':>6} {'GiB':>6}"
    )
    for r in rows:
        print(
            f"{r['minibatch']:>9} {r['dtype']:>9} {r['train_sps']:>12,.0f} {r['rollout_sps']:>12,.0f} "
            f"{r['sps']:>12,.0f} {r['update_us']:>10.1f} {r.get('nodes') or '':>6} {r.get('peak_memory_gib', 0):>6.1f}"
        )
        if "phases_us" in r:
            print("          us: " + ", ".join(f"{phase} {us:.1f}" for phase, us in r["phases_us"].items()))
    return 0
