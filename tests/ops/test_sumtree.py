"""The sum tree: hand-worked draws, histories against a fresh build, backends against the reference, known faults."""

import copy
import pickle
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpwave.ops.cdf import build_cdf
from sharpwave.ops.sumtree import (
    MAX_LEAF,
    TreeDraw,
    sum_tree,
    tree_extrema,
    tree_rebuild,
    tree_sample,
    tree_total,
    tree_update,
    tree_update_priorities,
)
from sharpwave.ops.sumtree import reference as exact
from tests.conftest import backends

ALL = ("reference", "cpu", "triton")


def start(device="cpu", at=0):
    return torch.full((1,), at, dtype=torch.int64, device=device)


def filled(values, device="cpu", **options):
    tree = sum_tree(len(values), device, **options)
    tree.leaves.copy_(torch.as_tensor(values))
    tree_rebuild(tree)
    return tree


def at_mass(values, mass, fanout=16):
    """The index that a draw takes at a given mass, by the reference's descent."""
    tree = filled(values, fanout=fanout)
    units = [int(m * 2**exact.FRACTION_BITS) for m in mass]
    rest = (torch.tensor([u >> 32 for u in units]), torch.tensor([u & 0xFFFFFFFF for u in units]))
    offsets = exact.level_offsets(tree.capacity, fanout)
    index = torch.zeros(len(mass), dtype=torch.int64)
    for level in range(len(offsets) - 1):
        children = tree.nodes[offsets[level] + exact._children(index, fanout)]
        index, rest = exact._descend(index, rest, children[..., 0], children[..., 1])
    index, _ = exact._descend(index, rest, *exact.digits(tree.storage[exact._children(index, fanout)]))
    return index


def assert_fresh(tree):
    """Every sum and extremum is what a build from the leaves gives, by bits; and the total is the leaves' sum."""
    fresh = filled(tree.leaves.cpu(), fanout=tree.fanout, extrema=tree.extrema is not None)
    assert torch.equal(tree.nodes.cpu(), fresh.nodes)
    if tree.extrema is not None:
        assert torch.equal(tree.extrema.cpu(), fresh.extrema)
    units = sum((h << 32) + low for h, low in zip(*(x.tolist() for x in exact.digits(tree.leaves.cpu())), strict=True))
    assert tree_total(tree).item() == pytest.approx(units / 2.0**exact.FRACTION_BITS, rel=1e-15)


# Draws


def test_masses_hit_exactly():
    """p = [10, 5, 2]: masses 0.5, 1.5, ... 16.5 hit 10, 5 and 2 times."""
    index = at_mass([10.0, 5.0, 2.0], [i + 0.5 for i in range(17)])
    assert torch.bincount(index).tolist() == [10, 5, 2]


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 1000, 255, 256, 257])
def test_equal_priorities_mass_and_index(capacity):
    index = at_mass([1.0] * capacity, [i + 0.5 for i in range(capacity)], fanout=4)
    assert index.tolist() == list(range(capacity))


def test_boundaries_belong_to_the_next():
    assert at_mass([0.0, 2.0, 0.0, 1.0, 0.0], [0, 1.999, 2, 2.999], fanout=2).tolist() == [1, 1, 3, 3]


def test_every_extreme_of_the_uniform_finds_a_positive_leaf(monkeypatch):
    """All 64 random bits 0, and all 1."""
    for values in ([0, 0, 0, 1], [1e-8, 0], [0, 1, 0], [MAX_LEAF] * 5 + [0], [0, 1e-30, 0, MAX_LEAF, 0, 1e-30, 0]):
        tree = filled([float(v) for v in values], fanout=4)
        for word in (0, 0xFFFFFFFF):
            monkeypatch.setattr(
                exact._philox, "draw_words", lambda *_, w=word: (torch.full((3,), w), torch.full((3,), w))
            )
            for stratified in (False, True):
                draw = tree_sample(tree, 3, 0, start(), stratified=stratified, backend="reference")
                assert (draw.values > 0).all()


