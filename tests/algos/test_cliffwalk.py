"""The blind cliffwalk of Schaul et al. 2016: what priority is worth, and that the benchmark's example is theirs."""

import statistics

import pytest
import torch

from benchmarks.cliffwalk import transitions, updates_needed


def test_the_memory_holds_every_action_sequence():
    """n = 3: 8 sequences reach state 0, 4 state 1, 2 state 2; half of each go on, and one of 14 is rewarded."""
    data = transitions(3)
    assert data["state"].bincount().tolist() == [8, 4, 2]
    right = data["action"] == data["state"] % 2
    assert right.sum() == 7 and data["reward"].sum() == 1
    assert torch.equal(data["terminated"], ~right | (data["state"] == 2))
    assert data["reward"][right & (data["state"] == 2)].all()


@pytest.mark.long
def test_prioritized_beats_uniform_and_by_more_where_more_is_held():
    """Medians of three seeds: half the updates at 62 transitions, a third at 254."""
    for n, factor in ((5, 2), (7, 3)):
        uniform, prioritized = (
            statistics.median(updates_needed(n, alpha, s) for s in range(3)) for alpha in (0.0, 0.6)
        )
        assert uniform > factor * prioritized, (n, uniform, prioritized)
