"""The losses of Q-learning: numbers worked by hand, identities, gradients, and every backend against the reference."""

import math

import pytest
import torch

from sharpwave.ops.dqn_loss import STATS, c51_loss, dqn_loss
from tests.conftest import backends
from tests.parity import assert_parity


def inputs(n, actions, device="cpu", dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype).to(device)

    return dict(
        q=normal(n, actions) * 2,
        action=torch.randint(actions, (n,), generator=g).to(device),
        next_q=normal(n, actions),
        next_target_q=normal(n, actions),
        reward=normal(n),
        discount=(torch.rand(n, generator=g, dtype=dtype) < 0.8).to(dtype).to(device) * 0.9,
        weight=torch.rand(n, generator=g, dtype=dtype).to(device),
    )


@backends("reference", "cpu", "triton")
class TestDQNLoss:
    def by_hand(self, device, **changes):
        x = dict(
            q=torch.tensor([[1.0, 2.0], [0.0, -1.0], [5.0, 5.0]], device=device),
            action=torch.tensor([1, 0, 1], device=device),
            next_q=torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 9.0]], device=device),
            next_target_q=torch.tensor([[10.0, 1.0], [0.5, 7.0], [1.0, 2.0]], device=device),
            reward=torch.tensor([1.0, 0.0, 4.5], device=device),
            discount=torch.tensor([0.5, 0.5, 0.0], device=device),
            weight=torch.tensor([1.0, 0.5, 0.25], device=device),
        )
        return x | changes

    def test_by_hand(self, backend, device):
        """Double: targets 1 + 0.5 * 1 = 1.5, 0 + 0.5 * 0.5 (the first of equal ones) = 0.25, 4.5 + 0 = 4.5;
        td -0.5, 0.25, -0.5; losses 0.125, 0.03125, 0.125, weighted 0.125, 0.015625, 0.03125; mean 0.0572917."""
        out = dqn_loss(**self.by_hand(device), huber=1.0, backend=backend)
        assert out.td_error.tolist() == [-0.5, 0.25, -0.5]
        assert out.loss.item() == pytest.approx((0.125 + 0.015625 + 0.03125) / 3, rel=1e-6)
        # d loss / d q = -w td / 3 at the action taken, and 0 elsewhere.
        want = torch.tensor([[0.0, 0.5 / 3], [-0.125 / 3, 0.0], [0.0, 0.125 / 3]], device=device)
        assert torch.allclose(out.gradient, want, rtol=1e-6, atol=0)
        stats = dict(zip(STATS, out.stats.tolist(), strict=True))
        assert stats == pytest.approx(
            dict(loss=out.loss.item(), td_error=1.25 / 3, q_mean=7 / 3, q_max=5, q_spread=2 / 3), rel=1e-6
        )

    def test_without_double_the_target_network_chooses(self, backend, device):
        """Targets 1 + 0.5 * 10 = 6, 0.5 * 7 = 3.5, 4.5."""
        out = dqn_loss(**self.by_hand(device, next_q=None), huber=1.0, backend=backend)
        assert out.td_error.tolist() == [4.0, 3.5, -0.5]
        # Beyond 1 the Huber loss is |td| - 1/2.
        assert out.loss.item() == pytest.approx((3.5 + 0.5 * 3.0 + 0.25 * 0.125) / 3, rel=1e-6)

    def test_infinite_huber_is_the_squared_error(self, backend, device):
        out = dqn_loss(**self.by_hand(device, next_q=None), huber=math.inf, backend=backend)
        assert out.loss.item() == pytest.approx((8 + 0.5 * 6.125 + 0.25 * 0.125) / 3, rel=1e-6)

    def test_td_errors_do_not_depend_on_weights_and_the_gradient_scales_with_them(self, backend, device):
        once = dqn_loss(**self.by_hand(device), huber=0.3, backend=backend)
        x = self.by_hand(device)
        twice = dqn_loss(**(x | dict(weight=2 * x["weight"])), huber=0.3, backend=backend)
        assert torch.equal(once.td_error, twice.td_error)
        assert torch.allclose(twice.gradient, 2 * once.gradient, rtol=1e-6, atol=0)
        none = dqn_loss(**(x | dict(weight=torch.zeros(3, device=device))), backend=backend)
        assert not none.gradient.any() and torch.equal(none.td_error, once.td_error)

    @pytest.mark.parametrize("n, actions", [(1, 1), (7, 3), (256, 18), (300, 2), (64, 200)])
    @pytest.mark.parametrize("double", [True, False])
    def test_as_the_reference_in_float64(self, backend, device, n, actions, double):
        x = inputs(n, actions, device)
        if not double:
            x["next_q"] = None
        out = dqn_loss(**x, huber=0.7, backend=backend)
        exact = {k: v if v is None or k == "action" else v.double() for k, v in x.items()}
        want = dqn_loss(**exact, huber=0.7, backend="reference")
        for name in ("loss", "td_error", "gradient"):
            assert_parity(getattr(out, name), getattr(want, name).float(), name)
        assert_parity(out.stats, want.stats, "stats")

    def test_strided_inputs(self, backend, device):
        x = inputs(32, 4, device)
        strided = x | dict(q=x["q"].t().contiguous().t(), reward=torch.stack([x["reward"]] * 2, 1)[:, 0])
        a, b = dqn_loss(**x, backend=backend), dqn_loss(**strided, backend=backend)
        for s, t in zip(a, b, strict=True):
            assert_parity(s, t)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("where", ["q", "next_target_q", "reward"])
    def test_what_is_not_finite_reaches_the_loss_and_its_row_alone(self, backend, device, where, bad):
        x = inputs(8, 3, device)
        x["discount"].fill_(0.9)
        x[where][2] = bad
        out = dqn_loss(**x, backend=backend)
        assert not out.loss.isfinite() and not out.stats[0].isfinite()
        finite = out.td_error.isfinite()
        assert not finite[2] and finite.sum() == 7

    def test_backward_is_the_gradient(self, backend, device):
        x = inputs(16, 3, device)
        x["q"].requires_grad_()
        out = dqn_loss(**x, backend=backend)
        (3 * out.loss).backward()
        assert torch.allclose(x["q"].grad, 3 * out.gradient)


