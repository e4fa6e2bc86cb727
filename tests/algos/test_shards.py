"""Draws from shards: together they are a draw from the whole, exactly."""

import itertools

import pytest
import torch

from sharpwave.algos import _shards_triton, shards
from sharpwave.ops.ppo_loss.reference import advantage_moments, summary
from tests.conftest import backends

EPS = 1e-6
PRIORITY = torch.tensor([[0.5, 0.0, 3.0], [1.0, 8.0, 0.25]])  # of two shards of three segments
F = torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.1, -3.0]], dtype=torch.float64)  # what each segment's loss would be


def told(rank, drawn=None, valid=None):
    moments = torch.zeros(4, 1, dtype=torch.float64)
    advantage_moments(torch.zeros(1) if drawn is None else drawn, valid, moments)
    return shards.tell(PRIORITY[rank], EPS, moments)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_expected_estimate_is_that_of_one_draw_from_the_union(beta):
    """Every pair of draws, one of each shard, with its probability: no sampling error."""
    weight = PRIORITY.double() + EPS
    union = weight / weight.sum()
    want = (union * (6 * union).pow(-beta) * F).sum()

    local = weight / weight.sum(1, keepdim=True)
    joined = [shards.join(torch.stack([told(0), told(1)]), rank) for rank in range(2)]
    got = 0.0
    for drawn in itertools.product(range(3), repeat=2):
        estimate = 0.0
        for rank, i in enumerate(drawn):
            importance = (3 * local[rank, i]).pow(-beta) * joined[rank].scale.pow(-beta)  # draw_segments', and its mend
            estimate += joined[rank].share * importance * F[rank, i]
        got += local[0, drawn[0]] * local[1, drawn[1]] * estimate
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    # Without the shares it is not: the test can fail.
    assert 0.5 * (local * F).sum() != pytest.approx((union * F).sum().item(), rel=0.01)


def test_the_moments_are_those_of_both_draws_each_step_counting_for_its_share(gen):
    a, b = torch.randn(50, generator=gen), torch.randn(50, generator=gen) * 3 + 1
    valid = torch.rand(50, generator=gen) < 0.6
    joined = [shards.join(torch.stack([told(0, a), told(1, b, valid)]), rank) for rank in range(2)]
    weight = PRIORITY.double().sum(1) + 3 * EPS
    mass = torch.cat([weight[0].expand(50), torch.where(valid, weight[1], 0)])
    mass /= mass.sum()
    drawn = torch.cat([a, b]).double()
    mean = (mass * drawn).sum()
    for rank, j in enumerate(joined):
        torch.testing.assert_close(j.mean, mean)
        torch.testing.assert_close(j.variance, (mass * (drawn - mean).square()).sum())
        torch.testing.assert_close(j.share, mass[50 * rank : 50 * rank + 50].sum())
        moments = torch.zeros(4, 1, dtype=torch.float64)
        advantage_moments(a, None, moments)
        shards.put_moments(moments, j.mean, j.variance)
        torch.testing.assert_close(torch.stack(summary(moments)[1:]), torch.stack([j.mean, j.variance]))


def test_a_shard_alone_is_the_whole():
    drawn = torch.tensor([1.0, 2.0, 4.0])
    joined = shards.join(told(0, drawn)[None], 0)
    assert joined.share == joined.scale == 1 and joined.mean.item() == pytest.approx(7 / 3)


def test_what_is_not_finite_reaches_every_rank_and_no_step_at_all_none():
    bad = torch.stack([told(0, torch.tensor([1.0, torch.nan])), told(1)])
    assert all(shards.join(bad, rank).mean.isnan() for rank in range(2))
    empty = torch.stack([told(rank, torch.ones(2), torch.zeros(2, dtype=torch.bool)) for rank in range(2)])
    assert [shards.join(empty, rank).share for rank in range(2)] == [0.5, 0.5]
    one = torch.stack([told(0, torch.ones(2), torch.zeros(2, dtype=torch.bool)), told(1, torch.ones(2))])
    assert [shards.join(one, rank).share for rank in range(2)] == [0, 1]


def test_bad_priorities_weigh_what_they_are_drawn_with():
    priority = torch.tensor([1.0, torch.nan, torch.inf, -2.0])
    assert shards.total_weight(priority, EPS).item() == pytest.approx(1 + 4 * EPS, rel=1e-12)


@backends("triton")
@pytest.mark.parametrize("n, m, parts, ranks", [(5, 3, 1, 1), (3000, 300, 4, 2), (4097, 257, 16, 5)])
def test_kernels_do_as_the_definition(backend, device, n, m, parts, ranks, gen):
    """Priorities with bad ones among them, and one rank without a step that counts."""
    priority = torch.rand(n, generator=gen) * 10
    priority[1:4] = torch.tensor([torch.nan, torch.inf, -1.0])
    moments = torch.rand(4, parts, generator=gen, dtype=torch.float64) + 1
    moments[1] *= 9
    moments[3] = -0.25
    told = _shards_triton.tell(priority.to(device), EPS, moments.to(device))
    torch.testing.assert_close(told.cpu(), shards.tell(priority, EPS, moments), rtol=1e-12, atol=0)

    every = torch.rand(ranks, 4, generator=gen, dtype=torch.float64) + 0.5
    if ranks > 2:
        every[1, 1] = 0
    weight, beta = torch.rand(m, generator=gen), torch.tensor(0.37)
    for rank in range(ranks):
        plain = [weight.clone(), moments.clone(), torch.zeros((), dtype=torch.float64)]
        fast = [x.to(device, copy=True) for x in plain]
        shards.settle(every, rank, plain[0], beta, *plain[1:])
        _shards_triton.settle(every.to(device), rank, fast[0], beta.to(device), *fast[1:])
        torch.testing.assert_close(fast[0].cpu(), plain[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(fast[1].cpu(), plain[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fast[2].cpu(), plain[2], rtol=1e-12, atol=0)
    empty = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * ranks, dtype=torch.float64, device=device)
    _shards_triton.settle(empty, 0, fast[0], beta.to(device), *fast[1:])
    assert fast[2].item() == pytest.approx(1 / ranks)
    empty[0, 2] = torch.nan
    _shards_triton.settle(empty, 0, fast[0], beta.to(device), *fast[1:])
    assert fast[1][:2].isnan().all(), "a NaN reaches all"
