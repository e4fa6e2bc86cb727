"""gather_rows: by hand, every backend against the reference, errors."""

import pytest
import torch

from sharpwave.ops.gather import gather_rows
from tests.conftest import backends


@backends("reference", "triton")
def test_by_hand(backend, device):
    source = torch.tensor([[[1, 2, 3]], [[4, 5, 255]]], dtype=torch.uint8, device=device)
    index = torch.tensor([1, 0, 1], device=device)
    out = gather_rows(source, index, dtype=torch.float32, multiple=2, backend=backend)
    assert torch.allclose(out.cpu() * 255, torch.tensor([[[4.0, 5, 255, 0]], [[1, 2, 3, 0]], [[4, 5, 255, 0]]]))
    assert out[0, 0, 2] == 1
    assert torch.equal(gather_rows(source, index, backend=backend), source[index])


@pytest.mark.parametrize(
    "shape, multiple",
    [((5, 3, 843), 8), ((4, 128, 4), 8), ((3, 7), 1), ((2, 3, 5, 17), 16), ((4, 1, 1), 8), ((2, 2, 1500), 8)],
)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.int64, torch.float32)]
)
@backends("triton")
def test_matches_reference(backend, device, shape, multiple, dtypes):
    if dtypes[1] == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates to bf16")
    g = torch.Generator().manual_seed(0)
    source = (torch.randn(shape, generator=g) * 100).to(dtypes[0]).to(device)
    index = torch.randint(0, shape[0], (6,), generator=g).to(device)
    keywords = dict(dtype=dtypes[1], multiple=multiple)
    got = gather_rows(source, index, **keywords, backend=backend)
    assert torch.equal(got, gather_rows(source, index, **keywords, backend="reference"))
    turned = source.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(got, gather_rows(turned, index, **keywords, backend=backend))


def test_opcheck():
    args = (torch.randn(4, 3, 5), torch.tensor([1, 1]), torch.bfloat16, 8)
    torch.library.opcheck(torch.ops.sharpwave.gather_rows.default, args)


@pytest.mark.parametrize(
    "source, index, keywords, error, words",
    [
        (torch.zeros(3), torch.tensor([0]), {}, ValueError, "source must have at least two"),
        (torch.zeros(3, 2), torch.tensor([[0]]), {}, ValueError, r"index must be \(M,\)"),
        (torch.zeros(3, 2), torch.tensor([0.0]), {}, TypeError, "index must be int64"),
        (torch.zeros(3, 2), torch.tensor([0]), dict(multiple=0), ValueError, "multiple must be at least 1"),
        (torch.zeros(3, 2), torch.tensor([3]), {}, IndexError, "index out of range"),
    ],
)
def test_errors(source, index, keywords, error, words):
    with pytest.raises(error, match=words):
        gather_rows(source, index, **keywords)
