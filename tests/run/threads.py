"""The command line sets how many threads this process uses; other tests must go on with what they had."""

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch


@contextmanager
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])
