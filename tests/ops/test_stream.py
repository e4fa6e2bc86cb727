"""The stream's position on a device: every program of a launch finds the same one, whichever others have come."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from sharpwave.ops._philox_triton import count_draws, first_draw  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _first_kernel(offset_ptr, out_ptr, n, programs):
    triton.language.store(out_ptr, first_draw(offset_ptr, n, programs))


@triton.jit
def _count_kernel(offset_ptr, n):
    count_draws(offset_ptr, n, triton.language.num_programs(0), 128)


@pytest.mark.parametrize(
    "programs, n, start", [(1, 7, 0), (2, 5, 9), (5, 3, 2**47), (5, 13, 2**40), (32767, 70_000, 12)]
)
def test_whichever_programs_have_come(programs, n, start):
    """A program that has not come yet finds `start`, after any of the others: of all but the last one, and that one."""
    share = n // programs
    out = torch.empty(1, dtype=torch.int64, device=DEVICE)
    for others, last in itertools.product({0, 1, programs - 2, programs - 1}, (0, 1)):
        if not 0 <= others < programs or others + last == programs:
            continue
        lower = start + others * share + last * (n - (programs - 1) * share)
        upper = (others - last * (programs - 1)) % 2**16
        upper -= 2**16 * (upper >= 2**15)  # the sign of an int64
        _first_kernel[(1,)](torch.tensor([(upper << 48) + lower], device=DEVICE), out, n, programs)
        assert out.item() == start


@pytest.mark.parametrize("programs, n", [(1, 5), (3, 17), (7, 2)])
def test_a_launch_moves_the_stream_by_its_draws(programs, n):
    offset = torch.full((1,), 2**40, dtype=torch.int64, device=DEVICE)
    _count_kernel[(programs,)](offset, n)
    assert offset.item() == 2**40 + n
