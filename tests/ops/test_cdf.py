"""CDF ops: hand-worked sums and draws, accuracy, zero weights, streams, statistics, errors, and graphs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpwave.ops import _philox
from sharpwave.ops.cdf import build_cdf, build_cdf_serial, draw_segments, sample_cdf
from tests.conftest import backends
from tests.parity import poisoned


def start(device="cpu", at=0):
    return torch.full((1,), at, dtype=torch.int64, device=device)


def chi_square(observed, expected):
    """The statistic over its degrees of freedom's mean, in standard deviations."""
    degrees = len(expected) - 1
    return ((observed - expected) ** 2 / expected).sum().sub(degrees).div((2 * degrees) ** 0.5).item()


def test_philox_known_answers():
    """The published vectors of Random123 for philox4x32, 10 rounds."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    words = [hex(int(w)) for w in _philox.philox((zero,) * 4, (zero,) * 2)]
    assert words == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    words = [hex(int(w)) for w in _philox.philox((ones,) * 4, (ones,) * 2)]
    assert words == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@backends("reference", "cpu", "triton")
def test_build_by_hand(backend, device):
    w = torch.tensor([0.0, 1.0, 0.0, 2.5, 0.0], device=device)
    for build in (build_cdf, build_cdf_serial):
        assert build(w, backend=backend).tolist() == [0.0, 1.0, 1.0, 3.5, 3.5]


@pytest.mark.parametrize("n", [1, 2, 128, 1000, 2100])
@pytest.mark.parametrize("kind", ["uniform", "heavy", "sparse"])
@backends("cpu", "triton")
def test_build_accuracy_and_monotony(backend, device, n, kind):
    from sharpwave.ops.cdf.parity import LIMIT, weights
    from sharpwave.run.parity import relative_error

    w = weights(kind, n)
    out = poisoned(n, device=device)
    assert build_cdf(w.to(device), out, backend=backend) is out
    assert relative_error(out, torch.cumsum(w.double(), 0)) <= LIMIT
    step = torch.diff(out.cpu(), prepend=torch.zeros(1))
    assert (step >= 0).all()
    assert (step[w == 0] == 0).all()
    assert torch.equal(build_cdf(w.to(device), backend=backend), out)


@pytest.mark.parametrize("n, block, group", [(63, 64, 2), (200, 64, 2), (500, 64, 2), (1024, 128, 8)])
def test_tiles_groups_and_epochs(n, block, group):
    """Many small tiles and groups, launch after launch on the same words, whose tags must tell the epochs apart."""
    triton = pytest.importorskip("sharpwave.ops.cdf._scan_triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for epoch in range(2):
        w = torch.rand(n, generator=torch.Generator().manual_seed(epoch)) ** 8
        w[n // 4 : n // 2] = 0
        out = poisoned(n, device=device)
        triton.build_cdf(w.to(device), out, block=block, group=group)
        want = torch.cumsum(w.double(), 0)
        assert ((out.cpu() - want).abs() <= 2e-7 * want).all()
        assert (out.diff() >= 0).all()


def test_tags_survive_their_wrap():
    """The tag is 16 bits of the epoch: the launch after epoch 65535 must not take the last one's words for its own."""
    triton = pytest.importorskip("sharpwave.ops.cdf._scan_triton")
    from sharpwave.ops.cdf import _scratch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 2 + 0 + 0 + 1  # of two tiles in groups of 8
    words = _scratch.slab(size, device)
    for epoch in (65535, 65536):
        words[0] = epoch << 32
        words[1:] = epoch & 0xFFFF  # as the launch before has left them
        w = torch.rand(100, generator=torch.Generator().manual_seed(epoch))
        out = poisoned(100, device=device.type)
        triton.build_cdf(w.to(device), out, block=64, group=8)
        torch.testing.assert_close(out.cpu(), torch.cumsum(w, 0), rtol=1e-6, atol=0)
        assert words[0].item() == (epoch + 1) << 32


@backends("reference", "cpu")
def test_equal_weights_at_2_24(backend, device):
    """Past 2^24 a float32 running sum of ones stands still; the float64 one does not."""
    n = (1 << 24) + 3
    cdf = build_cdf(torch.ones(n), backend=backend)
    assert cdf[-1].item() == n + 1  # 2^24 + 3 rounded to even
    assert cdf[1 << 23].item() == (1 << 23) + 1


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=40, deadline=None)
def test_any_weights(weights, seed):
    w = torch.tensor(weights)
    cdf = build_cdf(w)
    assert (cdf.diff() >= 0).all()
    if not cdf[-1] > 0:
        with pytest.raises(ValueError, match="nothing to draw from"):
            sample_cdf(cdf, 4, seed, start())
        return
    for stratified in (False, True):
        index = sample_cdf(cdf, 20, seed, start(), stratified=stratified)
        assert (w[index] > 0).all()
        assert torch.equal(index, sample_cdf(cdf, 20, seed, start(), stratified=stratified, backend="reference"))


