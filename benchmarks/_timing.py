"""Time of a call, and what a table's file says about the machine."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
Spread = dict[str, float]


def captured(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls, after one that compiles."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def graph_us(call: Callable[[], object], calls: int = 20, replays: int = 30) -> Spread:
    """Microseconds a call on a GPU: `calls` of them in one captured graph, over the events around its replays."""
    graph = captured(call, calls)
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return _spread(times[3:])


def event_us(call: Callable[[], object], repeats: int = 30) -> Spread:
    """Microseconds a call on a GPU that cannot be captured, its launches included."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return _spread(times[3:])


def interleaved_us(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, Spread]:
    """Microseconds a call on a CPU, every column once a round, so that a busy machine is busy for all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 5):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: _spread(column[5:]) for name, column in times.items()}


def _spread(times: list[float]) -> Spread:
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


def machine(device: str) -> dict[str, object]:
    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "commit": commit,
        **{p: found(p) for p in ("torch", "triton", "numba", "cpprb", "torchrl")},
    }


def write(name: str, device: str, rows: Iterable[dict]) -> None:
    """Print each row as it comes, and keep them under benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device}.json"
    kept = []
    for row in rows:
        kept.append(row)
        line = "  ".join(f"{k} {v['median']:.2f}" if isinstance(v, dict) else f"{k} {v}" for k, v in row.items())
        print(line, flush=True)
        path.write_text(json.dumps({"machine": machine(device), "rows": kept}, indent=1) + "\n")
