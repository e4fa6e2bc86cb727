"""Replay buffers beside each other: python -m benchmarks.replay [--sizes 1000000 10000000]

CPU, one thread, transitions of CartPole's shape, batches of 256 with data and weights, additions of 1024. Peers that
are installed (cpprb, tianshou, torchrl) are columns of the same run, their rounds interleaved with ours. On a GPU
(--device cuda): 84x84 observations, against torch.index_select of the same bytes, as replays of a captured graph.
Writes benchmarks/results/replay-DEVICE.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from sharpwave import PrioritizedReplay

RESULTS = Path(__file__).parent / "results"
BATCH, ADD = 256, 1024
ALPHA, BETA = 0.6, 0.4
Calls = dict[str, Callable[[], object]]


def transitions(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return dict(
        obs=rng.standard_normal((n, 4), np.float32),
        action=rng.integers(0, 2, n),
        reward=np.ones(n, np.float32),
        next_obs=rng.standard_normal((n, 4), np.float32),
        terminated=rng.random(n) < 0.01,
        truncated=np.zeros(n, bool),
    )


def td_errors(n: int, seed: int = 1) -> np.ndarray:
    return np.abs(np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def ours(size: int) -> Calls:
    buffer = PrioritizedReplay(size, alpha=ALPHA, beta=BETA)
    buffer.add(transitions(size))
    buffer.update_priorities(torch.arange(size), torch.from_numpy(td_errors(size)))
    new, td, out = transitions(ADD), torch.from_numpy(td_errors(BATCH)), buffer.sample(BATCH)

    def check() -> None:
        batch = buffer.sample(100_000)
        leaves = buffer.state.tree.leaves.double()
        torch.testing.assert_close(
            batch.probabilities.double(), leaves[batch.indices] / leaves.sum(), rtol=1e-5, atol=0
        )

    def cycle() -> None:
        batch = buffer.sample(BATCH)
        buffer.update_priorities(batch.indices, td, batch.generations)

    def cycle_out() -> None:
        buffer.sample(BATCH, out=out)
        buffer.update_priorities(out.indices, td, out.generations)

    check()
    return {"sample + update": cycle, "sample + update, out=": cycle_out, "add 1024": lambda: buffer.add(new)}


def cpprb(size: int) -> Calls:
    from cpprb import PrioritizedReplayBuffer

    scalar: dict = {}
    spec = {"obs": {"shape": 4}, "action": {"dtype": np.int64}, "reward": scalar, "next_obs": {"shape": 4}}
    flags = {"terminated": {"dtype": np.bool_}, "truncated": {"dtype": np.bool_}}
    buffer = PrioritizedReplayBuffer(size, spec | flags, alpha=ALPHA)
    buffer.add(**transitions(size))
    buffer.update_priorities(np.arange(size), td_errors(size))
    new, td = transitions(ADD), td_errors(BATCH)

    def cycle() -> None:
        batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["indexes"], td)

    return {"sample + update": cycle, "add 1024": lambda: buffer.add(**new)}


def tianshou(size: int) -> Calls:
    from tianshou.data import Batch, PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(size, alpha=ALPHA, beta=BETA)
    names = dict(obs="obs", action="act", reward="rew", next_obs="obs_next")
    data = {names.get(k, k): x for k, x in transitions(size).items()}
    buffer.add(Batch(**{k: x[0] for k, x in data.items()}, info={}))
    # It adds one transition at a time, so its arrays are filled directly.
    for key, x in data.items():
        getattr(buffer._meta, key)[:] = x
    buffer._size = size
    buffer.update_weight(np.arange(size), td_errors(size))
    td = td_errors(BATCH)

    def cycle() -> None:
        _, indices = buffer.sample(BATCH)
        buffer.update_weight(indices, td)

    return {"sample + update": cycle}


def torchrl(size: int) -> Calls:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    sampler = PrioritizedSampler(size, ALPHA, BETA)  # raises where its compiled extension does not load
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=BATCH)

    def as_dict(n: int) -> TensorDict:
        return TensorDict({k: torch.from_numpy(x) for k, x in transitions(n).items()}, [n])

    buffer.extend(as_dict(size))
    buffer.update_priority(torch.arange(size), torch.from_numpy(td_errors(size)))
    new, td = as_dict(ADD), torch.from_numpy(td_errors(BATCH))

    def cycle() -> None:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], td)

    return {"sample + update": cycle, "add 1024": lambda: buffer.extend(new)}


def time_us(call: Callable[[], object], calls: int = 150) -> float:
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def on_cpu(sizes: list[int], rounds: int) -> dict:
    torch.set_num_threads(1)
    table: dict = {}
    for size in sizes:
        columns: dict[tuple[str, str], Callable] = {}
        for make in (ours, cpprb, tianshou, torchrl):
            name = "sharpwave" if make is ours else make.__name__
            try:
                columns |= {(name, what): call for what, call in make(size).items()}
            except (ImportError, RuntimeError, TypeError) as error:
                print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        times: dict[tuple[str, str], list[float]] = {key: [] for key in columns}
        for _ in range(rounds):  # interleaved, so that a busy moment of the machine meets all
            for key, call in columns.items():
                times[key].append(time_us(call))
        for (name, what), found in times.items():
            row = {"median": round(statistics.median(found), 1), "lowest": round(min(found), 1)}
            table.setdefault(f"{size}", {}).setdefault(what, {})[name] = row
            print(f"{size:>10} {what:24} {name:10} median {row['median']:8.1f} us   lowest {row['lowest']:8.1f} us")
    return table


def graph_us(call: Callable[[], object], calls: int = 10, rounds: int = 50) -> float:
    """Median time of a call within replays of a graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found)


