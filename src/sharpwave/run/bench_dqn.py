"""`sharpwave bench dqn`: how fast DQN learns, by phase, beside the same network on other replay buffers."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sharpwave.run.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from sharpwave.algos.dqn import DQN

ACTIONS = 18


@dataclass(frozen=True)
class DQNBenchmark:
    """DQN's speed on a full replay of random transitions. Sizes not given suit the device."""

    device: str = "auto"
    """cpu, cuda, or auto (cuda where there is one)."""
    network: tuple[Literal["nature", "impala", "mlp"], ...] | None = None
    """Networks to measure: convolutions on stacks of four 84 x 84 frames, or linear layers on four numbers. Default:
    mlp and nature on a GPU, mlp on a CPU."""
    batch_size: int = 256
    """Transitions an update trains on."""
    capacity: int | None = None
    """Transitions held. Default: 1000000 on a GPU, 100000 on a CPU."""
    num_envs: int = 64
    """Environments that the transitions come from."""
    hidden: int | None = None
    """Width of the linear layers. Default: 512 after convolutions, 128 in the MLP."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the network computes in, as in a run."""
    peers: bool = True
    """Also measure the same network on torchrl's prioritized buffer, where it is installed, and on a cumulated sum."""
    threads: int = 1
    """CPU threads, as in a run."""
    updates: int | None = None
    """Updates in a timed run. Default: 160 on a GPU, 32 on a CPU."""
    repeats: int = 7
    """Timed runs; the median is reported."""
    json: bool = False
    """Print JSON instead of a table."""

    def resolved(self, cuda: bool) -> "DQNBenchmark":
        """With every size filled in. Raises UserError where a count is not positive."""
        on_gpu = self.device.startswith("cuda") or (self.device == "auto" and cuda)
        defaults: dict[str, Any] = (
            {"network": ("mlp", "nature"), "capacity": 1_000_000, "updates": 160}
            if on_gpu
            else {"network": ("mlp",), "capacity": 100_000, "updates": 32}
        )
        given = {name: value for name, value in asdict(self).items() if value is not None}
        full = replace(self, **(defaults | given))
        for name in ("batch_size", "capacity", "num_envs", "updates", "repeats", "threads"):
            if getattr(full, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(full, name)}")
        return full


def measure(options: DQNBenchmark, network: str) -> dict[str, Any]:
    """Microseconds of an update and of its parts, ours and the peers'. `options` are resolved."""
    agent = full_agent(options, network)
    assert options.updates is not None
    clock = Clock(agent, options.updates, options.repeats)
    agent.update(4 * agent.block + 4)  # kernels compile, and graphs are captured
    result: dict[str, Any] = {"network": network, "dtype": str(agent.dtype).removeprefix("torch.")}
    result["update_us"] = clock.us(agent.update, options.updates)
    result["updates_per_second"] = 1e6 / result["update_us"]
    result["step_us"] = clock.us(lambda count: [agent._run_step() for _ in range(count)], options.updates)
    result |= phases(agent, clock)
    result["replay_share"] = (result["sample_us"] + result["priorities_us"]) / result["update_us"]
    if options.peers:
        result |= peers(agent, clock)
    agent.close()
    return result