class TestGradients:
    def test_dqn_gradcheck(self):
        x = inputs(6, 3, dtype=torch.float64)
        x["q"].requires_grad_()
        assert torch.autograd.gradcheck(lambda q: dqn_loss(**(x | dict(q=q)), backend="reference").loss, x["q"])

    def test_c51_gradcheck(self):
        x = c51_inputs(5, 3, 7, torch.float64)
        x["logits"].requires_grad_()
        assert torch.autograd.gradcheck(
            lambda logits: c51_loss(**(x | dict(logits=logits)), backend="reference").loss, x["logits"]
        )


def c51_inputs(n, actions, k, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = inputs(n, actions, dtype=dtype)
    logits = {key: torch.randn(n, actions, k, generator=g, dtype=dtype) for key in ("logits", "next_logits")}
    logits["next_target_logits"] = torch.randn(n, actions, k, generator=g, dtype=dtype)
    rows = {key: x[key] for key in ("action", "reward", "discount", "weight")}
    return logits | rows | dict(atoms=torch.linspace(-3, 3, k, dtype=dtype))


class TestC51:
    def test_projection_by_hand(self):
        """Atoms 0, 1, 2; the target puts all on atom 1: 0.5 + 0.8 * 1 = 1.3, so 0.7 on 1 and 0.3 on 2."""
        sure = torch.tensor([[[-40.0, 40.0, -40.0]]])
        uniform = torch.zeros(1, 1, 3)
        rows = dict(
            action=torch.tensor([0]),
            reward=torch.tensor([0.5]),
            discount=torch.tensor([0.8]),
            weight=torch.tensor([1.0]),
            atoms=torch.tensor([0.0, 1.0, 2.0]),
        )
        out = c51_loss(uniform, next_logits=None, next_target_logits=sure, **rows)
        entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
        assert out.loss.item() == pytest.approx(math.log(3), rel=1e-5)
        assert out.td_error.item() == pytest.approx(math.log(3) - entropy, rel=1e-5)
        assert torch.allclose(out.gradient[0, 0], torch.tensor([1 / 3, 1 / 3 - 0.7, 1 / 3 - 0.3]), atol=1e-5)

    def test_returns_beyond_the_atoms_go_to_the_last(self):
        x = c51_inputs(4, 2, 5)
        x["reward"].fill_(100.0)
        x["logits"] = torch.tensor([-40.0, -40, -40, -40, 40]).expand(4, 2, 5).contiguous()
        assert c51_loss(**x).td_error.max() < 1e-5

    def test_the_priority_is_kl_and_not_cross_entropy(self):
        """At the optimum the cross-entropy is the target's entropy, and the divergence 0."""
        x = c51_inputs(3, 1, 3)
        x |= dict(reward=torch.full((3,), 0.9), discount=torch.zeros(3), atoms=torch.tensor([0.0, 1.0, 2.0]))
        x["logits"] = torch.tensor([0.1, 0.9, 1e-9]).log().expand(3, 1, 3).contiguous()
        out = c51_loss(**x)
        assert out.loss > 0.03 and out.td_error.max() < 1e-5
        assert out.gradient.abs().max() < 1e-6

    def test_double_takes_the_action_of_the_online_network(self):
        x = c51_inputs(16, 4, 9)
        best = (x["next_logits"].softmax(2) @ x["atoms"]).argmax(1)
        only = x["next_target_logits"][torch.arange(16), best][:, None].expand(-1, 4, -1)
        same = c51_loss(**(x | dict(next_target_logits=only.contiguous())))
        assert torch.allclose(c51_loss(**x).td_error, same.td_error, atol=1e-6)


def test_registration():
    x = inputs(4, 3)
    args = (*x.values(), 1.0, "reference")
    torch.library.opcheck(torch.ops.sharpwave.dqn_loss.default, args)
    y = c51_inputs(4, 3, 5)
    names = ("logits", "action", "next_logits", "next_target_logits", "reward", "discount", "weight", "atoms")
    torch.library.opcheck(torch.ops.sharpwave.c51_loss.default, (*[y[name] for name in names], "reference"))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(q=torch.zeros(4)), ValueError, r"q must be \(n, actions\)"),
        (dict(next_q=torch.zeros(4, 2)), ValueError, "next q must have q's shape"),
        (dict(reward=torch.zeros(3)), ValueError, r"reward must have shape \(4,\)"),
        (dict(action=torch.zeros(4)), TypeError, "action must be int64"),
        (dict(huber=0.0), ValueError, "huber must be above 0"),
    ],
)
def test_errors(change, error, words):
    with pytest.raises(error, match=words):
        dqn_loss(**(inputs(4, 3) | change))
