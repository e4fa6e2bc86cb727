"""Parity cases of the sum tree: after histories of updates, leaves, sums and draws equal the reference's exactly."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sharpwave.ops._backends import Backend
from sharpwave.ops.sumtree import (
    Tree,
    sum_tree,
    tree_extrema,
    tree_rebuild,
    tree_sample,
    tree_total,
    tree_update,
    tree_update_priorities,
)
from sharpwave.run.parity import Outcome, backends_on, relative_error

# Draws whose indices must agree, every one.
MANY = 1_000_000


def cases(device: str) -> Iterator[Outcome]:
    gpu = torch.device(device).type == "cuda"
    for backend in backends_on("sumtree", device):
        interpreted = backend == "triton" and not gpu
        for capacity in (1, 15, 257, 5000) if interpreted else (1, 15, 257, 70_000, 1_000_003):
            yield from _history(backend, device, capacity, 24 if interpreted else 10_000)
        yield _priorities(backend, device)
        if not interpreted:
            yield _draws(backend, device, MANY)


def _values(n: int, seed: int) -> Tensor:
    """Heavy-tailed values, with zeros and each kind of invalid one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.exp(torch.rand(n, generator=generator) * 37 - 24)
    values[torch.rand(n, generator=generator) < 0.2] = 0
    bad = torch.tensor([torch.nan, torch.inf, -1.0, 2.0**21])
    values[: min(4, n - 1)] = bad[: min(4, n - 1)]
    return values


def _pair(device: str, capacity: int, interpreted: bool) -> tuple[Tree, Tree]:
    # Different fan-outs on purpose: results must not depend on them.
    return sum_tree(capacity, extrema=True, fanout=8), sum_tree(
        capacity, device, extrema=True, fanout=16 if interpreted else None
    )


def _history(backend: Backend, device: str, capacity: int, draws: int) -> Iterator[Outcome]:
    want, got = _pair(device, capacity, draws < 100)
    generator = torch.Generator().manual_seed(capacity)
    for step, n in enumerate((33, 1, 64, 7) if draws < 100 else (33, 1, 1000, 9000, 256)):
        indices = torch.randint(0, capacity, (n,), generator=generator)
        values = _values(n, step)
        invalid = ("refuse", "clamp")[step % 2]
        tree_update(want, indices, values, invalid=invalid, backend="reference")
        tree_update(got, indices.to(device), values.to(device), invalid=invalid, backend=backend)
    differs = (want.leaves != got.leaves.cpu()).sum() + (want.status != got.status.cpu()).sum()
    differs += tree_total(want) != tree_total(got).cpu()
    differs += sum(a != b.cpu() for a, b in zip(tree_extrema(want), tree_extrema(got), strict=True))
    fresh = sum_tree(capacity, device, extrema=True, fanout=got.fanout)
    fresh.leaves.copy_(got.leaves)
    tree_rebuild(fresh, backend=backend)
    undrifted = torch.equal(fresh.nodes, got.nodes)
    if fresh.extrema is not None and got.extrema is not None:
        undrifted = undrifted and torch.equal(fresh.extrema, got.extrema)
    yield Outcome(f"tree_update {backend} capacity={capacity}", float(differs), 0.0, undrifted)
    if tree_total(want) == 0:
        return
    for stratified in (False, True):
        results = []
        runs: list[tuple[Tree, Backend]] = [(want, "reference"), (got, backend), (got, backend)]
        for tree, name in runs:
            offset = torch.full((1,), 2**33, device=tree.storage.device)
            draw = tree_sample(tree, draws, -1, offset, stratified=stratified, backend=name)
            results.append((draw.indices.cpu(), draw.values.cpu()))
        error = float((results[0][0] != results[1][0]).sum() + (results[1][1] <= 0).sum())
        kind = "stratified" if stratified else "independent"
        case = f"tree_sample {backend} capacity={capacity} {kind} {draws} draws"
        yield Outcome(case, error, 0.0, torch.equal(results[1][0], results[2][0]))


def _priorities(backend: Backend, device: str) -> Outcome:
    trees = [*_pair(device, 500, True), sum_tree(500, device)]
    tops = [torch.ones(1, device=tree.storage.device) for tree in trees]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        indices = torch.randint(0, 500, (64,), generator=generator)
        td_error = torch.randn(64, generator=generator).bfloat16()
        td_error[::20] = torch.nan
        names: list[Backend] = ["reference", backend, backend]
        for tree, top, name in zip(trees, tops, names, strict=True):
            where = tree.storage.device
            tree_update_priorities(tree, indices.to(where), td_error.to(where), top, alpha=0.6, backend=name)
    want, got, again = trees
    error = relative_error(got.leaves, want.leaves) if torch.equal(tops[0], tops[1].cpu()) else torch.inf
    # A float32 power, of a few units in the last place.
    case = f"tree_update_priorities {backend} bfloat16"
    return Outcome(case, error, 2e-6, torch.equal(got.leaves, again.leaves))


def _draws(backend: Backend, device: str, draws: int) -> Outcome:
    """A million draws from a million leaves, the reference's in parts, as its descent is n by fan-out wide."""
    want, got = _pair(device, 1_000_000, False)
    want.leaves.copy_(_values(1_000_000, 1).nan_to_num(0.0, 0.0).clamp(0, 2.0**20))
    got.leaves.copy_(want.leaves)
    tree_rebuild(want, backend="reference")
    tree_rebuild(got, backend=backend)
    offset = torch.zeros(1, dtype=torch.int64)
    parts = [tree_sample(want, draws // 20, 5, offset, backend="reference").indices for _ in range(20)]
    runs = []
    for _ in range(2):
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        runs.append(tree_sample(got, draws, 5, offset, backend=backend).indices.cpu())
    error = float((torch.cat(parts) != runs[0]).sum())
    return Outcome(f"tree_sample {backend} capacity=1000000 {draws} draws", error, 0.0, torch.equal(runs[0], runs[1]))
