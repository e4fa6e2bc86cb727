"""Running moments by hand and against NumPy, and what is normalised by them."""

import copy

import numpy as np
import pytest
import torch

from sharpwave.nn import ObservationNormalizer, RewardNormalizer, normalize
from sharpwave.nn.normalize import RunningMoments


class TestMoments:
    def test_by_hand(self):
        """1, 3 then 5: mean (1 + 3 + 5) / 3 = 3, variance (4 + 0 + 4) / 3."""
        moments = RunningMoments()
        assert (moments.count, moments.mean, moments.var) == (0, 0, 1)
        moments.update(torch.tensor([1.0, 3.0]))
        assert (moments.count, moments.mean, moments.var) == (2, 2, 1)
        moments.update(torch.tensor([5.0]))
        assert (moments.count.item(), moments.mean.item()) == (3, 3)
        assert moments.var.item() == pytest.approx(8 / 3, rel=1e-15)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.bool])
    def test_parts_of_any_size_give_the_moments_of_the_whole(self, gen, monkeypatch, dtype):
        """A mean of 1e6 beside a deviation of 1: sums of squares in float32 would have lost it."""
        monkeypatch.setattr(normalize, "ROWS", 64)
        rows = torch.randn(1000, 2, 3, generator=gen, dtype=torch.float64)
        rows = (rows + 1e6 if dtype.is_floating_point else rows.abs()).to(dtype)
        moments = RunningMoments((2, 3))
        for part in rows.split([1, 199, 63, 737]):
            moments.update(part)
        np.testing.assert_allclose(moments.mean.numpy(), rows.double().numpy().mean(0), rtol=1e-13)
        np.testing.assert_allclose(moments.var.numpy(), rows.double().numpy().var(0), rtol=1e-9)
        assert moments.count == 1000

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_is_left_out(self, bad):
        moments = RunningMoments((2,))
        moments.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        before = copy.deepcopy(moments.state_dict())
        moments.update(torch.tensor([[1.0, bad], [1.0, 1.0]]))
        assert all(torch.equal(before[name], x) for name, x in moments.state_dict().items())


class TestObservations:
    def test_by_hand(self):
        """Entries (1, 3) have mean 2 and deviation 1, (10, 10) have none: any other value is far out."""
        norm = ObservationNormalizer((2,))
        raw = torch.tensor([[1.0, 10.0], [3.0, 10.0]])
        assert torch.equal(norm(raw), raw), "nothing seen: nothing changed"
        norm.update(raw)
        torch.testing.assert_close(norm(raw), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
        assert norm(torch.tensor([[100.0, 9.0]])).tolist() == [[10.0, -10.0]]

    def test_integers_keep_their_value(self):
        norm = ObservationNormalizer((1,))
        norm.update(torch.tensor([[0], [200]], dtype=torch.uint8))
        torch.testing.assert_close(norm(torch.tensor([[200]], dtype=torch.uint8)), torch.tensor([[1.0]]))


class TestRewards:
    def test_by_hand(self):
        """gamma 1/2, one environment: G = 1, 2.5, then 4 after an end; each is divided by the deviation up to it."""
        norm = RewardNormalizer(1, 0.5)
        got = [norm(torch.tensor([r]), torch.tensor([e])).item() for r, e in [(1.0, False), (2.0, True), (4.0, False)]]
        assert got[0] == 10.0, "one return has no deviation: cut off"
        assert got[1] == pytest.approx(2 / np.std([1, 2.5]))
        assert got[2] == pytest.approx(4 / np.std([1, 2.5, 4]))
        norm.forget_running()
        assert norm.returns.item() == 0

    def test_environments_have_returns_of_their_own(self, gen):
        norm = RewardNormalizer(3, 0.9)
        returns, seen = np.zeros(3), []
        for _ in range(200):
            reward, ended = torch.randn(3, generator=gen), torch.rand(3, generator=gen) < 0.1
            got = norm(reward, ended)
            returns = 0.9 * returns + reward.double().numpy()
            seen.append(returns.copy())
            want = np.clip(reward.numpy() / np.sqrt(np.var(seen) + 1e-8), -10, 10)
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)
            assert got.dtype == torch.float32
            returns[ended.numpy()] = 0


def in_turn(methods):
    """What each of two ranks' calls of a method ends with, its `gather` answered with what both would tell."""
    told = []
    for method in methods:
        with pytest.raises(StopIteration):
            method(lambda x: told.append(x.clone()) or next(iter(())))
    for method in methods:
        method(lambda _x: torch.stack(told))


class TestRanks:
    def test_rows_of_all_ranks_are_taken_in_alike(self, gen):
        rows = [torch.randn(50, 3, generator=gen) * (1 + r) + r for r in range(2)]
        both = [ObservationNormalizer((3,)) for _ in range(2)]
        in_turn([lambda gather, m=m, x=x: m.update(x, gather) for m, x in zip(both, rows, strict=True)])
        want = torch.cat(rows).double()
        for moments in both:
            torch.testing.assert_close(moments.mean, want.mean(0))
            torch.testing.assert_close(moments.var, want.var(0, correction=0))
            assert moments.count == 100
        assert torch.equal(both[0].mean, both[1].mean) and torch.equal(both[0].var, both[1].var)

    def test_returns_of_all_ranks_scale_rewards_alike(self, gen):
        both = [RewardNormalizer(2, 0.0, joins=True) for _ in range(2)]  # without a discount a return is its reward
        seen = [[], []]
        for _ in range(3):
            for _ in range(5):
                for rank, norm in enumerate(both):
                    seen[rank].append(torch.randn(2, generator=gen).double() * (1 + rank))
                    norm(seen[rank][-1], torch.zeros(2, dtype=torch.bool))
            in_turn([norm.join for norm in both])
            want = torch.cat(seen[0] + seen[1])
            for norm in both:
                torch.testing.assert_close(norm.var, want.var(correction=0))
                assert norm.count == len(want)
            assert torch.equal(both[0].var, both[1].var) and torch.equal(both[0].mean, both[1].mean)
        again = RewardNormalizer(2, 0.0, joins=True)
        again.load_state_dict(both[0].state_dict())
        reward, no = torch.ones(2), torch.zeros(2, dtype=torch.bool)
        assert torch.equal(again(reward, no), both[0](reward, no))


@pytest.mark.gpu
def test_captured_updates_go_on():
    norm, eager = (RewardNormalizer(4, 0.9).cuda() for _ in range(2))
    reward, ended = torch.ones(4, device="cuda"), torch.zeros(4, dtype=torch.bool, device="cuda")
    norm(reward, ended)
    eager(reward, ended)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = norm(reward, ended)
    for i in range(5):
        reward.copy_(torch.arange(4) + i)
        ended.fill_(i == 2)
        graph.replay()
        assert torch.equal(out, eager(reward, ended))
