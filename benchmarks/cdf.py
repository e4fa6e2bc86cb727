"""Prefix sums, draws from them, and the trainer's one-launch draw: python -m benchmarks.cdf

On a GPU a call is timed as replays of a captured graph. Floor: every byte read and written once, at the speed of an
elementwise kernel over a gigabyte in the same run. Writes benchmarks/results/cdf-DEVICE.json.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import _timing
from sharpwave.ops.cdf import build_cdf, draw_segments, sample_cdf


def gate(cdf: Tensor, weights: Tensor) -> None:
    """Right before it is timed: 2e-7 of the float64 sum everywhere, and monotone."""
    want = torch.cumsum(weights.double().cpu(), 0)
    error = ((cdf.double().cpu() - want).abs() / want.clamp(min=1e-300)).max().item()
    if error > 2e-7 or not (cdf.diff() >= 0).all():
        raise AssertionError(f"build_cdf is wrong at n={weights.numel()}: error {error:.1e}")


def columns(n: int, device: str) -> dict:
    weights = torch.rand(n, device=device) + 0.01
    out, peer = torch.empty_like(weights), torch.empty_like(weights)
    offset, beta = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor(0.4, device=device)
    gate(build_cdf(weights, out), weights)
    calls = {
        "build_cdf": lambda: build_cdf(weights, out),
        "torch.cumsum": lambda: torch.cumsum(weights, 0, out=peer),
        "sample_cdf 256": lambda: sample_cdf(out, 256, 0, offset),
        "torch.searchsorted 256": lambda: torch.searchsorted(out, torch.rand(256, device=device) * out[-1]),
    }
    if n <= 1 << 14:
        calls["draw_segments 256"] = lambda: draw_segments(weights, 256, 0, offset, beta)
    if n < 1 << 24:  # its limit
        calls["torch.multinomial 256"] = lambda: torch.multinomial(weights, 256, replacement=True)
    return calls


def pass_us(n: int) -> float:
    """Of a kernel: a graph's copies run on copy engines, which are slower."""
    source, target = (torch.zeros(n, device="cuda") for _ in range(2))
    return _timing.graph_us(lambda: torch.neg(source, out=target), calls=2)["median"]


def rows(device: str) -> Iterator[dict]:
    torch.set_num_threads(1)
    if device == "cpu":
        for n in (8192, 1 << 18, 1 << 20):
            yield {"n": n, **_timing.interleaved_us(columns(n, device), 30)}
        return
    floor = pass_us(1 << 28)
    for n in (8192, 1 << 18, 1 << 20, 1 << 25):
        times = {name: _timing.graph_us(call) for name, call in columns(n, device).items()}
        yield {"n": n, "floor": {"median": floor * n / (1 << 28)}, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    _timing.write("cdf", device, rows(device))


if __name__ == "__main__":
    main()
