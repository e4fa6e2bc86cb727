"""q_mlp: values and gradients against PyTorch's layers in float64, with and without a value stream."""

import pytest
import torch
from torch.nn import functional as F

from sharpwave.ops.q_mlp import q_mlp
from tests.conftest import backends
from tests.parity import assert_parity

CASES = [(1, 1, 3, 2, 1), (40, 4, 24, 16, 2), (33, 20, 7, 40, 18), (65, 100, 128, 65, 5)]


def weights(d, h, k, actions, dueling, device="cpu", dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    wide = 2 * k if dueling else k
    shapes = dict(w1=(h, d), b1=(h,), w2=(wide, h), b2=(wide,), wa=(actions, k), ba=(actions,))
    if dueling:
        shapes |= dict(wv=(1, k), bv=(1,))
    made = {
        name: torch.randn(shape, generator=g, dtype=torch.float64) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    return {name: w.to(device, dtype).requires_grad_() for name, w in made.items()}


def layers(x, w1, b1, w2, b2, wa, ba, wv=None, bv=None):
    """The same, as a network of layers is written."""
    h2 = F.linear(F.linear(x, w1, b1).relu(), w2, b2).relu()
    if wv is None:
        return F.linear(h2, wa, ba)
    hv, ha = h2.chunk(2, 1)
    a = F.linear(ha, wa, ba)
    return F.linear(hv, wv, bv) + a - a.mean(1, keepdim=True)


@backends("reference", "triton")
@pytest.mark.parametrize("n, d, h, k, actions", CASES)
@pytest.mark.parametrize("dueling", [False, True])
def test_values_and_gradients(backend, device, n, d, h, k, actions, dueling):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(1)).to(device)
    w = weights(d, h, k, actions, dueling, device)
    exact = {name: t.detach().double().requires_grad_() for name, t in w.items()}
    q, want = q_mlp(x, **w, backend=backend), layers(x.double(), **exact)
    assert_parity(q, want.float(), "q")
    dq = torch.randn(n, actions, generator=torch.Generator().manual_seed(2)).to(device)
    q.backward(dq)
    want.backward(dq.double())
    for name in w:
        assert_parity(w[name].grad, exact[name].grad.float(), name)


@backends("reference", "triton")
def test_strided_inputs(backend, device):
    w = weights(6, 16, 16, 3, True, device)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)).to(device)
    dq = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)).to(device).t()
    q = q_mlp(x[:, ::2], **w, backend=backend)
    assert torch.equal(q, q_mlp(x[:, ::2].contiguous(), **w, backend=backend))
    q.backward(dq)
    assert all(t.grad.isfinite().all() for t in w.values())


@pytest.mark.parametrize("dueling", [False, True])
def test_gradcheck(dueling):
    x = torch.randn(5, 3, dtype=torch.float64)
    w = weights(3, 4, 4, 2, dueling, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *args: q_mlp(x, *args, backend="reference"), tuple(w.values()))


def test_registration_and_errors():
    x, w = torch.randn(4, 3), weights(3, 8, 8, 2, True)
    torch.library.opcheck(torch.ops.sharpwave.q_mlp.default, (x, *w.values(), "reference"))
    with pytest.raises(ValueError, match=r"w2 must be \(16, 8\) beside the other weights; got \(8, 8\)"):
        q_mlp(x, **(w | dict(w2=torch.zeros(8, 8))))
    with pytest.raises(ValueError, match="wv and bv must both be given"):
        q_mlp(x, **(w | dict(bv=None)))
    with pytest.raises(ValueError, match="takes widths of at most 128; got 130"):
        q_mlp(torch.randn(4, 130), **weights(130, 8, 8, 2, True), backend="triton")
