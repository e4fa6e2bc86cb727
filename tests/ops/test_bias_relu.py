"""bias_relu: values and gradients against PyTorch's in float64, NaNs, and memory orders."""

import pytest
import torch

from sharpwave.ops.bias_relu import bias_relu
from tests.conftest import backends
from tests.parity import assert_parity


def made(shape, dtype, device, order=torch.channels_last):
    x, bias, dy = (
        torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate((shape, shape[1], shape))
    )
    x, dy = x.to(device, dtype), dy.to(device, dtype)
    if len(shape) == 4:
        x, dy = x.contiguous(memory_format=order), dy.contiguous(memory_format=order)
    return x.requires_grad_(), bias.to(device).requires_grad_(), dy


@backends("reference", "triton")
class TestBiasReLU:
    @pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 32, 5, 7), (2, 64, 9, 9), (40, 16)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_values_and_gradients(self, backend, device, shape, dtype):
        x, bias, dy = made(shape, dtype, device)
        exact = [t.detach().double().requires_grad_() for t in (x, bias)]
        want = (exact[0] + exact[1].view(-1, *[1] * (len(shape) - 2))).relu()
        y = bias_relu(x, bias, backend=backend)
        assert y.stride() == x.stride()
        # Interpreted kernels cut bfloat16 off instead of rounding: twice the error, and a 0 more or less.
        assert_parity(y, want.to(dtype), "y", scale=2)
        y.backward(dy)
        want.backward(dy.double())
        assert_parity(x.grad, torch.where(y > 0, dy, 0), "dx")
        assert_parity(bias.grad, x.grad.double().sum([d for d in range(len(shape)) if d != 1]).float(), "dbias")

    def test_other_memory_orders(self, backend, device):
        x, bias, dy = made((2, 16, 3, 5), torch.float32, device, torch.contiguous_format)
        y = bias_relu(x, bias, backend=backend)
        y.backward(dy)
        assert_parity(y, (x + bias.view(-1, 1, 1)).relu(), "y")
        assert_parity(x.grad, torch.where(y > 0, dy, 0), "dx")

    def test_what_is_not_finite(self, backend, device):
        x = torch.tensor([[float("nan"), float("-inf"), float("inf"), 1.0]], device=device, requires_grad=True)
        y = bias_relu(x, torch.zeros(4, device=device), backend=backend)
        assert y[0, 0].isnan() and y[0, 1:].tolist() == [0, float("inf"), 1]
        y.sum().backward()
        assert x.grad.tolist() == [[1, 0, 1, 1]]  # as PyTorch's


def test_gradcheck_registration_and_errors():
    x, bias = torch.randn(3, 5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    args = (x.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda *a: bias_relu(*a, backend="reference"), args)
    torch.library.opcheck(torch.ops.sharpwave.bias_relu.default, (*args, "reference"))
    with pytest.raises(ValueError, match=r"bias \(C,\); got \(3, 5, 2\) and \(4,\)"):
        bias_relu(x, torch.zeros(4))
    with pytest.raises(ValueError, match="a power of 2 of channels; got 5"):
        bias_relu(x.float(), bias.float(), backend="triton")