@backends(*ALL)
def test_only_the_positive_leaf(backend, device):
    tree = filled([0.0, 0.0, 0.0, 1.0], device)
    draw = tree_sample(tree, 20, 0, start(device), backend=backend)
    assert (draw.indices == 3).all()
    assert draw.total.item() == 1.0


def test_unwritten_slots_are_never_drawn():
    tree = sum_tree(500)
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    tree_update(tree, torch.arange(100), values)
    offset = start()
    for _ in range(10):
        draw = tree_sample(tree, 1_000_000, 7, offset)
        assert draw.indices.max() < 100
        assert (draw.values > 0).all()


def test_tiny_beside_zero_and_beside_huge():
    tree = filled([1e-8, 0.0] * 512)
    assert (tree_sample(tree, 1_000_000, 0, start()).indices % 2 == 0).all()
    # 2^-26 beside 2^20, at the last unit of mass before the first ends, the next, and the very last.
    huge, unit = Fraction(2**20), Fraction(1, 2**exact.FRACTION_BITS)
    masses = [huge - unit, huge, huge + Fraction(1, 2**26) - unit]
    assert at_mass([2.0**20, 2.0**-26], masses).tolist() == [0, 1, 1]


def test_every_slot_of_4096_is_reachable():
    tree = filled(torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5)
    assert tree_sample(tree, 200_000, 0, start()).indices.unique().numel() == 4096


def test_parity_of_2_25_equal_leaves():
    """A 24-bit uniform would favour even indices; chi-square with one degree of freedom."""
    tree = filled(torch.ones(1 << 25))
    index = tree_sample(tree, 1_000_000, 0, start()).indices
    odd = (index % 2).double().sum().item()
    assert (odd - 500_000) ** 2 / 250_000 < 10.8  # 1 in 1000
    assert index.max() > (1 << 25) - 1000


@pytest.mark.parametrize("kind", ["uniform", "heavy", "sparse"])
@pytest.mark.parametrize("stratified", [False, True])
def test_chi_square(kind, stratified):
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(300, generator=generator)
    if kind == "heavy":
        p = p**8 * 1e5
    if kind == "sparse":
        p[torch.rand(300, generator=generator) < 0.95] = 0
    n = 300_000
    index = tree_sample(filled(p), n, 3, start(), stratified=stratified).indices
    expected = p.double() / p.double().sum() * n
    observed = torch.bincount(index, minlength=300).double()
    assert (observed[p == 0] == 0).all()
    keep = expected >= 5
    degrees = int(keep.sum()) - 1
    excess = (((observed - expected) ** 2 / expected)[keep].sum().item() - degrees) / (2 * degrees) ** 0.5
    assert excess < (0 if stratified else 4)


@backends("cpu", "triton")
def test_stratified_in_range_and_sorted(backend, device):
    n = 65536 if backend == "cpu" or device == "cuda" else 33
    tree = filled(torch.rand(1000, generator=torch.Generator().manual_seed(0)).clamp(min=0.01), device)
    draw = tree_sample(tree, n, 5, start(device), stratified=True, backend=backend)
    assert (draw.indices.diff() >= 0).all()
    assert draw.indices.max() < 1000


@backends(*ALL)
def test_one_stream_and_a_counter_past_32_bits(backend, device):
    tree = filled([1.0, 2.0, 3.0, 4.0] * 5, device)
    offset = start(device, 2**32 - 2)
    parts = [tree_sample(tree, n, 3, offset, backend=backend).indices for n in (3, 2)]
    assert offset.item() == 2**32 + 3
    whole = tree_sample(tree, 5, torch.tensor(3, device=device), start(device, 2**32 - 2), backend=backend)
    assert torch.equal(torch.cat(parts), whole.indices)


# Updates


