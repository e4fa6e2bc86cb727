"""gather_rows: by hand, every backend against the reference, errors."""

import pytest
import torch

from sharpwave.ops.gather import gather_fields, gather_rows
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
    every = (torch.randn(4, 3, 8), None, torch.float32, 8)
    torch.library.opcheck(torch.ops.sharpwave.gather_rows.default, every)


@pytest.mark.parametrize(
    "source, index, keywords, error, words",
    [
        (torch.zeros(3, 2), None, dict(out=torch.zeros(3, 4)[:, ::2]), ValueError, "out must be of contiguous rows"),
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


@backends("reference", "triton")
def test_out_is_written_and_returned(backend, device):
    source = torch.arange(12.0, device=device).view(3, 2, 2)
    out = torch.full((2, 2, 8), torch.nan, device=device)
    index = torch.tensor([2, 0], device=device)
    assert gather_rows(source, index, multiple=8, out=out, backend=backend) is out
    assert torch.equal(out, gather_rows(source, index, multiple=8, backend="reference"))


@backends("reference", "triton")
@pytest.mark.parametrize("indexed", [False, True])
def test_rows_may_lie_apart_in_source_and_out(backend, device, indexed):
    """The rows of one time step in a rollout, read and written; without an index every row in order."""
    rollout = torch.randn(5, 3, 2, 7, generator=torch.Generator().manual_seed(0)).to(device)
    index = torch.tensor([4, 0, 0], device=device) if indexed else None
    want = torch.nn.functional.pad(rollout[:, 1] if index is None else rollout[index, 1], (0, 1))
    got = gather_rows(rollout[:, 1], index, multiple=8, backend=backend)
    assert torch.equal(got, want) and got.is_contiguous()
    room = torch.full((len(want), 4, 2, 8), torch.nan, device=device)
    gather_rows(rollout[:, 1], index, multiple=8, out=room[:, 2], backend=backend)
    assert torch.equal(room[:, 2], want) and room[:, [0, 1, 3]].isnan().all()
    plain = gather_rows(rollout, backend=backend)
    assert torch.equal(plain, rollout) and plain.data_ptr() != rollout.data_ptr()


@backends("reference", "triton")
def test_fields_are_the_rows_of_each_source(backend, device):
    """Of any dtype and width: whole words, odd bytes, one entry a row, and a source whose rows begin inside words."""
    g = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(9, 4, 3, generator=g),
        torch.randint(0, 99, (9, 5), generator=g),
        torch.rand(9, 128, generator=g) < 0.5,
        torch.rand(9, 7, generator=g) < 0.5,
        torch.randn(9, generator=g).bfloat16(),
        torch.randint(0, 255, (10, 4), generator=g, dtype=torch.uint8).flatten()[1:37].view(9, 4),
    ]
    sources = [x.to(device) for x in sources]
    index = torch.randint(0, 9, (6,), generator=g).to(device)
    out = [x.new_empty(6, *x.shape[1:]) for x in sources]
    gather_fields(sources, index, out, backend=backend)
    for source, got in zip(sources, out, strict=True):
        assert torch.equal(got, source[index])


def test_fields_errors():
    source, index = torch.zeros(3, 2), torch.tensor([1])
    with pytest.raises(ValueError, match="a tensor for each of the 1 sources; got 0"):
        gather_fields([source], index, [])
    with pytest.raises(ValueError, match=r"out must be contiguous of shape \(1, 2\); got \(2, 2\)"):
        gather_fields([source], index, [torch.zeros(2, 2)])
    with pytest.raises(TypeError, match=r"out must be torch\.float32; got torch\.int64"):
        gather_fields([source], index, [torch.zeros(1, 2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="sources must be contiguous"):
        gather_fields([source.t()], index, [torch.zeros(1, 3)])
    with pytest.raises(TypeError, match="index must be int64"):
        gather_fields([source], index.int(), [torch.zeros(1, 2)])
