"""The sampler for torchrl, inside torchrl's own buffers."""

import pytest
import torch

pytest.importorskip("torchrl", reason="needs torchrl: pip install 'sharpwave[torchrl]'")

from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data import PrioritizedSampler as TheirSampler
from torchrl.data.replay_buffers import ReplayBuffer

from sharpwave import PrioritizedReplay
from sharpwave.replay.adapters.torchrl import PrioritizedSampler


def filled(n=100, capacity=500, **kwargs):
    sampler = PrioritizedSampler(capacity, alpha=kwargs.pop("alpha", 0.6), beta=kwargs.pop("beta", 0.4), **kwargs)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=64, priority_key="td_error"
    )
    buffer.extend(TensorDict({"x": torch.arange(n), "td_error": torch.ones(n)}, [n]))
    return buffer, sampler


def test_only_what_is_filled_is_drawn():
    buffer, sampler = filled()
    assert isinstance(sampler, TheirSampler)
    sampler.update_priority(torch.arange(100), torch.rand(100))
    for _ in range(200):
        batch = buffer.sample()
        assert batch["index"].max() < 100
        assert torch.equal(batch["x"], batch["index"])


@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
def test_priorities_and_weights_by_hand():
    buffer, sampler = filled(3, 8, alpha=1.0, beta=1.0)
    sampler.update_priority(torch.tensor([0, 1, 2]), torch.tensor([1.0, 4.0, 5.0]))
    batch = buffer.sample(20_000)
    share = torch.bincount(batch["index"]) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.1, 0.4, 0.5]), atol=0.015, rtol=0)
    weight = batch["priority_weight"]
    torch.testing.assert_close(weight, torch.tensor([1, 1 / 4, 1 / 5])[batch["index"]], atol=1e-5, rtol=1e-5)


def test_td_errors_go_back_through_the_librarys_own_call():
    buffer, sampler = filled(50, 100, alpha=1.0)
    batch = buffer.sample()
    batch["td_error"] = batch["x"].float() + 2
    buffer.update_tensordict_priority(batch)
    i = batch["index"]
    torch.testing.assert_close(sampler.tree.leaves[i], i.float() + 2, atol=1e-5, rtol=1e-6)
    buffer.extend(TensorDict({"x": torch.zeros(1, dtype=torch.int64)}, [1]))
    torch.testing.assert_close(sampler.tree.leaves[50], i.max() + 2.0, atol=1e-4, rtol=1e-6)


def test_plain_buffers_and_saving(tmp_path):
    def make():
        sampler = PrioritizedSampler(32, alpha=0.7, beta=0.5)
        return ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler, batch_size=16)

    buffer = make()
    buffer.extend(torch.arange(40))
    buffer.update_priority(torch.arange(20), torch.rand(20))
    other = make()
    other.load_state_dict(buffer.state_dict())
    buffer.sampler.dumps(tmp_path / "saved")
    third = make()
    third.extend(torch.arange(40))
    third.sampler.loads(tmp_path / "saved")
    for _ in range(5):
        draw = buffer.sample()
        assert torch.equal(draw, other.sample())
        assert torch.equal(draw, third.sample())


def test_alpha_changes_what_is_held():
    _, sampler = filled(2, 4, alpha=0.5)
    sampler.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 16.0]))
    sampler.alpha = 1.0
    torch.testing.assert_close(sampler.tree.leaves[:2], torch.tensor([1.0, 16.0]), rtol=1e-5, atol=0)


def test_priorities_are_kept_in_proportion_or_refused():
    _, sampler = filled(3, 8, alpha=0.6, eps=0.0)
    sampler.update_priority(torch.arange(3), torch.tensor([0.0, 1e8, 1e9]))
    leaves = sampler.tree.leaves[:3]
    assert leaves[2] / leaves[1] == pytest.approx(10**0.6, rel=1e-5) and 0 < leaves[0] < 1e-12
    for bad in (-1.0, 1e12):
        with pytest.raises(ValueError, match=r"priority must be in \[0, 1.08.*e\+10\]"):
            sampler.update_priority(torch.arange(1), torch.tensor([bad]))
    _, steep = filled(3, 8, alpha=1.5)
    steep.update_priority(torch.arange(3), torch.tensor([1.0, 4.0, 9.0]))
    torch.testing.assert_close(steep.tree.leaves[:3], torch.tensor([1.0, 8.0, 27.0]), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 4\]"):
        steep.alpha = 5.0
    assert steep.alpha == 1.5
    for options in (dict(alpha=9.0), dict(eps=-1.0), dict(alpha=float("nan"))):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 4\] and eps"):
            PrioritizedSampler(8, **dict(alpha=0.6, beta=0.4) | options)


def test_a_damaged_state_is_refused():
    _, sampler = filled(3, 8)
    state = sampler.state_dict()
    for change in (
        dict(leaves=torch.full((8,), torch.nan)),
        dict(leaves=-state["leaves"]),
        dict(offset=torch.tensor([2**50])),
        dict(largest=torch.tensor([torch.inf])),
        dict(alpha="1"),
        dict(beta=-1.0),
        dict(seed=None),
    ):
        with pytest.raises(ValueError, match=min(change)):
            sampler.load_state_dict(state | change)
    assert torch.equal(sampler.tree.leaves, state["leaves"])
    sampler.load_state_dict(state)


def test_a_tensordict_is_a_batch_for_our_own_buffer():
    buffer = PrioritizedReplay(10)
    data = TensorDict({"obs": TensorDict({"image": torch.zeros(4, 2)}, [4]), "action": torch.arange(4)}, [4])
    buffer.add(data)
    assert buffer.sample(3).obs.image.shape == (3, 2)
