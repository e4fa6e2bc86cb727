"""q_mlp_loss against the network and the loss that it puts together, in float64."""

import pytest
import torch

from sharpwave.ops.dqn_loss import STATS, dqn_loss
from sharpwave.ops.q_mlp_loss import q_mlp_gradient, q_mlp_loss
from tests.conftest import backends
from tests.ops.test_q_mlp import CASES, layers, weights
from tests.parity import assert_parity


def batch(n, d, actions, device):
    g = torch.Generator().manual_seed(3)
    rows = dict(
        x=torch.randn(n, d, generator=g),
        next_x=torch.randn(n, d, generator=g),
        action=torch.randint(actions, (n,), generator=g),
        reward=torch.randn(n, generator=g) * 2,  # on both sides of huber
        discount=torch.rand(n, generator=g).round(decimals=1),
        weight=torch.rand(n, generator=g),
    )
    return {name: x.to(device) for name, x in rows.items()}


def flat(w):
    return torch.cat([x.detach().reshape(-1) for x in w.values()])


@backends("reference", "triton")
@pytest.mark.parametrize("n, d, h, k, actions", CASES)
@pytest.mark.parametrize("dueling, double", [(False, True), (True, True), (True, False)])
def test_is_the_loss_of_the_network(backend, device, n, d, h, k, actions, dueling, double):
    rows, w = batch(n, d, actions, device), weights(d, h, k, actions, dueling, device)
    target = {name: x.detach().flip(0) * 1.1 for name, x in w.items()}
    exact, exact_target = ({name: x.detach().double().requires_grad_() for name, x in y.items()} for y in (w, target))
    x, next_x, *rest = (t.double() if t.is_floating_point() else t for t in rows.values())
    following = layers(next_x, **exact).detach() if double else None
    want = dqn_loss(
        layers(x, **exact), rest[0], following, layers(next_x, **exact_target).detach(), *rest[1:], huber=0.8,
        backend="reference",
    )  # fmt: skip
    want.loss.backward()
    got = q_mlp_loss(
        flat(w), flat(target), *rows.values(), hidden=h, k=k, actions=actions, dueling=dueling, double=double,
        huber=0.8, backend=backend,
    )  # fmt: skip
    assert_parity(got.td_error, want.td_error.float(), "td_error")
    gradient, stats = q_mlp_gradient(got)
    assert_parity(stats, want.stats, "stats")
    for name, part in zip(w, gradient.split([x.numel() for x in w.values()]), strict=True):
        # The value's bias has one entry, a sum over the batch whose terms cancel.
        assert_parity(part.view(w[name].shape), exact[name].grad.float(), name, scale=4 if name == "bv" else 1)


@backends("reference", "triton")
def test_a_nan_reaches_the_loss_and_its_own_td_error(backend, device):
    rows, w = batch(20, 3, 2, device), flat(weights(3, 16, 16, 2, True, device))
    rows["reward"][18] = float("nan")
    got = q_mlp_loss(w, w, *rows.values(), hidden=16, k=16, actions=2, backend=backend)
    gradient, stats = q_mlp_gradient(got)
    assert stats[STATS.index("loss")].isnan() and not gradient.isfinite().all()
    assert got.td_error.isnan().nonzero().tolist() == [[18]]


def test_registration_and_errors():
    rows, w = batch(4, 3, 2, "cpu"), flat(weights(3, 8, 8, 2, True))
    widths = dict(hidden=8, k=8, actions=2)
    args = (w, w, *rows.values(), 8, 8, 2, True, True, 1.0, "reference")
    torch.library.opcheck(torch.ops.sharpwave.q_mlp_loss.default, args)
    loss = q_mlp_loss(w, w, *rows.values(), **widths)
    torch.library.opcheck(torch.ops.sharpwave.q_mlp_gradient.default, (*loss.saved, *loss.shape, "reference"))
    with pytest.raises(ValueError, match=r"target_params must be contiguous and \(203,\) for D=3"):
        q_mlp_loss(w, w[1:], *rows.values(), **widths)
    with pytest.raises(ValueError, match=r"reward must have shape \(4,\)"):
        q_mlp_loss(w, w, **(rows | dict(reward=torch.zeros(3))), **widths)
    with pytest.raises(TypeError, match="action must be int64"):
        q_mlp_loss(w, w, **(rows | dict(action=torch.zeros(4))), **widths)
    with pytest.raises(ValueError, match="huber must be above 0; got 0"):
        q_mlp_loss(w, w, *rows.values(), **widths, huber=0)
