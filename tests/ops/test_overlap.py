"""Launches that are set up while the one before them still runs read what it wrote, and nothing older."""

import pytest
import torch

from sharpwave.ops.cdf import build_cdf, draw_segments
from sharpwave.ops.sumtree import TreeDraw, sum_tree, tree_rebuild, tree_sample, tree_update_priorities


class Chain:
    """Every op reads what the one before it wrote."""

    def __init__(self):
        n, self.weights = 256, torch.rand(4096, generator=torch.Generator().manual_seed(0)).cuda()
        self.tree = sum_tree(4096, "cuda")
        self.tree.leaves.copy_(self.weights)
        tree_rebuild(self.tree)
        self.top, self.beta = torch.ones(1, device="cuda"), torch.tensor(0.4, device="cuda")
        self.offset = torch.zeros(1, dtype=torch.int64, device="cuda")
        total = torch.empty((), dtype=torch.float64, device="cuda")
        self.draw = TreeDraw(torch.arange(n, device="cuda"), torch.ones(n, device="cuda"), total)
        self.cdf = torch.empty(4096, device="cuda")
        self.segments = self.draw.indices

    def ops(self):
        yield lambda: tree_update_priorities(self.tree, self.draw.indices, self.draw.values, self.top, alpha=0.6)
        yield lambda: tree_sample(self.tree, 256, 1, self.offset, out=self.draw)
        yield lambda: build_cdf(self.tree.leaves, self.cdf)

        def draw():
            self.segments, importance, _ = draw_segments(self.cdf, 256, 2, self.offset, self.beta)
            self.draw.values.copy_(importance)

        yield draw

    def state(self):
        return self.tree.leaves, self.tree.nodes, self.cdf, self.segments, *self.draw, self.offset, self.top


@pytest.mark.gpu
def test_a_graph_of_dependent_launches_equals_one_launch_at_a_time():
    one, many = Chain(), Chain()
    graph = torch.cuda.CUDAGraph()
    for _ in range(101):
        for op in one.ops():
            op()
            torch.cuda.synchronize()
    for op in many.ops():
        op()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(10):
            for op in many.ops():
                op()
    for _ in range(10):
        graph.replay()
    for a, b in zip(one.state(), many.state(), strict=True):
        assert torch.equal(a, b)
