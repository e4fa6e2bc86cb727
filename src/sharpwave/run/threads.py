"""How many CPU threads PyTorch and the Numba kernels use: a setting of the process, set for a while and put back."""

from collections.abc import Generator
from contextlib import contextmanager

import numba
import torch


@contextmanager
def use(count: int) -> Generator[None]:
    """Use `count` threads inside; Numba takes at most as many as it was started with (NUMBA_NUM_THREADS)."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # ty: ignore[missing-attribute]
    try:
        yield
    finally:
        # PyTorch's last: where both use the same OpenMP, Numba's number would replace it.
        numba.set_num_threads(before[1])
        torch.set_num_threads(before[0])
