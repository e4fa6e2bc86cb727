"""The MinGRU scan beside the memory's own time and its peers: python -m benchmarks.mingru

T = 128 and H = 256 on a GPU, T = 64 and H = 128 on a CPU. A GPU call is timed as replays of a captured graph, medians;
a peer's backward is its forward and backward less its forward. Writes benchmarks/results/mingru-DEVICE.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numba
import torch
from torch import Tensor
from torch.nn import functional as F

from sharpwave.ops import _backends
from sharpwave.ops.mingru import mingru_layer, mingru_scan, mingru_step

RESULTS = Path(__file__).parent / "results"


# ---- the same mathematics elsewhere


def log_space(combined: Tensor, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The form of Feng et al. 2024, appendix B: cumulated log coefficients and logcumsumexp. Needs state > 0."""
    hidden, gate, proj = combined.float().chunk(3, dim=-1)
    log_c = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
    log_values = torch.cat([state.log()[:, None], log_c - F.softplus(-gate)], dim=1)
    log_decay = F.pad(-F.softplus(gate).cumsum(dim=1), (0, 0, 1, 0))
    h = (log_decay + torch.logcumsumexp(log_values - log_decay, dim=1)).exp()[:, 1:]
    p = proj.sigmoid()
    return (p * h + (1 - p) * x).to(x.dtype), h[:, -1]


def peers(h: int, dtype: torch.dtype, device: str, slow: bool) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """Name -> f(combined, state, x) -> outputs."""
    weight = (torch.randn(3 * h, h, device=device) / h**0.5).to(dtype).requires_grad_()
    table: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        "sharpwave": mingru_scan,
        "sharpwave with its projection": lambda c, s, x: mingru_layer(x, weight, s),
        "log-space, torch": log_space,
    }
    if device == "cuda":
        gru = torch.nn.GRU(h, h, batch_first=True, device=device, dtype=dtype)
        table["torch.nn.GRU (cuDNN, with its projection)"] = lambda c, s, x: gru(x, s[None].to(x.dtype))
        if not slow:
            return table
        table["log-space, torch.compile"] = torch.compile(log_space)
        try:
            from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
        except ImportError:
            return table
        # The recurrence alone: log decay and input come ready, no gates, no highway: 3 tensors where ours moves 5.
        table["fla HGRN fused_recurrent (no gates)"] = lambda c, s, x: fused_recurrent_hgrn(x, -x.abs())[:1]
        table["fla HGRN chunk (no gates)"] = lambda c, s, x: chunk_hgrn(x, -x.abs())[:1]
    return table


# ---- timing


def time_us(f: Callable[[], object], device: str, repeat: int = 30) -> float:
    """Median microseconds of a call."""
    for _ in range(3):
        f()
    if device == "cpu":
        return statistics.median(_wall(f) for _ in range(repeat))
    inner = 10
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            f()
    graph.replay()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


def _wall(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return (time.perf_counter() - start) * 1e6


def measure(f: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], dout: Tensor, device: str) -> dict[str, float]:
    leaves = [v.clone().requires_grad_() for v in tensors]
    trained = [*leaves, *getattr(f, "parameters", ())]

    def forward() -> None:
        with torch.no_grad():
            f(*tensors)

    def both() -> None:
        torch.autograd.grad(f(*leaves)[0], trained, dout, allow_unused=True)

    fwd, total = time_us(forward, device), time_us(both, device)
    return {"forward": fwd, "backward": total - fwd, "both": total}


def kernels(tensors: list[Tensor], dout: Tensor, device: str) -> dict[str, float]:
    """Our kernels alone: the forward that keeps its checkpoints, and the three backwards."""
    combined, state, x = tensors
    impl = _backends.load("mingru", x.device)
    _, last, kept = impl.mingru_scan(combined, state, x, None, True)
    dnext = torch.randn_like(last)
    times = {"forward": time_us(lambda: impl.mingru_scan(combined, state, x, None, True), device)}
    for order in ("tiled", "fast", "serial") if device == "cuda" else ("tiled",):
        backward = lambda o=order: impl.mingru_scan_backward(dout, dnext, combined, x, None, kept, o)  # noqa: E731
        times[f"backward {order}"] = time_us(backward, device)
    reset = torch.rand(x.shape[:2], device=device) < 0.02
    times["forward with resets"] = time_us(lambda: impl.mingru_scan(combined, state, x, reset, True), device)
    again = lambda: impl.mingru_scan_backward(dout, dnext, combined, x, reset, kept, "tiled")  # noqa: E731
    times["backward with resets"] = time_us(again, device)
    step = (combined[:, 0].contiguous(), state, x[:, 0].contiguous())
    with torch.no_grad():
        times["step"] = time_us(lambda: mingru_step(*step), device)
    return times


