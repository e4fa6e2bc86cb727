"""linear: hand-worked numbers, the kernel against the reference, and what it refuses."""

import pytest
import torch

from sharpwave.ops.linear import linear
from sharpwave.ops.mingru import mingru_scan
from tests.conftest import backends
from tests.parity import assert_parity


def inputs(rows, n, k, dtype=torch.float16, device="cpu"):
    g = torch.Generator().manual_seed(sum(rows) + n + k)
    return [torch.randn(*shape, generator=g).to(device, dtype) for shape in ((*rows, k), (n, k))]


def test_hand_worked():
    # Rows (1, 2) and (3, 4) of the weight, on (1, 10): 21 and 43.
    assert linear(torch.tensor([1.0, 10.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [21.0, 43.0]


@pytest.mark.parametrize("rows, n, k", [((1,), 128, 64), ((63,), 128, 256), ((3, 43), 256, 64), ((400,), 128, 128)])
@backends("triton")
def test_backend_matches_reference(backend, device, rows, n, k):
    x, weight = inputs(rows, n, k, device=device)
    got = linear(x, weight, backend=backend)
    assert got.dtype == x.dtype
    assert torch.equal(got, linear(x, weight, settled=True, backend=backend))
    assert_parity(got, linear(x.double().cpu(), weight.double().cpu(), backend="reference"), "y")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [256, 64])
def test_a_chain_of_layers_is_captured(batch):
    """Few rows' launches overlap: replays with new data and weights give what the launches one by one give."""
    x, *weights = (torch.randn(*s, device="cuda").bfloat16() for s in ((batch, 128, 256), *[(768, 256)] * 3))
    weights = [weight / 16 for weight in weights]
    state = torch.randn(batch, 256, device="cuda")

    def chain(wait):
        y = x
        for i, weight in enumerate(weights):
            combined = linear(y, weight, settled=i > 0)
            wait()
            y = mingru_scan(combined, state, y)[0]
            wait()
        return y

    graph = torch.cuda.CUDAGraph()
    chain(torch.cuda.synchronize)
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(3):
        for v in (x, *weights):
            v.copy_(v.flip(0))
        graph.replay()
        assert torch.equal(captured, chain(torch.cuda.synchronize))
        assert torch.equal(captured, chain(lambda: None))


@backends("triton")
def test_nan_stays_in_its_row(backend, device):
    x, weight = inputs((100,), 128, 64, device=device)
    x[70, 3] = torch.nan
    bad = linear(x, weight, backend=backend).isnan()
    assert bad[70].all() and bad.sum() == 128


@pytest.mark.gpu
@pytest.mark.parametrize("rows, n, k", [((256, 128), 768, 256), ((20001,), 384, 128), ((64, 128), 768, 256)])
def test_bfloat16(rows, n, k):
    """Compiled only: the interpreter reads no bfloat16 through a descriptor. Captured, with new data in the buffers."""
    x, weight = inputs(rows, n, k, torch.bfloat16, "cuda")
    got = linear(x, weight, backend="triton")
    assert_parity(got, x.double() @ weight.double().t(), "y")
    assert torch.equal(got, linear(x, weight, settled=True, backend="triton"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x, weight, backend="triton")
    x.copy_(torch.randn_like(x))
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, linear(x, weight, backend="triton"))
    assert_parity(captured, x.double() @ weight.double().t(), "y")


def test_no_gradient():
    y = linear(torch.ones(2, 3, requires_grad=True), torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="no gradient"):
        y.sum().backward()


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="x must be"):
        linear(torch.zeros(3, 2), torch.zeros(4, 3))
    with pytest.raises(TypeError, match="weight must have x's dtype"):
        linear(torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.float64))


@backends("triton")
@pytest.mark.parametrize("n, k, dtype", [(128, 64, torch.float32), (100, 64, torch.float16), (128, 80, torch.float16)])
def test_what_the_kernel_does_not_take(backend, device, n, k, dtype):
    x, weight = inputs((5,), n, k, dtype, device)
    with pytest.raises(ValueError, match="backend='triton' takes"):
        linear(x, weight, backend=backend)
