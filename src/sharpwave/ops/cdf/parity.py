"""Parity cases of the CDF ops: prefix sums against a serial float64 sum, draws against the reference's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sharpwave.ops._backends import Backend
from sharpwave.ops.cdf import build_cdf, build_cdf_serial, draw_segments, sample_cdf
from sharpwave.run.parity import Outcome, backends_on, relative_error

# Rounding the float64 sum once costs 6e-8, adding four neighbours in float32 up to 1.2e-7; the rest is for sums of
# tiles, cut to 36 bits.
LIMIT = 2e-7


def weights(kind: str, n: int) -> Tensor:
    """(n,) float32 of one kind: uniform, heavy-tailed over 16 decades, or sparse with long runs of zeros."""
    generator = torch.Generator().manual_seed(n)
    u = torch.rand(n, generator=generator)
    if kind == "uniform":
        return u
    if kind == "heavy":
        return torch.exp(u * 37 - 18.5)
    w = torch.where(torch.rand(n, generator=generator) < 0.01, u, 0)
    w[n // 3] = 1.0
    w[: n // 8] = 0
    return w


def cases(device: str) -> Iterator[Outcome]:
    gpu = torch.device(device).type == "cuda"
    for backend in backends_on("cdf", device):
        interpreted = backend == "triton" and not gpu
        sizes = [1, 2, 127, 1000, 8192, 8193]
        sizes += [20_000] if interpreted else [50_000, 262_144, 1_000_003]
        sizes += [1 << 25] if gpu else []
        runs = 100 if gpu else 2
        for n in sizes:
            for kind in ("uniform", "heavy", "sparse"):
                yield _build(backend, device, kind, n, runs)
        yield _serial(backend, device)
        for n in (1, 300, 8192) if interpreted else (1, 300, 8192, 16_384, 20_000):
            yield _segments(backend, device, n)
        for stratified in (False, True):
            yield _draws(backend, device, stratified, 64 if interpreted else 100_000)


def _build(backend: Backend, device: str, kind: str, n: int, runs: int) -> Outcome:
    w = weights(kind, n)
    want = torch.cumsum(w.double(), 0)
    w = w.to(device)
    out = torch.full((n,), torch.nan, device=device)
    got = build_cdf(w, out, backend=backend)
    repeats = all(torch.equal(build_cdf(w, backend=backend), got) for _ in range(runs - 1))
    step = torch.diff(got.cpu(), prepend=torch.zeros(1))
    monotone = bool((step >= 0).all() and (step[w.cpu() == 0] == 0).all())
    return Outcome(f"build_cdf {backend} {kind} n={n}", relative_error(got, want), LIMIT, repeats, monotone)


def _serial(backend: Backend, device: str) -> Outcome:
    w = weights("heavy", 500)
    got = build_cdf_serial(w.to(device), backend=backend)
    repeats = torch.equal(build_cdf_serial(w.to(device), backend=backend), got)
    error = relative_error(got, torch.cumsum(w.double(), 0))
    return Outcome(f"build_cdf_serial {backend} heavy n=500", error, LIMIT, repeats, bool((got.diff() >= 0).all()))


def _segments(backend: Backend, device: str, n: int) -> Outcome:
    w = weights("heavy", n)
    w[n // 2] = torch.nan if n > 1 else 1.0
    results = []
    places: list[tuple[Backend, str]] = [("reference", "cpu"), (backend, device), (backend, device)]
    for name, where in places:
        offset = torch.zeros(1, dtype=torch.int64, device=where)
        beta = torch.tensor(0.4, device=where)
        index, importance, bad = draw_segments(w.to(where), 256, 1, offset, beta, backend=name)
        results.append((index.cpu(), importance.cpu(), bad.cpu(), offset.cpu()))
    want, got, again = results
    same = all(torch.equal(want[i], got[i]) for i in (0, 2, 3))
    # The weights go through a float32 power, of a few units in the last place.
    error = relative_error(got[1], want[1]) if same else torch.inf
    return Outcome(f"draw_segments {backend} heavy N={n}", error, 2e-6, torch.equal(got[0], again[0]))


def _draws(backend: Backend, device: str, stratified: bool, n: int) -> Outcome:
    cdf = build_cdf(weights("sparse", 5000), backend="reference")
    results = []
    places: list[tuple[Backend, str]] = [("reference", "cpu"), (backend, device), (backend, device)]
    for name, where in places:
        offset = torch.zeros(1, dtype=torch.int64, device=where)
        results.append(sample_cdf(cdf.to(where), n, 1, offset, stratified=stratified, backend=name).cpu())
    error = float((results[0] != results[1]).sum())
    kind = "stratified" if stratified else "independent"
    return Outcome(f"sample_cdf {backend} {kind} {n} draws", error, 0.0, torch.equal(results[1], results[2]))
