"""Drawing actions: by hand, the kernels against the reference, and the loss's own log-probabilities."""

import math

import pytest
import torch

from sharpwave.ops.ppo_loss import reference as loss
from sharpwave.ops.sample import sample_categorical, sample_gaussian
from tests.conftest import backends
from tests.parity import assert_parity

ALL = backends("reference", "triton")


def inputs(n, nvec, device, p_legal=None, seed=0):
    """Logits that are a slice of a wider matrix, noise, and a mask."""
    g = torch.Generator().manual_seed(seed)
    width = sum(nvec)
    logits = torch.randn(n, width + 3, generator=g) * 3
    noise = torch.empty(n, width).exponential_(generator=g)
    mask = None if p_legal is None else torch.rand(n, width, generator=g) < p_legal
    return logits.to(device)[:, :width], noise.to(device), None if mask is None else mask.to(device)


@ALL
def test_categorical_by_hand(device, backend):
    """exp(logit) / e is 0.906, 0.739 and 0.5: the first choice, though the second is the most probable."""
    logits = torch.tensor([[1.0, 2.0, 0.0]], device=device)
    noise = torch.tensor([[3.0, 10.0, 2.0]], device=device)
    action, logprob = sample_categorical(logits, noise, nvec=(3,), backend=backend)
    assert action.tolist() == [[0]]
    total = math.e + math.e**2 + 1
    assert logprob.item() == pytest.approx(1 - math.log(total), abs=1e-6)
    action, logprob = sample_categorical(logits, nvec=(3,), backend=backend)
    assert action.tolist() == [[1]] and logprob.item() == pytest.approx(2 - math.log(total), abs=1e-6)


@pytest.mark.parametrize("nvec", [(3,), (2, 5, 3), (43,), (70,), (1,)])
@pytest.mark.parametrize("p_legal", [None, 0.4])
@backends("triton")
def test_categorical_matches_the_reference(device, backend, nvec, p_legal):
    logits, noise, mask = inputs(50, nvec, device, p_legal)
    for e in (noise, None):
        want, logprob = sample_categorical(logits, e, nvec=nvec, mask=mask, backend="reference")
        got = sample_categorical(logits, e, nvec=nvec, mask=mask, backend=backend)
        assert got[0].dtype == torch.int64 and torch.equal(got[0], want)
        assert_parity(got[1], logprob, "logprob")


@ALL
def test_log_probabilities_are_the_losss(device, backend):
    """Ratios begin at 1, heads that have no legal choice included."""
    nvec = (4, 3)
    logits, noise, mask = inputs(40, nvec, device, 0.3)
    empty = [~head.any(1) for head in mask.split(nvec, 1)]
    assert all(x.any() and not x.all() for x in empty)
    action, logprob = sample_categorical(logits, noise, nvec=nvec, mask=mask, backend=backend)
    assert_parity(logprob, loss.categorical(logits.double(), action, nvec, mask)[0])
    legal = mask.gather(1, action + torch.tensor([0, 4], device=device))
    assert torch.equal(legal, ~torch.stack(empty, 1)), "legal where any choice is"


@ALL
def test_categorical_edges(device, backend):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[5.0, 5.0, 5.0, 1.0], [nan, 1.0, 2.0, 1.0], [-inf, -inf, -inf, 1.0], [1e4, -1e4, 1e4, 1.0], [inf, 0, 0, 1.0]],
        device=device,
    )
    action, logprob = sample_categorical(logits, nvec=(3, 1), backend=backend)
    assert action[:, 0].tolist() == [0, 0, 0, 0, 0] and not action[:, 1].any()
    assert logprob[[0, 3]].tolist() == pytest.approx([-math.log(3), -math.log(2)]) and logprob[1].isnan()
    # The noise of 0 wins, but never for an illegal choice where a legal one is finite.
    mask = torch.tensor([[False, True, True, True]] * 5, device=device)
    noise = torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 5, device=device)
    action, _ = sample_categorical(logits, noise, nvec=(3, 1), mask=mask, backend=backend)
    assert (action[[0, 1, 3, 4], 0] > 0).all()
    empty = sample_categorical(logits[:0], noise[:0], nvec=(3, 1), backend=backend)
    assert empty[0].shape == (0, 2) and empty[1].shape == (0,)


@ALL
def test_gaussian_by_hand(device, backend):
    """mean 1, std 2, noise 0.5: action 2, density of z = 0.5."""
    mean, log_std = torch.tensor([[1.0]], device=device), torch.tensor([math.log(2)], device=device)
    action, logprob = sample_gaussian(mean, log_std, torch.tensor([[0.5]], device=device), backend=backend)
    assert action.item() == pytest.approx(2, abs=1e-6)
    assert logprob.item() == pytest.approx(-0.125 - math.log(2) - 0.5 * math.log(2 * math.pi), abs=1e-6)
    action, logprob = sample_gaussian(mean, log_std, backend=backend)
    assert action.item() == 1 and logprob.item() == pytest.approx(-math.log(2) - 0.5 * math.log(2 * math.pi), abs=1e-6)


@pytest.mark.parametrize("dim", [1, 3, 17])
@backends("triton")
def test_gaussian_matches_the_reference(device, backend, dim):
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(40, dim + 1, generator=g).to(device)[:, :dim]
    log_std, noise = torch.randn(dim, generator=g).to(device), torch.randn(40, dim, generator=g).to(device)
    for z in (noise, None):
        want = sample_gaussian(mean, log_std, z, backend="reference")
        for got, expected in zip(sample_gaussian(mean, log_std, z, backend=backend), want, strict=True):
            assert_parity(got, expected)


def test_errors_name_what_does_not_fit():
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"logits must be \(N, 4\), a column each choice"):
        sample_categorical(x, nvec=(2, 2))
    with pytest.raises(ValueError, match=r"noise must be \(4, 3\); got \(4, 2\)"):
        sample_categorical(x, x[:, :2], nvec=(3,))
    with pytest.raises(TypeError, match=r"mask must be torch\.bool; got torch\.float32"):
        sample_categorical(x, nvec=(3,), mask=x)
    with pytest.raises(ValueError, match=r"log_std must be \(3,\), one for each column; got \(2,\)"):
        sample_gaussian(x, torch.zeros(2))
    with pytest.raises(TypeError, match=r"noise must be torch\.float32; got torch\.float64"):
        sample_gaussian(x, torch.zeros(3), x.double())
