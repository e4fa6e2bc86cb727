"""adam_step: numbers worked by hand, PyTorch's Adam, every backend against the reference, and steps left out."""

import math

import pytest
import torch

from sharpwave.ops.adam_step import adam_step
from tests.conftest import backends
from tests.parity import assert_parity


def state(n, device="cpu", dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, generator=g, dtype=dtype).to(device)

    return dict(
        param=normal(),
        grad=normal() * 3,
        exp_avg=normal(),
        exp_avg_sq=normal().square(),
        count=torch.tensor(4.0, device=device),
        lr=torch.tensor(0.1, device=device),
        keep=torch.tensor(True, device=device),
        report=torch.full((3,), -1.0, device=device),
    )


@backends("reference", "cpu", "triton")
class TestAdamStep:
    def test_by_hand(self, backend, device):
        """The first step from 0: m = g / 10, v = g^2 / 1000, both corrected to g and g^2, so w moves by lr sign(g)."""
        x = state(2, device)
        x["param"] = torch.tensor([1.0, 1.0], device=device)
        x["grad"] = torch.tensor([3.0, -4.0], device=device)
        for name in ("exp_avg", "exp_avg_sq", "count"):
            x[name].zero_()
        adam_step(**x, backend=backend)
        assert x["param"].tolist() == pytest.approx([0.9, 1.1], abs=1e-6)
        assert x["exp_avg"].tolist() == pytest.approx([0.3, -0.4], rel=1e-6)
        assert x["exp_avg_sq"].tolist() == pytest.approx([0.009, 0.016], rel=1e-6)
        assert x["count"] == 1 and x["report"].tolist() == [5.0, 1.0, -1.0]

    def test_clipping_by_hand(self, backend, device):
        """|g| = 5 is clipped to 0.5: a tenth of everything."""
        x = state(2, device)
        x["grad"] = torch.tensor([3.0, -4.0], device=device)
        for name in ("exp_avg", "exp_avg_sq", "count"):
            x[name].zero_()
        adam_step(**x, max_grad_norm=0.5, backend=backend)
        assert x["exp_avg"].tolist() == pytest.approx([0.03, -0.04], rel=1e-5)
        assert x["report"][0] == 5

    @pytest.mark.parametrize("n", [1, 1000, 5000])
    @pytest.mark.parametrize("limit", [1.0, math.inf])
    def test_as_the_reference_in_float64(self, backend, device, n, limit):
        x = state(n, device)
        exact = {k: v.double() if v.is_floating_point() and v.ndim else v.clone() for k, v in x.items()}
        exact["report"] = x["report"].clone()
        adam_step(**x, eps=1e-5, max_grad_norm=limit, backend=backend)
        adam_step(**exact, eps=1e-5, max_grad_norm=limit, backend="reference")
        for name in ("param", "exp_avg", "exp_avg_sq", "count", "report"):
            assert_parity(x[name], exact[name].float(), name)

    def test_keep_may_be_a_loss(self, backend, device):
        x, y = state(10, device), state(10, device)
        adam_step(**(x | dict(keep=torch.tensor(0.0, device=device))), backend=backend)
        adam_step(**y, backend=backend)
        assert torch.equal(x["param"], y["param"]) and x["count"] == 5

    @pytest.mark.parametrize("bad", [math.nan, math.inf, None, "loss"])
    def test_what_is_left_out(self, backend, device, bad):
        x = state(3000, device)
        if bad is None:
            x["keep"].fill_(False)
        elif bad == "loss":
            x["keep"], bad = torch.tensor(math.nan, device=device), None
        else:
            x["grad"][2500] = bad
        before = {k: v.clone() for k, v in x.items()}
        adam_step(**x, backend=backend)
        for name in ("param", "exp_avg", "exp_avg_sq", "count"):
            assert torch.equal(x[name], before[name]), name
        assert x["report"][1] == 0 and x["report"][2] == (-1 if bad is None else 2500)


def test_many_steps_are_those_of_pytorch():
    torch.manual_seed(0)
    w = torch.randn(50, requires_grad=True)
    theirs = torch.optim.Adam([w], lr=0.01, eps=1e-6)
    x = state(50) | dict(param=w.detach().clone(), lr=torch.tensor(0.01))
    for name in ("exp_avg", "exp_avg_sq", "count"):
        x[name].zero_()
    for _ in range(100):
        w.grad = torch.randn(50)
        x["grad"] = w.grad.clone()
        theirs.step()
        adam_step(**x, eps=1e-6)
    assert torch.allclose(x["param"], w, atol=1e-5)


def test_registration_and_errors():
    x = state(4)
    args = (*x.values(), 0.9, 0.999, 1e-8, math.inf, "reference")
    torch.library.opcheck(torch.ops.sharpwave.adam_step.default, args)
    with pytest.raises(ValueError, match=r"must be contiguous and \(n,\), of one n"):
        adam_step(**(x | dict(grad=torch.zeros(5))))
    with pytest.raises(ValueError, match="count, lr and keep 0-d"):
        adam_step(**(x | dict(report=torch.zeros(2))))
