"""The sum tree's cycle of updates and draws beside its peers: python -m benchmarks.sumtree [--sizes 1000000 ...]

CPU, one thread: update 256 leaves, draw 256. Peers, where installed: torchrl's bare C++ tree (`torchrl._torchrl`, or a
`_torchrl` built from its sources on the path), cpprb's buffer, and a scan of all leaves. Rounds are interleaved. GPU:
1024 bfloat16 TD errors in, 1024 draws and their priorities out, as replays of a captured graph. Writes
benchmarks/results/sumtree-DEVICE.json.
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import _timing
from sharpwave.ops.cdf import build_cdf, sample_cdf
from sharpwave.ops.sumtree import Tree, sum_tree, tree_rebuild, tree_sample, tree_update, tree_update_priorities

BATCH = 256
Calls = dict[str, Callable[[], object]]


def filled(size: int, device: str) -> Tree:
    tree = sum_tree(size, device)
    tree.leaves.uniform_(0.01, 1)
    tree_rebuild(tree)
    return tree


def gate(tree: Tree) -> None:
    """Right before it is timed: sums are a fresh build's, and draws are positive and in range."""
    draw = tree_sample(tree, 10_000, 0, torch.zeros(1, dtype=torch.int64, device=tree.storage.device))
    before = tree.nodes.clone()
    tree_rebuild(tree)
    if not torch.equal(before, tree.nodes) or not (draw.values > 0).all() or draw.indices.max() >= tree.capacity:
        raise AssertionError(f"the sum tree is wrong at {tree.capacity} leaves")


def batches(size: int) -> tuple[itertools.cycle, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return itertools.cycle([torch.randint(0, size, (BATCH,), generator=generator) for _ in range(500)]), torch.rand(
        BATCH, generator=generator
    )


def ours(size: int) -> Calls:
    tree, offset = filled(size, "cpu"), torch.zeros(1, dtype=torch.int64)
    index, values = batches(size)
    tree_update(tree, next(index), values)
    gate(tree)
    return {
        "sharpwave update": lambda: tree_update(tree, next(index), values),
        "sharpwave draw": lambda: tree_sample(tree, BATCH, 0, offset),
    }


def torchrl(size: int) -> Calls:
    """The bare tree alone: no minimum tree, no weights, no data."""
    try:
        from torchrl._torchrl import SumSegmentTreeFp32
    except ImportError:
        try:
            from _torchrl import SumSegmentTreeFp32
        except ImportError:
            return {}
    tree = SumSegmentTreeFp32(size)
    index, values = batches(size)
    for start in range(0, size, 10_000_000):
        part = torch.arange(start, min(size, start + 10_000_000))
        tree[part] = torch.rand(len(part))

    def draw() -> None:
        found = tree.scan_lower_bound(torch.rand(BATCH) * tree.query(0, size))
        tree[found]

    return {"torchrl tree update": lambda: tree.update(next(index), values), "torchrl tree draw": draw}


def cpprb(size: int) -> Calls:
    try:
        from cpprb import PrioritizedReplayBuffer
    except ImportError:
        return {}
    if size > 10_000_000:
        return {}
    buffer = PrioritizedReplayBuffer(size, {"x": {"dtype": np.float32}})
    for start in range(0, size, 100_000):
        n = min(100_000, size - start)
        buffer.add(x=np.zeros(n, np.float32), priorities=torch.rand(n).numpy())
    index, values = batches(size)
    return {
        "cpprb update": lambda: buffer.update_priorities(next(index).numpy(), values.numpy()),
        "cpprb sample": lambda: buffer.sample(BATCH, beta=0.4),
    }


def scan(size: int) -> Calls:
    if size > 1_000_000:
        return {}
    leaves = torch.rand(size)

    def draw() -> None:
        total = torch.cumsum(leaves.double(), 0)
        torch.searchsorted(total, torch.rand(BATCH, dtype=torch.float64) * total[-1])

    return {"cumsum + searchsorted": draw}


def gpu_row(size: int) -> dict:
    tree = filled(size, "cuda")
    n = 1024
    td_error, top = torch.randn(n, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    offset, index = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.randint(0, size, (n,), device="cuda")
    state = [index]

    def cycle() -> None:
        tree_update_priorities(tree, state[0], td_error, top, alpha=0.6)
        state[0] = tree_sample(tree, n, 0, offset).indices

    row = {
        "n": size,
        "cycle": _timing.graph_us(cycle),
        "update": _timing.graph_us(lambda: tree_update_priorities(tree, index, td_error, top, alpha=0.6)),
        "draw": _timing.graph_us(lambda: tree_sample(tree, n, 0, offset)),
    }
    gate(tree)
    if size <= 1 << 25:
        leaves, cdf = tree.leaves.clone(), torch.empty(size, device="cuda")

        def whole(build: Callable[[], object], draw: Callable[[], torch.Tensor]) -> Callable[[], None]:
            def call() -> None:
                leaves[index] = (td_error.float().abs() + 1e-6) ** 0.6
                build()
                leaves[draw()]

            return call

        def searched() -> torch.Tensor:
            return torch.searchsorted(cdf, torch.rand(n, device="cuda") * cdf[-1])

        row["build_cdf + sample_cdf"] = _timing.graph_us(
            whole(lambda: build_cdf(leaves, cdf), lambda: sample_cdf(cdf, n, 0, offset))
        )
        row["cumsum + searchsorted"] = _timing.graph_us(whole(lambda: torch.cumsum(leaves, 0, out=cdf), searched))
    if size < 1 << 24:
        row["torch.multinomial"] = _timing.graph_us(lambda: torch.multinomial(tree.leaves, n, replacement=True))
    return row


def cpu_row(size: int, rounds: int) -> dict:
    row = {"n": size, **_timing.interleaved_us(ours(size) | torchrl(size), rounds)}
    # By themselves: these go through so much memory that the trees would start with empty caches.
    for peer in (cpprb, scan):
        row |= _timing.interleaved_us(peer(size), 30)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        rows = (gpu_row(size) for size in args.sizes or (1 << 20, 1 << 25, 1 << 30))
    else:
        rows = (cpu_row(size, args.rounds) for size in args.sizes or (1_000_000, 10_000_000))
    _timing.write("sumtree", args.device, rows)


if __name__ == "__main__":
    main()