@backends("reference", "cpu", "triton")
def test_extreme_uniforms_reach_positive_weights_only(backend, device, monkeypatch):
    """u = 0 and u just below 1 on weights whose first and last entries are 0."""
    w = torch.tensor([0.0, 0.0, 3.0, 0.0, 1.1, 0.0], device=device)
    cdf = build_cdf(w, backend=backend)
    if backend == "reference":
        for words, want in ((0, 2), (0xFFFFFFFF, 4)):
            full = torch.full((1,), words)
            monkeypatch.setattr(_philox, "draw_words", lambda *_, full=full: (full, full))
            assert sample_cdf(cdf, 1, 0, start(), backend="reference").item() == want
    else:
        index = sample_cdf(cdf, 40, 0, start(device), backend=backend)
        assert set(index.tolist()) == {2, 4}


@pytest.mark.parametrize("options", [{}, {"stratified": True}, {"replacement": False}])
@backends("cpu", "triton")
def test_draws_equal_the_reference(backend, device, options):
    w = torch.rand(300, generator=torch.Generator().manual_seed(1)) ** 4
    w[::3] = 0
    cdf = build_cdf(w, backend="reference")
    want, got = start(at=2**32 - 3), start(device, at=2**32 - 3)  # the counter carries into its second word
    for seed in (7, -1):
        a = sample_cdf(cdf, 12, seed, want, backend="reference", **options)
        b = sample_cdf(cdf.to(device), 12, torch.tensor(seed, device=device), got, backend=backend, **options)
        assert torch.equal(a, b.cpu())
        assert want.item() == got.item()
        assert (w[a] > 0).all()


@backends("reference", "cpu", "triton")
def test_one_stream(backend, device):
    """Draws of 5 and 3 are a draw of 8."""
    cdf = build_cdf(
        torch.rand(50, generator=torch.Generator().manual_seed(0), device="cpu").to(device), backend=backend
    )
    offset = start(device)
    parts = [sample_cdf(cdf, n, 3, offset, backend=backend) for n in (5, 3)]
    assert offset.item() == 8
    assert torch.equal(torch.cat(parts), sample_cdf(cdf, 8, 3, start(device), backend=backend))


@pytest.mark.parametrize("kind", ["uniform", "heavy", "sparse"])
@pytest.mark.parametrize("stratified", [False, True])
def test_chi_square(kind, stratified):
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(100, generator=generator)
    if kind == "heavy":
        w = w**6
    if kind == "sparse":
        w[torch.rand(100, generator=generator) < 0.9] = 0
    n = 200_000
    index = sample_cdf(build_cdf(w), n, 1, start(), stratified=stratified)
    expected = w.double() / w.double().sum() * n
    observed = torch.bincount(index, minlength=100).double()
    assert (observed[w == 0] == 0).all()
    keep = expected >= 5
    statistic = chi_square(observed[keep], expected[keep])
    # Stratified draws vary less than chance; independent ones as chance does.
    assert statistic < (0 if stratified else 4)


def test_stratified_draws_stay_in_range_and_sorted():
    w = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    w[-5:] = 0
    index = sample_cdf(build_cdf(w), 65536, 5, start(), stratified=True)
    assert (index.diff() >= 0).all()
    assert index.max().item() == 994


def test_without_replacement_is_successive_draws():
    """First of weights 1, 2, 3: 1/6, 2/6, 3/6; each draw takes distinct indices."""
    cdf = build_cdf(torch.tensor([1.0, 2.0, 3.0]))
    offset = start()
    draws = torch.stack([sample_cdf(cdf, 3, 0, offset, replacement=False) for _ in range(3000)])
    assert (draws.sort(1).values == torch.arange(3)).all()
    counts = torch.bincount(draws[:, 0], minlength=3).double()
    assert chi_square(counts, torch.tensor([500.0, 1000.0, 1500.0], dtype=torch.float64)) < 4
    # Given 2 came first, 0 and 1 follow as 1 : 2.
    second = draws[draws[:, 0] == 2, 1]
    assert (second == 1).double().mean().item() == pytest.approx(2 / 3, abs=0.04)


