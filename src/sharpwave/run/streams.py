"""Work that runs beside other work on a GPU."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


class SideStream:
    """A second stream of a CUDA device; on other devices everything runs where it stands.

        with side():      # begins after what the current stream has been given so far
            ...
        ...               # runs beside it
        side.join()       # what comes now waits for it

    Inside a captured graph it becomes a branch. What the side allocates must not outlive the join unless it is kept
    for good; what it reads must live until the join.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_busy = False

    @contextmanager
    def __call__(self) -> Generator[None]:
        if self._stream is None:
            yield
            return
        self._is_busy = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Wait for what it was given; nothing is waited for twice, for a graph may not wait for what is not in it."""
        if self._stream is not None and self._is_busy:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._is_busy = False
