"""SumTree: its stream, its states, what it refuses, and what it lets people see."""

import copy

import pytest
import torch

from sharpwave.replay.sumtree import SumTree


def tree(values, **options):
    t = SumTree(len(values), **options)
    t.update(torch.arange(len(values)), torch.as_tensor(values))
    return t


def test_seed_decides_the_draws():
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    a, b, c = tree(values, seed=1), tree(values, seed=1, fanout=4), tree(values, seed=2)
    first = a.sample(50)
    assert torch.equal(first.indices, b.sample(50).indices)
    assert not torch.equal(first.indices, c.sample(50).indices)
    assert not torch.equal(first.indices, a.sample(50).indices)
    assert torch.equal(a[first.indices], first.values)
    assert first.total.item() == a.total.item()


def test_clear_keeps_the_seed():
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    fresh, used = tree(values, seed=5), tree(values * 3, seed=5)
    used.sample(17)
    used.clear()
    with pytest.raises(ValueError, match="no value was set yet"):
        used.sample(1)
    used.update(torch.arange(100), values)
    assert torch.equal(fresh.sample(64).indices, used.sample(64).indices)


def test_a_saved_tree_goes_on_with_the_same_draws():
    a = tree(torch.rand(300, generator=torch.Generator().manual_seed(0)), seed=9, extrema=True)
    a.sample(100)
    state = a.state_dict()
    b = SumTree(300, fanout=32, extrema=True)
    b.load_state_dict(state)
    for _ in range(3):
        assert torch.equal(a.sample(1000).indices, b.sample(1000).indices)
    assert (a.min.item(), a.max.item()) == (b.min.item(), b.max.item())


def test_states_are_not_aliased():
    a = tree([1.0, 2.0])
    state = a.state_dict()
    b = SumTree(2)
    b.load_state_dict(state)
    state["values"].fill_(9)
    state["offset"].fill_(9)
    assert b.numpy().tolist() == [1.0, 2.0]
    assert a.numpy().tolist() == [1.0, 2.0]
    assert b.offset.item() == 0


def test_a_state_of_another_capacity_is_refused():
    with pytest.raises(ValueError, match="holds 2 values; this tree has capacity 3"):
        SumTree(3).load_state_dict(tree([1.0, 2.0]).state_dict())


def test_a_state_with_impossible_values_is_refused():
    t = tree([1.0, 2.0])
    state = t.state_dict()
    for bad, says in [
        *(
            (state | {"values": torch.tensor([1.0, x])}, "'values' must be in")
            for x in (torch.nan, torch.inf, -5.0, 1e30)
        ),
        (state | {"values": torch.ones(2).double()}, "'values' must be"),
        (state | {"offset": torch.tensor([2**50])}, "'offset' must be in"),
        ({"values": torch.ones(2)}, "without .*seed"),
        (3, "got int"),
    ]:
        with pytest.raises(ValueError, match=says):
            t.load_state_dict(bad)
    assert t.numpy().tolist() == [1.0, 2.0] and t.sample(1).values.item() > 0


def test_extrema_and_topk():
    t = tree([0.0, 3.0, 1.0, 7.0, 0.0], extrema=True)
    assert (t.min.item(), t.max.item()) == (1.0, 7.0)
    values, indices = t.topk(2)
    assert values.tolist() == [7.0, 3.0]
    assert indices.tolist() == [3, 1]
    t.update(torch.tensor([3, 2]), torch.zeros(2))
    assert (t.min.item(), t.max.item()) == (3.0, 3.0)
    with pytest.raises(ValueError, match="k must be in"):
        t.topk(6)
    with pytest.raises(ValueError, match="extrema=True"):
        _ = tree([1.0]).min


def test_the_view_is_read_only_and_follows():
    t = tree([1.0, 2.0])
    view = t.numpy()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5.0
    t.update(torch.tensor([0]), torch.tensor([4.0]))
    assert view.tolist() == [4.0, 2.0]
    copy = t[torch.tensor([0])]
    copy.fill_(9)
    assert t[0].item() == 4.0


def test_counts_and_check():
    t = tree([1.0, 2.0], invalid="clamp")
    t.check()
    t.update(torch.tensor([0, 1]), torch.tensor([torch.nan, torch.inf]))
    assert t.numpy().tolist() == [0.0, 2.0**20]
    assert t.counts == {"invalid": 2, "out_of_range": 0, "empty_draws": 0, "stale": 0}
    t.tree.status[1] = 3
    with pytest.raises(IndexError, match="3 indices"):
        t.check()
    t.tree.status[1], t.tree.status[2] = 0, 1
    with pytest.raises(ValueError, match="every value was 0"):
        t.check()


def test_priorities_through_the_object():
    t, top = SumTree(3), torch.ones(1)
    t.update_priorities(torch.tensor([0, 2]), torch.tensor([3.0, -8.0]), top, alpha=0.5, eps=1.0)
    assert t.numpy().tolist() == [2.0, 0.0, 3.0]
    assert top.item() == 9.0
    assert set(t.sample(50).indices.tolist()) == {0, 2}


def test_refusals():
    with pytest.raises(ValueError, match="no value was set yet"):
        SumTree(3).sample(1)
    with pytest.raises(ValueError, match="invalid must be"):
        SumTree(3, invalid="ignore")
    with pytest.raises(ValueError, match="backend must be"):
        SumTree(3, backend="cuda")
    with pytest.raises(ValueError, match="the tree's device"):
        SumTree(3).update(torch.zeros(1, dtype=torch.int64, device="meta"), torch.ones(1))
    t = tree([0.0, 0.0])
    with pytest.raises(ValueError, match="nothing to draw from"):
        t.sample(1)


def test_a_copy_goes_its_own_way():
    t = tree([1.0, 0.0])
    other = copy.deepcopy(t)
    other.update(torch.tensor([0, 1]), torch.tensor([0.0, 2.0]))
    assert other.sample(3).indices.tolist() == [1, 1, 1] and t.sample(3).indices.tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_devices_draw_the_same():
    values = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    cpu = tree(values, seed=3)
    gpu = SumTree(10_000, device="cuda", seed=3)
    gpu.load_state_dict(cpu.state_dict())
    for stratified in (False, True):
        a, b = cpu.sample(5000, stratified=stratified), gpu.sample(5000, stratified=stratified)
        assert torch.equal(a.indices, b.indices.cpu())
        assert torch.equal(a.values, b.values.cpu())


@pytest.mark.gpu
def test_an_all_zero_tree_is_flagged_on_a_gpu():
    t = SumTree(4, device="cuda")
    t.update(torch.arange(4, device="cuda"), torch.zeros(4, device="cuda"))
    draw = t.sample(2)
    assert draw.indices.tolist() == [0, 0]
    with pytest.raises(ValueError, match="every value was 0"):
        t.check()
