"""A function on static tensors, run as one CUDA graph."""

import ctypes
import functools
import gc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

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
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self.generators:
            graph.register_generator_state(generator)
        # JAX's threads may allocate meanwhile, which a global capture would take for a mistake of its own.
        capture = torch.cuda.graph(graph, stream=_capture_stream(self.device), capture_error_mode="thread_local")
        with _no_collection(), capture:
            self.fn()
        # Its beginning filled generators' seeds and offsets on its own stream; the replay, which fills them again, may
        # be on another one.
        torch.cuda.current_stream(self.device).wait_stream(_capture_stream(self.device))
        graph.instantiate()
        return graph

    def release(self) -> None:
        """Let go of the graph, and of what it holds on to; the next call captures it anew."""
        self.graph = None

    def nodes(self) -> int | None:
        """Number of the graph's nodes (kernels, copies, fills); None before the capture, or where CUDA cannot say."""
        if self.graph is None or torch.version.cuda is None:
            return None
        try:
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        except OSError:
            return None
        count = ctypes.c_size_t()
        failed = runtime.cudaGraphGetNodes(ctypes.c_void_p(self.graph.raw_cuda_graph()), None, ctypes.byref(count))
        return None if failed else count.value

    def _on_side_stream(self, fn: Callable[[], None]) -> None:
        stream, current = _capture_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            fn()
        current.wait_stream(stream)


@contextmanager
def _no_collection() -> Generator[None]:
    """Nothing in cycles is let go of inside: graphs and memory of a trainer from before would invalidate a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where functions warm up and are captured, all of them.

    Autograd's engine makes a backward pass wait for the stream on which a weight first met it, and may let go of a
    warm-up's nodes as late as during the capture: on a stream of the warm-up's own, it would wait for work outside.
    """
    return torch.cuda.Stream(device, priority=-1)  # a branch takes what this leaves free


class Branch:
    """Work beside the current stream: a side stream of a CUDA device, a parallel branch in a captured graph.

        branch = Branch(device)
        with branch:          # after all that was enqueued so far
            ...
        ...                   # at the same time
        branch.join()         # what follows waits for the branch

    Of two launches that wait for the same third one, a graph lets the one first enqueued follow it at once, and the
    other a microsecond later. So that the chain's is the first, `branch.fork()` marks where the next block begins, and
    the block is entered after the chain has gone on.

    On other devices the block simply runs. What a block allocates, and what it reads, must not be freed before `join`:
    `keep` it where nothing else holds it.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: list[torch.Tensor] = []
        self._forked = False

    def fork(self) -> None:
        """Let the next block begin after what is enqueued by now, though more is before it is entered."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._forked = True

    def __enter__(self) -> None:
        if self._stream is not None:
            if not self._forked:
                self.fork()
            self._forked = False
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error) -> None:
        if self._stream is not None:
            self._context.__exit__(*error)

    def join(self) -> None:
        """Make the current stream wait for what was enqueued in the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()

    def keep(self, *tensors: torch.Tensor) -> None:
        """Hold tensors until the branch is joined: else their memory might be given to what runs beside it."""
        self._kept += tensors