def floor(elements: int, size: int, device: str) -> dict[str, float]:
    """Time to copy what forward (5 tensors) and backward (9) must read and write."""
    times = {}
    for name, n in (("forward", 5), ("backward", 9)):
        half = torch.empty(elements * n * size // 2, dtype=torch.uint8, device=device)
        other = torch.randint_like(half, 256)
        times[name] = time_us(lambda a=half, b=other: a.copy_(b), device)
    return times


def gate(device: str) -> None:
    """Ours against float64, ahead of any timing."""
    torch.manual_seed(0)
    b, t, h = 3, 70, 40
    tensors = [torch.randn(b, t, 3 * h), torch.randn(b, h).abs() + 0.1, torch.randn(b, t, h)]
    want = mingru_scan(*(v.double() for v in tensors), backend="reference")
    theirs = log_space(*tensors)
    got = mingru_scan(*(v.to(device) for v in tensors))
    for name, values, tolerance in (("sharpwave", got, 1e-6), ("log-space", theirs, 1e-4)):
        for a, w in zip(values, want, strict=True):
            error = ((a.cpu().double() - w).norm() / w.norm()).item()
            if not error <= tolerance:
                raise SystemExit(f"{name} is off by {error:.1e}: nothing is timed")


def case(b: int, t: int, h: int, dtype: torch.dtype, device: str, slow: bool = False) -> dict:
    torch.manual_seed(0)
    tensors = [
        torch.randn(b, t, 3 * h, device=device).to(dtype),
        torch.rand(b, h, device=device) + 0.1,
        torch.randn(b, t, h, device=device).to(dtype),
    ]
    dout = torch.randn_like(tensors[2])
    row = {"B": b, "T": t, "H": h, "dtype": str(dtype).removeprefix("torch."), "peers": {}}
    row["floor"] = floor(b * t * h, tensors[2].element_size(), device)
    row["kernels"] = kernels(tensors, dout, device)
    for name, f in peers(h, dtype, device, slow).items():
        try:
            row["peers"][name] = measure(f, tensors, dout, device)
        except RuntimeError as error:  # a peer that cannot run here is a gap in the table, not the end of it
            row["peers"][name] = {"error": str(error).splitlines()[0][:100]}
    return row


def show(row: dict) -> None:
    print(f"\nB={row['B']} T={row['T']} H={row['H']} {row['dtype']}, us")
    print(f"  {'floor: a copy of the same bytes':45} {row['floor']['forward']:9.1f} {row['floor']['backward']:9.1f}")
    for name, value in row["kernels"].items():
        print(f"  {name:45} {value:9.1f}")
    print(f"  {'':45} {'forward':>9} {'backward':>9} {'both':>9} {'x ours':>7}")
    ours = row["peers"]["sharpwave"]["both"]
    for name, value in row["peers"].items():
        if "error" in value:
            print(f"  {name:45} {value['error']}")
            continue
        times = " ".join(f"{value[key]:9.1f}" for key in ("forward", "backward", "both"))
        print(f"  {name:45} {times} {value['both'] / ours:7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads, of PyTorch and Numba")
    parser.add_argument("--slow-peers", action="store_true", help="also peers that compile or tune for minutes")
    args = parser.parse_args()
    device = args.device
    if args.threads:
        torch.set_num_threads(args.threads)
        numba.set_num_threads(args.threads)
    gate(device)
    if device == "cuda":
        sizes = [(b, 128, 256, dtype) for dtype in (torch.bfloat16, torch.float32) for b in (64, 256)]
        sizes.append((2, 8192, 256, torch.bfloat16))
        name = torch.cuda.get_device_name()
    else:
        sizes = [(64, 64, 128, torch.float32)]
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"machine": name, "torch": torch.__version__, "commit": commit.stdout.strip()}
    print(about)
    rows = []
    RESULTS.mkdir(exist_ok=True)
    for size in sizes:
        rows.append(case(*size, device, args.slow_peers))
        show(rows[-1])
        (RESULTS / f"mingru-{device}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
