"""A function on static tensors, run as one CUDA graph."""

from collections.abc import Callable, Iterable

import torch


class Captured:
    """Calls `fn()`; on a CUDA device from the third call on by replaying a graph of it.

    The first calls run eagerly on a side stream, as real calls: kernels compile and libraries set up their workspaces
    there, which a capture forbids. Then one call is captured, and every call from there on is a replay. Nothing runs
    more often than it is called. On other devices, or with enabled=False, every call is eager.

    `fn` reads and writes tensors that stay where they are (`copy_`, not assignment), never waits for the device and
    branches on no value; what it allocates belongs to the graph. Memory of several graphs may share one pool only when
    they are always replayed in the order in which they were captured.

    Args:
        fn: takes nothing, returns nothing.
        device: where it works.
        generators: random generators that `fn` draws from; replays then go on in their streams.
        enabled: False keeps it eager everywhere.
    """

    WARM_UP = 2

    def __init__(
        self,
        fn: Callable[[], None],
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        enabled: bool = True,
    ):
        self.fn = fn
        self.device = device
        self.generators = tuple(generators)
        self.enabled = enabled and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        if not self.enabled:
            self.fn()
        elif self.graph is not None:
            self.graph.replay()
        elif self._calls < self.WARM_UP:
            self._calls += 1
            self._on_side_stream(self.fn)
        else:
            self.graph = self._capture()
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            self.fn()
        return graph

    def _on_side_stream(self, fn: Callable[[], None]) -> None:
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            fn()
        current.wait_stream(stream)