def on_gpu(size: int, envs: int = 64) -> dict:
    table = {}
    for frames in (1, 4):
        buffer = PrioritizedReplay(size, "cuda", num_envs=envs, frame_stack=frames)
        obs = torch.randint(0, 255, (envs, 84, 84), dtype=torch.uint8, device="cuda")
        flags = torch.zeros(envs, dtype=torch.bool, device="cuda")
        action = torch.zeros(envs, dtype=torch.int64, device="cuda")
        step = dict(obs=obs, next_obs=obs, action=action, reward=action.float(), terminated=flags, truncated=flags)
        for _ in range(buffer.state.layout.ring + 5):
            buffer.add(step)
        every = torch.arange(buffer.capacity, device="cuda")
        buffer.update_priorities(every, torch.rand(buffer.capacity, device="cuda"))
        batch, td = buffer.sample(BATCH), torch.rand(BATCH, device="cuda")

        def sample(buffer=buffer, batch=batch) -> None:
            buffer.sample(BATCH, out=batch)

        def update(buffer=buffer, batch=batch, td=td) -> None:
            buffer.update_priorities(batch.indices, td, batch.generations)

        def cycle(sample=sample, update=update) -> None:
            sample()
            update()

        origin = buffer.storage.tensors["obs"]
        first = torch.randint(0, len(origin) - 1, (BATCH * frames,), device="cuda")
        outs = [torch.empty(BATCH * frames, 84, 84, dtype=torch.uint8, device="cuda") for _ in range(2)]

        def index_select(origin=origin, first=first, following=first + 1, outs=outs) -> None:
            torch.index_select(origin, 0, first, out=outs[0])
            torch.index_select(origin, 0, following, out=outs[1])

        def add(buffer=buffer, step=step) -> None:
            buffer.add(step)

        calls = dict(sample=sample, update=update, cycle=cycle, index_select=index_select, add=add)
        row = {name: round(graph_us(call), 2) for name, call in calls.items()}
        table[f"{size}, {frames} frames"] = row
        print(frames, "frames", row, "cycle / index_select", round(row["cycle"] / row["index_select"], 2))
    return table


def machine(device: str) -> dict:
    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "load average at the end": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "commit": commit,
        **{p: found(p) for p in ("torch", "numba", "numpy", "cpprb", "tianshou", "torchrl")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    table = on_cpu(args.sizes, args.rounds) if args.device == "cpu" else on_gpu(args.sizes[0])
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"replay-{args.device}.json"
    path.write_text(json.dumps({"machine": machine(args.device), "us a call": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