def full_agent(options: DQNBenchmark, network: str) -> "DQN":
    """A trainer whose replay is full, of priorities that differ."""
    import torch

    from sharpwave.algos.dqn import DQN, DQNConfig

    assert options.capacity is not None
    images = network != "mlp"
    config = DQNConfig(
        env="benchmark",
        device=options.device,
        num_envs=options.num_envs,
        buffer_size=options.capacity,
        batch_size=options.batch_size,
        network=network,  # ty: ignore[invalid-argument-type]
        hidden=options.hidden or (512 if images else 128),
        frame_stack=4 if images else 1,
        dtype=options.dtype,
        total_steps=1 << 40,
    ).resolved(torch.cuda.is_available())
    device = torch.device(config.device)
    agent = DQN(config, random_env(options.num_envs, device, (84, 84) if images else (4,)))
    ring = agent.replay.state.layout.ring
    for _ in range(ring + ring // 50 + 5):  # an episode's end takes one slot more
        agent._run_step()
    every = torch.arange(agent.replay.capacity, device=device)
    agent.replay.update_priorities(every, torch.rand(len(every), device=device) * 2)
    return agent


class Clock:
    """Medians of timed runs, the device's work included."""

    def __init__(self, agent: "DQN", count: int, repeats: int):
        self.agent, self.count, self.repeats = agent, count, repeats

    def us(self, work: Callable[[int], object], count: int) -> float:
        """Microseconds of one of the `count` things that work(count) does."""
        times = []
        for _ in range(self.repeats + 1):
            self._wait()
            start = time.perf_counter()
            work(count)
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / count * 1e6

    def graph_us(self, call: Callable[[], object]) -> float:
        """Microseconds of one call, on a GPU as part of a captured graph of ten."""
        from sharpwave.run.graphs import Captured

        def calls() -> None:
            for _ in range(10):
                call()

        ten = Captured(calls, self.agent.device, [self.agent.noise_generator])
        for _ in range(4):
            ten()
        return self.us(lambda count: [ten() for _ in range(count)], max(1, self.count // 10)) / 10

    def _wait(self) -> None:
        import torch

        if self.agent.device.type == "cuda":
            torch.cuda.synchronize()


def phases(agent: "DQN", clock: Clock) -> dict[str, float]:
    """What each part of an update takes alone, one after the other; in an update on a GPU they overlap."""
    import torch

    batch = agent._draw(0)
    td_error = torch.rand(agent.config.batch_size, device=agent.device)

    def forward() -> Any:
        return agent._loss(batch)[1]

    def backward() -> Any:
        return forward()()

    def optimize() -> None:
        agent._descend(*backward())

    result = {
        "sample_us": clock.graph_us(lambda: agent._draw(0)),
        "priorities_us": clock.graph_us(
            lambda: agent.replay.update_priorities(batch.indices, td_error, batch.generations)
        ),
        "forward_us": clock.graph_us(forward),
    }
    result["backward_us"] = clock.graph_us(backward) - result["forward_us"]
    result["optimizer_us"] = clock.graph_us(optimize) - result["forward_us"] - result["backward_us"]
    return result


def peers(agent: "DQN", clock: Clock) -> dict[str, float | str]:
    """The same network, loss and optimizer on other replays of the same transitions, of one step and unstacked storage.

    `_graph` is the same with everything in one captured graph; for torchrl, whose sampler works on the host, all but
    the draw and the priorities.
    """
    import torch

    result: dict[str, float | str] = {}
    config, device = agent.config, agent.device
    assert agent.replay.storage is not None
    stored = agent.replay.storage.tensors
    rows = len(stored["reward"]) - 8
    frames = torch.arange(config.frame_stack, device=device)

    def gather(index: "Tensor", weights: "Tensor") -> Any:
        from sharpwave.replay.nest import Batch

        rest = {k: stored[k][index] for k in ("action", "reward", "terminated")}
        if config.frame_stack > 1:
            obs, following = (stored["obs"][index[:, None] + frames + ahead] for ahead in (0, 1))
        else:
            obs, following = stored["obs"][index], stored["obs"][index + 1]
        discount = torch.where(rest["terminated"], 0.0, config.gamma)
        return Batch(rest, obs=obs, next_obs=following, discount=discount, weights=weights)

    def train(batch: Any) -> "Tensor":
        td_error, gradient = agent._loss(batch)
        agent._descend(*gradient())
        return td_error

    priority = torch.rand(rows, device=device).pow_(config.alpha)

    def cumsum_step() -> None:
        cdf = priority.cumsum(0)
        u = torch.rand(config.batch_size, device=device) * cdf[-1]
        index = torch.searchsorted(cdf, u).clamp_(max=rows - 1)
        p = priority[index]
        weights = (rows * p / cdf[-1]) ** -0.4
        td_error = train(gather(index, weights / weights.max()))
        priority[index] = (td_error.abs() + 1e-6) ** config.alpha

    result["cumsum_us"] = clock.us(lambda count: [cumsum_step() for _ in range(count)], clock.count)
    if device.type == "cuda":
        result["cumsum_graph_us"] = clock.graph_us(cumsum_step)
    try:
        result |= _torchrl(agent, clock, rows, gather, train)
    except (ImportError, RuntimeError, TypeError, NameError, OSError) as error:
        result["torchrl_problem"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return result


def _torchrl(
    agent: "DQN", clock: Clock, rows: int, gather: Callable[..., Any], train: Callable[[Any], "Tensor"]
) -> dict[str, float | str]:
    """Its sampler and storage hold the transitions' numbers on the host, where its wheels' sampler works; what they
    draw is gathered as for the cumulated sum."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    from sharpwave.run.graphs import Captured

    device, size = agent.device, agent.config.batch_size
    sampler = PrioritizedSampler(rows, alpha=agent.config.alpha, beta=0.4)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows), sampler=sampler, batch_size=size, priority_key="td_error"
    )
    buffer.extend(TensorDict({"slot": torch.arange(rows)}, [rows]))
    buffer.update_priority(torch.arange(rows), torch.rand(rows))

    def draw() -> tuple[Any, "Tensor", "Tensor"]:
        drawn: Any = buffer.sample()
        weights = drawn[next(name for name in ("priority_weight", "_weight") if name in drawn)]
        return drawn["index"], drawn["slot"].to(device), weights.to(device)

    def step() -> None:
        index, slot, weights = draw()
        td_error = train(gather(slot, weights))
        buffer.update_priority(index, td_error.abs().cpu())

    result: dict[str, float | str] = {"torchrl_us": clock.us(lambda n: [step() for _ in range(n)], clock.count)}
    if device.type == "cuda":
        slots = torch.zeros(size, dtype=torch.int64, device=device)
        given, errors = torch.ones(size, device=device), torch.zeros(size, device=device)

        def network() -> None:
            errors.copy_(train(gather(slots, given)))

        learn = Captured(network, device)

        def graph_step() -> None:
            index, slot, weights = draw()
            slots.copy_(slot)
            given.copy_(weights)
            learn()
            buffer.update_priority(index, errors.abs().cpu())

        for _ in range(4):
            graph_step()
        result["torchrl_graph_us"] = clock.us(lambda n: [graph_step() for _ in range(n)], clock.count)
    return result


def random_env(num_envs: int, device: Any, shape: tuple[int, ...]) -> Any:
    """Fixed random observations, uint8 for images; episodes of 100 steps."""
    import torch

    from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv

    class Random(TensorEnv):
        def __init__(self) -> None:
            dtype = torch.uint8 if len(shape) > 1 else torch.float32
            super().__init__("benchmark", num_envs, device, Observation(shape, dtype), Discrete((ACTIONS,)))
            self.t = self._keep("t", torch.zeros(num_envs, dtype=torch.int64))
            self.shown = torch.randint(0, 255, (num_envs, *shape), device=self.device).to(dtype)

        def _begin(self) -> None:
            torch.remainder(torch.arange(num_envs, device=self.device), 100, out=self.t)

        def _observe(self) -> Reset:
            return Reset(self.shown.clone())

        def _step(self, action: "Tensor") -> Step:
            self.t.add_(1)
            no = torch.zeros_like(self.t, dtype=torch.bool)
            return Step(self.shown, (action == 0).float(), self.t % 100 == 0, no, self.shown)

    return Random()


def main(options: DQNBenchmark) -> int:
    """Measure every network and print the table, or JSON."""
    import torch

    from sharpwave.run import threads
    from sharpwave.run.bench_train import machine

    options = options.resolved(torch.cuda.is_available())
    with threads.use(options.threads):
        rows = [measure(options, network) for network in options.network or ()]
        where = machine(options.device)
    if options.json:
        print(json.dumps({"machine": where, "options": asdict(options), "results": rows}, indent=2))
        return 0
    print(f"{', '.join(where.values())}; batches of {options.batch_size} from {options.capacity:,} transitions")
    for row in rows:
        print(f"\n{row['network']} ({row['dtype']}): {row['updates_per_second']:,.0f} updates/s")
        for name, text in TEXTS.items():
            if name in row:
                ratio = f"  {row[name] / row['update_us']:.2f} x ours" if name in PEERS else ""
                print(f"  {text:58} {row[name]:10,.1f} us{ratio}")
        print(f"  {'replay (draw, gather, priorities) of an update':58} {100 * row['replay_share']:10.1f} %")
        if "torchrl_problem" in row:
            print(f"  torchrl is left out: {row['torchrl_problem']}")
    return 0


TEXTS = {
    "update_us": "an update",
    "sample_us": "  draw and gather, alone",
    "forward_us": "  three forward passes and the loss, alone",
    "backward_us": "  backward",
    "optimizer_us": "  optimizer",
    "priorities_us": "  priorities, alone",
    "step_us": "a step of all environments",
    "torchrl_us": "an update on torchrl's prioritized buffer",
    "torchrl_graph_us": "  the same, its network as a captured graph",
    "cumsum_us": "an update on a cumulated sum and binary search",
    "cumsum_graph_us": "  the same, as one captured graph",
}
PEERS = ("torchrl_us", "torchrl_graph_us", "cumsum_us", "cumsum_graph_us")