@backends(*ALL)
def test_update_by_hand(backend, device):
    tree = sum_tree(6, device, extrema=True, fanout=2)
    tree_update(
        tree, torch.tensor([0, 5, 2], device=device), torch.tensor([1.0, 2.0, 4.0], device=device), backend=backend
    )
    assert tree.leaves.tolist() == [1, 0, 4, 0, 0, 2]
    assert tree_total(tree).item() == 7.0
    assert [x.item() for x in tree_extrema(tree)] == [1.0, 4.0]
    tree_update(tree, torch.tensor([2, 0], device=device), torch.tensor([0.5, 0.0], device=device), backend=backend)
    assert tree_total(tree).item() == 2.5
    assert [x.item() for x in tree_extrema(tree)] == [0.5, 2.0]
    assert_fresh(tree)


@backends(*ALL)
def test_the_last_of_equal_indices_wins(backend, device):
    tree = sum_tree(10, device)
    for _ in range(1000 if backend == "cpu" else 3):
        tree_update(
            tree, torch.tensor([3, 3, 3], device=device), torch.tensor([1.0, 2, 9], device=device), backend=backend
        )
        assert tree.leaves[3].item() == 9.0
        assert tree_total(tree).item() == 9.0


@backends(*ALL)
def test_an_invalid_last_value_leaves_the_last_valid_one(backend, device):
    index = torch.tensor([3, 3, 3], device=device)
    tree = sum_tree(10, device)
    tree_update(tree, index, torch.tensor([1.0, 2.0, torch.nan], device=device), backend=backend)
    assert tree.leaves[3].item() == 2.0
    tree_update(tree, index, torch.tensor([1.0, 2.0, torch.nan], device=device), invalid="clamp", backend=backend)
    assert tree.leaves[3].item() == 0.0
    assert tree.status.tolist() == [2, 0, 0, 0]


@backends(*ALL)
def test_invalid_values_are_refused_or_clamped_and_counted(backend, device):
    index = torch.arange(5, device=device)
    values = torch.tensor([1.0, torch.nan, torch.inf, -3.0, 2 * MAX_LEAF], device=device)
    refused = filled([0.5] * 5, device)
    tree_update(refused, index, values, backend=backend)
    assert refused.leaves.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]
    clamped = filled([0.5] * 5, device)
    tree_update(clamped, index, values, invalid="clamp", backend=backend)
    assert clamped.leaves.tolist() == [1.0, 0.0, MAX_LEAF, 0.0, MAX_LEAF]
    for tree in (refused, clamped):
        assert tree.status[0].item() == 4
        assert_fresh(tree)


@backends("reference", "cpu")
def test_indices_out_of_range_raise_and_change_nothing(backend, device):
    tree = filled([1.0] * 10)
    for bad in (-1, 10, 10 + 2**32):
        with pytest.raises(IndexError, match=r"indices must be in \[0, 10\)"):
            tree_update(tree, torch.tensor([2, bad]), torch.tensor([5.0, 5.0]), backend=backend)
        with pytest.raises(IndexError, match=r"indices must be in \[0, 10\)"):
            tree_update_priorities(
                tree, torch.tensor([2, bad]), torch.ones(2), torch.ones(1), alpha=0.6, backend=backend
            )
    assert (tree.leaves == 1).all()
    assert tree_total(tree).item() == 10.0


@pytest.mark.filterwarnings("error")
@backends(*ALL)
def test_draws_into_given_memory(backend, device):
    tree = filled(torch.rand(90, generator=torch.Generator().manual_seed(0)), device)
    offset = start(device)
    want = tree_sample(tree, 5, 1, offset, backend=backend)
    out = TreeDraw(*(torch.full_like(x, -1) for x in want))
    assert tree_sample(tree, 5, 1, start(device), out=out, backend=backend) is out
    assert all(torch.equal(x, y) for x, y in zip(want, out, strict=True))
    with pytest.raises(ValueError, match=r"out.indices must be \(4,\) torch.int64"):
        tree_sample(tree, 4, 1, offset, out=out, backend=backend)


@backends("triton")
def test_indices_out_of_range_never_wrap_on_a_device(backend, device):
    tree = filled([1.0] * 10, device)
    index = torch.tensor([2, -1, 10, 10 + 2**32], device=device)
    tree_update(tree, index, torch.full((4,), 5.0, device=device), backend=backend)
    assert tree.leaves.tolist() == [1, 1, 5, 1, 1, 1, 1, 1, 1, 1]
    assert tree.status.tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize("capacity, fanout", [(1, 16), (33, 4), (300, 16), (1100, 32)])
