"""The pure arithmetic, by hand and by its identities."""

import pytest
import torch

from sharpwave.replay import SequenceReplay, windows


def n_step(reward, terminated, truncated, gamma=0.5):
    flags = (torch.tensor([x], dtype=torch.bool) for x in (terminated, truncated))
    return [x.item() for x in windows.n_step_return(torch.tensor([reward]), *flags, gamma)]


@pytest.mark.parametrize(
    "terminated, truncated, want",
    [
        ([0, 0, 0], [0, 0, 0], (1 + 2 / 2 + 4 / 4, 1 / 8, 3)),
        ([0, 1, 0], [0, 0, 0], (1 + 2 / 2, 0, 2)),
        ([0, 0, 0], [0, 1, 0], (1 + 2 / 2, 1 / 4, 2)),
        ([1, 0, 1], [1, 0, 0], (1, 0, 1)),
        ([0, 0, 1], [0, 0, 0], (3, 0, 3)),
        ([0, 0, 1], [1, 0, 0], (1, 1 / 2, 1)),
    ],
)
def test_n_step_returns(terminated, truncated, want):
    """r = [1, 2, 4], gamma = 0.5; what lies after an end belongs to another episode."""
    assert tuple(n_step([1.0, 2.0, 4.0], terminated, truncated)) == want


def test_two_windows_make_one():
    """R_{n+m} = R_n + discount_n R'_m, in float64, also across ends."""
    gen = torch.Generator().manual_seed(0)
    reward = torch.randn(500, 7, generator=gen, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 500, 7, generator=gen) < 0.1
    whole, discount, length = windows.n_step_return(reward, terminated, truncated, 0.9)
    first, d1, m1 = windows.n_step_return(reward[:, :3], terminated[:, :3], truncated[:, :3], 0.9)
    rest, d2, m2 = windows.n_step_return(reward[:, 3:], terminated[:, 3:], truncated[:, 3:], 0.9)
    goes_on = ~(terminated | truncated)[:, :3].any(1)
    torch.testing.assert_close(whole, torch.where(goes_on, first + 0.9**3 * rest, first))
    torch.testing.assert_close(discount, torch.where(goes_on, 0.9**3 * d2, d1))
    assert torch.equal(length, torch.where(goes_on, 3 + m2, m1))


def test_moving_stays_in_the_ring():
    slot = torch.tensor([0, 4, 5, 9])
    assert windows.move(slot, 1, 5).tolist() == [1, 0, 6, 5]
    assert windows.move(slot, -1, 5).tolist() == [4, 3, 9, 8]
    far = torch.tensor([2**31 - 2])
    assert windows.move(far, 1, 2**31 - 1).tolist() == [0]


def test_stacks_repeat_the_first_frame():
    slots = windows.stack_slots(torch.tensor([7, 5, 6]), torch.tensor([9, 0, 1]), 4, 5)
    assert slots.tolist() == [[9, 5, 6, 7], [5, 5, 5, 5], [5, 5, 5, 6]]


def test_weights_by_hand():
    """p^alpha = [1, 4], N = 2, beta = 1: (N P)^-1 = [2.5, 0.625]."""
    values, total = torch.tensor([1.0, 4.0, 0.0]), torch.tensor(5.0, dtype=torch.float64)
    one = torch.tensor(1.0)
    held = torch.tensor(2)
    assert windows.importance_weights(values, total, held, one, None).tolist() == [2.5, 0.625, 0]
    assert windows.importance_weights(values, total, held, one, one).tolist() == [1, 0.25, 0]
    assert windows.importance_weights(values, total, held, torch.tensor(0.0), one).tolist() == [1, 1, 0]


def test_priority_of_a_sequence():
    """eta = 0.9, |td| = [1, 3]: 0.9 * 3 + 0.1 * 2 = 2.9; with the second masked, 1."""
    td = torch.tensor([[-1.0, 3.0]])
    assert windows.sequence_td(td, 0.9).item() == pytest.approx(2.9)
    assert windows.sequence_td(td, 0.9, torch.tensor([[True, False]])).item() == pytest.approx(1)
    assert windows.sequence_td(td, 0.9, torch.zeros(1, 2, dtype=torch.bool)).item() == 0
    assert windows.sequence_td(torch.tensor([[1.0, float("nan")]]), 0.9).isnan().all()


def test_burn_in_does_not_count_for_priorities():
    buffer = SequenceReplay(30, num_envs=1, length=2, burn_in=1, alpha=1.0)
    for t in range(6):
        ends = torch.zeros(1, dtype=torch.bool)
        buffer.add(obs=[t], next_obs=[t + 1], reward=[0.0], terminated=ends, truncated=ends)
    batch = buffer.sample(1)
    for td in (torch.tensor([[50.0, 1.0, 3.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([2.9])):
        buffer.update_priorities(batch.indices, td, batch.generations)
        assert buffer.priorities(batch.indices).item() == pytest.approx(2.9, rel=1e-5)
    assert batch.next_obs.item() == batch.obs[0, -1].item() + 1