def test_without_replacement_needs_enough_positive_weights():
    cdf = build_cdf(torch.tensor([0.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match="got n=2 with 1 positive"):
        sample_cdf(cdf, 2, 0, start(), replacement=False)


@backends("reference", "cpu", "triton")
def test_segments_by_hand(backend, device):
    """w = [3, NaN, 1], eps = 0: P = [3/4, 0, 1/4]; (N P)^-1 = 4/9 and 4/3; one invalid weight."""
    w = torch.tensor([3.0, torch.nan, 1.0], device=device)
    beta = torch.ones((), device=device)
    index, importance, bad = draw_segments(w, 64, 2, start(device), beta, eps=0.0, backend=backend)
    assert bad.item() == 1
    assert set(index.tolist()) == {0, 2}
    want = torch.where(index == 0, 4 / 9, 4 / 3)
    torch.testing.assert_close(importance, want.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [1, 5, 300])
@backends("cpu", "triton")
def test_segments_equal_the_reference(backend, device, count):
    w = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(count)) * 8)
    w[count // 2] = torch.inf if count > 1 else 1.0
    beta = torch.tensor(0.4)
    a, b = start(), start(device)
    want = draw_segments(w, 9, 4, a, beta, backend="reference")
    got = draw_segments(w.to(device), 9, 4, b, beta.to(device), backend=backend)
    assert torch.equal(want[0], got[0].cpu())
    torch.testing.assert_close(want[1], got[1].cpu(), rtol=2e-6, atol=0)
    assert want[2].item() == got[2].item()
    assert a.item() == b.item() == 9


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_equal_segments_are_drawn_uniformly(value):
    index, importance, _ = draw_segments(torch.full((64,), value), 64_000, 0, start(), torch.tensor(1.0))
    expected = torch.full((64,), 1000.0, dtype=torch.float64)
    assert chi_square(torch.bincount(index, minlength=64).double(), expected) < 4
    torch.testing.assert_close(importance, torch.ones(64_000), rtol=1e-5, atol=0)


def test_segments_of_weight_zero_without_eps():
    with pytest.raises(ValueError, match="nothing to draw from"):
        draw_segments(torch.zeros(3), 1, 0, start(), torch.tensor(1.0), eps=0.0)
    index, _, _ = draw_segments(torch.tensor([0.0, 1e-30, 0.0]), 50, 0, start(), torch.tensor(1.0), eps=0.0)
    assert (index == 1).all()


def test_opcheck():
    w = torch.rand(20)
    ops = torch.ops.sharpwave
    torch.library.opcheck(ops.build_cdf.default, (w, False, "auto"))
    torch.library.opcheck(ops.build_cdf_out.default, (w, torch.empty(20), False, "auto"))
    cdf = build_cdf(w)
    torch.library.opcheck(ops.sample_cdf.default, (cdf, 4, 1, None, start(), False, True, "auto"))
    args = (w, 4, 1, None, start(), torch.tensor(0.4), 1e-6, "auto")
    torch.library.opcheck(ops.draw_segments.default, args)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: build_cdf(torch.tensor([1.0, -2.0])), ValueError, "weights must be finite and not negative; got 1"),
        (lambda: build_cdf(torch.tensor([1.0, torch.nan]), backend="reference"), ValueError, "got 1 that are not"),
        (lambda: build_cdf(torch.empty(0)), ValueError, "weights must be"),
        (lambda: build_cdf(torch.ones(3).half()), TypeError, "weights must be float32"),
        (lambda: build_cdf(torch.ones(3), torch.empty(4)), ValueError, "out must be like weights"),
        (lambda: build_cdf(torch.ones(3), torch.empty(6)[::2]), ValueError, "out must be contiguous"),
        (lambda: sample_cdf(torch.ones(3), 0, 0, start()), ValueError, "n must be an integer >= 1"),
        (lambda: sample_cdf(torch.ones(3), 4, 0, start(), replacement=False), ValueError, "n must be at most 3"),
        (lambda: sample_cdf(torch.ones(3), 1, 0, torch.zeros(1)), ValueError, "offset must be"),
        (lambda: sample_cdf(torch.ones(3), 1, torch.ones(2), start()), ValueError, "seed must be"),
        (lambda: draw_segments(torch.ones(3), 1, 0, start(), torch.ones(2)), ValueError, "beta must be"),
        (lambda: draw_segments(torch.ones(3), 1, 0, start(), torch.tensor(1.0), eps=-1), ValueError, "eps must be"),
        (lambda: draw_segments(torch.ones(3), 1, 0, start(), torch.tensor(1.0), eps=1e31), ValueError, "eps must be"),
        (lambda: draw_segments(torch.ones(3), 1, "0", start(), torch.tensor(1.0)), TypeError, "seed must be an int"),
        (lambda: sample_cdf(torch.ones(3), 1, 0.5, start()), TypeError, "seed must be an int"),
        *(
            (
                lambda b=b: draw_segments(torch.ones(3), 1, 0, start(), torch.tensor(torch.nan), backend=b),
                ValueError,
                "beta must be",
            )
            for b in ("cpu", "reference")
        ),
        (lambda: draw_segments(torch.ones(3), 1, 0, start(), 0.4), TypeError, "beta must be a tensor; got float"),
        (lambda: sample_cdf(torch.ones(3), 1, 0, 0), TypeError, "offset must be a tensor; got int"),
        (lambda: build_cdf([1.0]), TypeError, "weights must be a tensor; got list"),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_out_may_be_the_weights_and_nothing_else_of_theirs():
    w = torch.ones(9)
    for out in (w[1:], w[1:].view(-1)):
        with pytest.raises(ValueError, match="out shares memory with weights"):
            build_cdf(w[:8], out)
    assert build_cdf(w, w) is w and w.tolist() == list(range(1, 10))