@backends("cpu", "triton")
def test_histories_equal_the_reference(backend, device, capacity, fanout):
    """Leaves, counts, sums, extrema and draws; the reference's tree has another fan-out, which must not show."""
    from sharpwave.ops.sumtree.parity import _values

    want = sum_tree(capacity, extrema=True, fanout=8)
    got = sum_tree(capacity, device, extrema=True, fanout=fanout)
    generator = torch.Generator().manual_seed(capacity)
    for step, n in enumerate((11, 1, 12)):
        index = torch.randint(0, capacity, (n,), generator=generator)
        values = _values(n, step)
        invalid = ("refuse", "clamp")[step % 2]
        tree_update(want, index, values, invalid=invalid, backend="reference")
        tree_update(got, index.to(device), values.to(device), invalid=invalid, backend=backend)
    assert torch.equal(want.leaves, got.leaves.cpu())
    assert torch.equal(want.status, got.status.cpu())
    assert [x.item() for x in tree_extrema(want)] == [x.item() for x in tree_extrema(got)]
    assert_fresh(got)
    for stratified in (False, True):
        a = tree_sample(want, 6, 11, start(), stratified=stratified, backend="reference")
        b = tree_sample(got, 6, 11, start(device), stratified=stratified, backend=backend)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y.cpu())


@backends("cpu", "triton")
def test_rebuild_equals_the_reference(backend, device):
    values = torch.rand(70, generator=torch.Generator().manual_seed(0)) ** 9
    want = filled(values, extrema=True, fanout=4)
    got = sum_tree(70, device, extrema=True, fanout=4)
    got.leaves.copy_(values)
    got.nodes.fill_(99)
    tree_rebuild(got, backend=backend)
    assert torch.equal(want.nodes, got.nodes.cpu())
    assert torch.equal(want.extrema, got.extrema.cpu())


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_history_leaves_what_numpy_would(data):
    capacity = data.draw(st.integers(1, 70))
    fanout = data.draw(st.sampled_from([2, 4, 16, 64]))
    tree, want = sum_tree(capacity, extrema=True, fanout=fanout), np.zeros(capacity, np.float32)
    value = st.floats(0, MAX_LEAF, width=32)
    items = st.lists(st.tuples(st.integers(0, capacity - 1), value), min_size=0, max_size=30)
    for batch in data.draw(st.lists(items, max_size=5)):
        index = np.array([i for i, _ in batch], np.int64)
        values = np.array([v for _, v in batch], np.float32)
        tree_update(tree, torch.from_numpy(index), torch.from_numpy(values))
        want[index] = values
    assert np.array_equal(tree.leaves.numpy(), want)
    assert_fresh(tree)
    smallest, largest = (x.item() for x in tree_extrema(tree))
    assert largest == want.max()
    assert smallest == (want[want > 0].min() if (want > 0).any() else np.inf)
    if want.any():
        draw = tree_sample(tree, 20, 0, start())
        assert (want[draw.indices.numpy()] > 0).all()
        again = tree_sample(tree, 20, 0, start(), backend="reference")
        assert torch.equal(draw.indices, again.indices)


