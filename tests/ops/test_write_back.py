"""Write-back of an update's rows: hand-worked, and every backend against the reference."""

import math

import pytest
import torch

from sharpwave.ops.write_back import write_back
from tests.conftest import backends


@backends("reference", "triton")
def test_hand_worked(device, backend):
    """Segment 2 is drawn twice and takes its last draw's row; what is not finite stays as it was."""
    stored = torch.arange(6.0, device=device).view(3, 2)
    fresh = torch.tensor([[10.0, 11.0], [20.0, math.nan], [30.0, math.inf]], device=device)
    write_back(
        [stored], [fresh], torch.tensor([2, 0, 2], device=device), torch.zeros((), device=device), backend=backend
    )
    assert stored.tolist() == [[20, 1], [2, 3], [30, 5]]


@backends("reference", "triton")
@pytest.mark.parametrize("keep", [math.nan, math.inf])
def test_nothing_is_written_where_keep_is_not_finite(device, backend, keep):
    stored = torch.zeros(3, 2, device=device)
    index = torch.tensor([1], device=device)
    write_back([stored], [torch.ones(1, 2, device=device)], index, torch.tensor(keep, device=device), backend=backend)
    assert not stored.any()


@backends("reference", "triton")
def test_as_the_reference(device, backend):
    """Many draws of few segments, and rows whose columns lie apart in a wider matrix."""
    g = torch.Generator().manual_seed(0)
    index = torch.randint(0, 9, (40,), generator=g)
    wide = torch.randn(40 * 5, 7, generator=g)
    fresh = [torch.randn(40, 5, generator=g), wide[:, 3].view(40, 5)]
    fresh[0][3, 2] = math.nan
    want = [torch.randn(9, 5, generator=g) for _ in range(2)]
    got = [x.clone().to(device) for x in want]
    keep = torch.tensor(1.0)
    write_back(want, fresh, index, keep, backend="reference")
    moved = [fresh[0].to(device), wide.to(device)[:, 3].view(40, 5)]
    write_back(got, moved, index.to(device), keep.to(device), backend=backend)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_errors_name_what_does_not_fit():
    stored, index = torch.zeros(3, 2), torch.tensor([1])
    with pytest.raises(ValueError, match=r"fresh must be \(1, 2\); got \(1, 3\)"):
        write_back([stored], [torch.zeros(1, 3)], index, torch.zeros(()))
    with pytest.raises(ValueError, match="stored must be contiguous"):
        write_back([torch.zeros(2, 3).t()], [torch.zeros(1, 2)], index, torch.zeros(()))
    with pytest.raises(TypeError, match="index must be int64"):
        write_back([stored], [torch.zeros(1, 2)], index.int(), torch.zeros(()))