def test_offsets_counts_and_outputs_that_cannot_be():
    cdf = torch.ones(3).cumsum(0)
    for offset in (-1, 2**48, 2**63 - 1):
        with pytest.raises(ValueError, match=r"offset must be in \[0, 2\^48\)"):
            sample_cdf(cdf, 3, 0, start(at=offset))
    sample_cdf(cdf, 3, 0, start(at=2**48 - 1))
    for n in (2.0, True, 0):
        with pytest.raises(ValueError, match="n must be an integer >= 1"):
            sample_cdf(cdf, n, 0, start())
        with pytest.raises(ValueError, match="n must be an integer >= 1"):
            draw_segments(cdf, n, 0, start(), torch.tensor(0.4))
    assert sample_cdf(cdf, np.int64(2), 0, start()).shape == (2,)
    with pytest.raises(ValueError, match="out must not require a gradient"):
        build_cdf(cdf, out=torch.empty(3, requires_grad=True))


def test_the_largest_weights_and_eps_stay_finite():
    w = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    index, importance, bad = draw_segments(w, 32, 0, start(), torch.tensor(1.0), eps=1e30)
    assert index.tolist() == [0] * 32 and importance.isfinite().all() and bad == 0


def test_forward_mode_is_refused():
    with pytest.raises(RuntimeError, match="build_cdf has no forward-mode derivative"):
        torch.func.jvp(build_cdf, (torch.rand(4),), (torch.rand(4),))
    plain = torch.func.jvp(lambda w: build_cdf(w.detach()) * w, (torch.ones(2),), (torch.ones(2),))
    assert plain[1].tolist() == [1, 2]


def test_gradients_are_refused_and_not_lost():
    w = torch.rand(5, requires_grad=True)
    with pytest.raises(RuntimeError, match="build_cdf has no gradient: detach"):
        build_cdf(w).sum().backward()
    _, importance, _ = draw_segments(w, 3, 0, start(), torch.tensor(0.5))
    assert not importance.requires_grad


@pytest.mark.gpu
def test_graph_draws_anew_and_builds_the_same():
    w = torch.rand(300_000, device="cuda")
    out, offset, beta = torch.empty_like(w), start("cuda"), torch.tensor(0.4, device="cuda")
    seed = torch.tensor(5, device="cuda")

    def step():
        build_cdf(w, out)
        return sample_cdf(out, 64, seed, offset), draw_segments(w[:8192], 64, seed, offset, beta)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = step()
    offset.zero_()
    runs = []
    for _ in range(3):
        graph.replay()
        runs.append([x.clone() for x in drawn])
    assert not torch.equal(runs[0][0], runs[1][0])
    offset.zero_()
    again = [step() for _ in range(3)]
    assert all(torch.equal(x, y) for a, b in zip(runs, again, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.gpu
def test_nothing_waits_or_differs_beside_a_busy_stream():
    w = torch.rand(1_000_003, device="cuda")
    want = build_cdf(w)
    matrix, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(50):
            matrix @ matrix
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [build_cdf(w) for _ in range(500)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(run, want) for run in runs)