def test_no_drift_over_many_updates():
    """The sums of float32 trees drift within a few thousand updates; these cannot."""
    tree = sum_tree(1000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        index = torch.randint(0, 1000, (256,), generator=generator)
        tree_update(tree, index, torch.exp(torch.randn(256, generator=generator) * 9).clamp(max=1e6))
    assert_fresh(tree)
    tree_update(tree, torch.arange(1000), torch.zeros(1000))
    assert tree_total(tree).item() == 0.0
    assert not tree.nodes.any()


def test_layout_past_2_31_bytes_and_elements():
    """2^31 - 1 leaves: offsets are Python and int64 numbers, and the kernels' level sizes are the same."""
    for capacity, fanout in ((2**31 - 1, 16), (2**31 - 1, 32), (10**9, 256), (17, 16), (16, 16)):
        offsets = exact.level_offsets(capacity, fanout)
        levels = len(offsets) - 1
        sizes = [b - a for a, b in pairwise(offsets)]
        for level in range(1, levels + 1):
            nodes = -(-capacity // fanout**level)
            assert sizes[levels - level] == -(-nodes // fanout) * fanout
        assert sizes[0] == fanout
    # The largest total fits the digits.
    assert (2**31 - 1) * int(MAX_LEAF * 2 ** (exact.FRACTION_BITS - 32)) + 2**31 < 2**63


# Priorities


@backends(*ALL)
def test_priorities_by_hand(backend, device):
    """alpha = 1/2, eps = 1: td 3 -> p 4, leaf 2; td -8 -> p 9, leaf 3; NaN -> the new maximum, 16, leaf 4."""
    tree, top = sum_tree(4, device), torch.ones(1, device=device)
    td_error = torch.tensor([3.0, -8.0, torch.nan, 15.0], device=device).bfloat16()
    tree_update_priorities(tree, torch.arange(4, device=device), td_error, top, alpha=0.5, eps=1.0, backend=backend)
    torch.testing.assert_close(tree.leaves.cpu(), torch.tensor([2.0, 3.0, 4.0, 4.0]), rtol=1e-6, atol=0)
    assert top.item() == 16.0
    assert tree.status.tolist() == [1, 0, 0, 0]


@backends(*ALL)
def test_a_finite_td_error_is_never_bad(backend, device):
    tree, top = filled([1.0, 1.0, 1.0, 1.0], device), torch.ones(1, device=device)
    td = torch.tensor([-1e300, 2.0, torch.inf, torch.nan], dtype=torch.float64, device=device)
    indices = torch.arange(4, device=device)
    tree_update_priorities(tree, indices, td, top, alpha=1.0, eps=1e-6, p_max=100.0, backend=backend)
    assert tree.leaves.tolist() == pytest.approx([100.0, 2.0, 100.0, 100.0], rel=1e-5)
    assert tree.status[exact.INVALID] == 2 and top.item() == 100.0


@backends(*ALL)
def test_alpha_zero_is_uniform_and_p_max_holds(backend, device):
    tree, top = sum_tree(3, device), torch.ones(1, device=device)
    index, td_error = torch.arange(3, device=device), torch.tensor([0.0, 5.0, 1e30], device=device)
    tree_update_priorities(tree, index, td_error, top, alpha=0.0, backend=backend)
    assert tree.leaves.tolist() == [1.0, 1.0, 1.0]
    assert top.item() == 1e6
    tree_update_priorities(tree, index, td_error, top, alpha=0.5, backend=backend)
    torch.testing.assert_close(tree.leaves[[0, 2]].cpu(), torch.tensor([1e-3, 1e3]), rtol=1e-5, atol=0)


@backends(*ALL)
def test_stale_generations_are_dropped(backend, device):
    """A stale item neither stores its value, nor beats a fresh one of the same index, nor counts for the maximum."""
    tree, top = filled([5.0] * 4, device), torch.ones(1, device=device)
    tree_update_priorities(
        tree,
        torch.tensor([0, 1, 1, 2], device=device),
        torch.tensor([3.0, 2.0, 900.0, 800.0], device=device),
        top,
        alpha=1.0,
        eps=1.0,
        generation=torch.tensor([7, 7, 6, 6], device=device),
        generations=torch.tensor([7, 7, 7, 7], device=device),
        backend=backend,
    )
    torch.testing.assert_close(tree.leaves.cpu(), torch.tensor([4.0, 3.0, 5.0, 5.0]), rtol=1e-6, atol=0)
    assert top.item() == 4.0
    assert tree.status.tolist() == [0, 0, 0, 2]


@backends(*ALL)
def test_what_was_never_drawn_is_stale(backend, device):
    """Generations below 0, even equal ones, and leaves of 0; nor do they count for the maximum, also beside a NaN."""
    tree, top = filled([5.0, 5.0, 0.0, 5.0], device), torch.ones(1, device=device)
    tree_update_priorities(
        tree,
        torch.arange(4, device=device),
        torch.tensor([800.0, 900.0, 700.0, float("nan")], device=device),
        top,
        alpha=1.0,
        generation=torch.tensor([-1, -2, 7, 7], device=device),
        generations=torch.tensor([-1, -2, 7, 7], device=device),
        backend=backend,
    )
    assert tree.leaves.tolist() == [5.0, 5.0, 0.0, 1.0] and top.item() == 1.0
    assert tree.status.tolist() == [1, 0, 0, 3]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_copy_is_a_whole_tree(copied):
    tree = copied(filled([1.0, 2.0, 3.0], extrema=True))
    tree_update(tree, torch.tensor([1]), torch.tensor([7.0]))
    assert tree.leaves.tolist() == [1.0, 7.0, 3.0] and tree_extrema(tree)[1].item() == 7.0
    assert_fresh(tree)


# The op


@backends("reference", "cpu")
def test_an_empty_tree_raises(backend, device):
    with pytest.raises(ValueError, match="nothing to draw from"):
        tree_sample(sum_tree(5), 1, 0, start(), backend=backend)


@pytest.mark.filterwarnings("error")
@backends("triton")
def test_an_empty_tree_is_flagged_on_a_device(backend, device):
    """Of one level and of several: the walk must not leave the storage, whose end holds NaN here."""
    for capacity, fanout in ((5, 16), (60, 4)):
        tree = sum_tree(capacity, device, fanout=fanout)
        fence = torch.full((len(tree.storage) + 4096,), torch.nan, device=device)
        fence[: len(tree.storage)] = 0
        tree = replace(tree, storage=fence[: len(tree.storage)], arrays=None)
        draw = tree_sample(tree, 3, 0, start(device), backend=backend)
        assert draw.indices.tolist() == [0, 0, 0]
        assert draw.values.tolist() == [0.0, 0.0, 0.0]
        assert draw.total.item() == 0.0
        assert tree.status.tolist() == [0, 0, 1, 0]


def test_opcheck_and_the_dispatcher_agree_with_the_direct_path():
    tree = filled([1.0, 2.0, 3.0], extrema=True)
    state = (tree.storage, tree.nodes, tree.extrema, tree.status)
    index, values, ops = torch.tensor([1, 1]), torch.tensor([4.0, 5.0]), torch.ops.sharpwave
    torch.library.opcheck(ops.tree_update.default, (*state, index, values, 3, 16, False, "auto"))
    rest = (torch.ones(1), None, None, 3, 16, 0.6, 1e-6, 1e6, "auto")
    torch.library.opcheck(ops.tree_update_priorities.default, (*state, index, values, *rest))
    torch.library.opcheck(ops.tree_rebuild.default, (tree.storage, tree.nodes, tree.extrema, 3, 16, "auto"))
    args = (tree.storage, tree.nodes, tree.status, start(), 4, 1, None, 3, 16, False, "auto")
    torch.library.opcheck(ops.tree_sample.default, args)
    out = (torch.empty(4, dtype=torch.int64), torch.empty(4), torch.empty((), dtype=torch.float64))
    torch.library.opcheck(ops.tree_sample_out.default, (*args[:4], *out, *args[4:]))
    assert torch.equal(ops.tree_sample.default(*args)[0], tree_sample(tree, 4, 1, start()).indices)


def test_non_contiguous_and_half_precision_arguments():
    tree = sum_tree(8)
    tree_update(tree, torch.arange(8)[::2], torch.arange(8).bfloat16()[::2])
    assert tree.leaves.tolist() == [0, 0, 2, 0, 4, 0, 6, 0]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda t: sum_tree(0), ValueError, "capacity must be"),
        (lambda t: sum_tree(5, fanout=3), ValueError, "fanout must be a power of two"),
        (lambda t: tree_update(t, torch.ones(2), torch.ones(2)), TypeError, "indices must be int64"),
        (lambda t: tree_update(t, torch.tensor([1]), torch.ones(2)), ValueError, "must both be"),
        (lambda t: tree_update(t, torch.tensor([1]), torch.tensor([1])), TypeError, "values must be floating"),
        (lambda t: tree_update(t, torch.tensor([1]), torch.ones(1), invalid="x"), ValueError, "invalid must be"),
        (lambda t: tree_update(t, torch.tensor([1]), torch.ones(1, device="meta")), ValueError, "the tree's device"),
        (lambda t: tree_sample(t, 0, 0, start()), ValueError, "n must be an integer >= 1"),
        (tree_extrema, ValueError, "extrema=True"),
        (
            lambda t: tree_update_priorities(t, torch.tensor([1]), torch.ones(1), torch.ones(1), alpha=3.0),
            ValueError,
            "alpha must be",
        ),
        *(
            (lambda t, s=settings: tree_update_priorities(t, torch.tensor([1]), torch.ones(1), **s), ValueError, words)
            for settings, words in [
                (dict(max_priority=torch.ones(1), alpha=1000), "alpha must be"),
                (dict(max_priority=torch.ones(1), alpha=0.5, eps=1e-46), "eps and p_max"),
                (dict(max_priority=torch.tensor(float("nan")), alpha=0.5), "max_priority must"),
                (dict(max_priority=torch.tensor([-1.0]), alpha=0.5), "max_priority must"),
                (dict(max_priority=torch.tensor(-1.0), alpha=0.5, backend="reference"), "max_priority must"),
            ]
        ),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call(sum_tree(5))


# On a GPU


@pytest.mark.gpu
def test_a_million_draws_equal_on_every_backend():
    from sharpwave.ops.sumtree import parity

    outcome = parity._draws("triton", "cuda", 1_000_000)
    assert outcome.passed, outcome


@pytest.mark.gpu
def test_graph_cycles_draw_anew_and_never_wait():
    capacity = 1 << 20
    tree = filled(torch.rand(capacity), "cuda", extrema=True)
    top, offset = torch.ones(1, device="cuda"), start("cuda")
    index, td_error = torch.arange(1024, device="cuda"), torch.randn(1024, device="cuda").bfloat16()

    def cycle():
        tree_update_priorities(tree, index, td_error, top, alpha=0.6)
        index.copy_(tree_sample(tree, 1024, 3, offset).indices)

    cycle()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycle()
    graph.replay()
    first = index.clone()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(1000):
        graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not torch.equal(first, index)
    assert_fresh(tree)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_million_cycles_beside_a_busy_stream():
    """No tile, draw or update may wait for what a full GPU does not start: the test's own timeout is the verdict.

    The other stream fills every multiprocessor with programs that each end soon; beside long ones, a matrix product's,
    every launch of this test would wait its 50 us, and a million of them minutes.
    """
    tree = filled(torch.rand(1 << 20), "cuda")
    top, offset, td_error = torch.ones(1, device="cuda"), start("cuda"), torch.randn(1024, device="cuda").bfloat16()
    index, weights = torch.arange(1024, device="cuda"), torch.rand(300_000, device="cuda")
    drawn = tree_sample(tree, 1024, 3, start("cuda"))
    cdf = build_cdf(weights)
    want = cdf.clone()

    def cycles():
        for _ in range(100):
            tree_update_priorities(tree, index, td_error, top, alpha=0.6)
            index.copy_(tree_sample(tree, 1024, 3, offset, out=drawn).indices)
        build_cdf(weights, cdf)

    cycles()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycles()
    many, other = torch.zeros(1 << 26, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    busy = torch.cuda.CUDAGraph()
    with torch.cuda.graph(busy, stream=other):
        for _ in range(8):
            many.add_(1)
    for replay in range(10_000):
        graph.replay()
        with torch.cuda.stream(other):
            busy.replay()
        if replay % 100 == 0:
            torch.cuda.synchronize()  # keeps both queues of a length
    torch.cuda.synchronize()
    assert many[0].item() == 8 * 10_000
    assert offset.item() == 1024 * 100 * 10_001
    assert torch.equal(cdf, want)
    assert_fresh(tree)
