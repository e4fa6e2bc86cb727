"""puff_advantage: hand-worked numbers, identities, every backend against the reference, errors."""

import pytest
import torch

from sharpwave.ops.advantage import advantage_and_priority, puff_advantage
from tests.conftest import backends
from tests.parity import assert_parity


def inputs(n, t, dtype=torch.float32, p_end=0.1, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    value, next_value, reward = (torch.randn(n, t, generator=g, dtype=dtype) for _ in range(3))
    terminated, truncated = (torch.rand(n, t, generator=g) < p_end for _ in range(2))
    ratio = torch.rand(n, t, generator=g, dtype=dtype) * 2
    return [x.to(device) for x in (value, next_value, reward, terminated, truncated, ratio)]


def gae(value, next_value, reward, terminated, truncated, gamma, lam):
    """GAE by its definition: A_t = sum_k (gamma lam)^k delta_{t+k} up to the end of t's episode."""
    n, horizon = value.shape
    out = torch.zeros_like(value)
    for i in range(n):
        for t in range(horizon):
            for k in range(t, horizon):
                boundary = truncated[i, k] or k == horizon - 1
                v_tp1 = next_value[i, k] if boundary else value[i, k + 1]
                delta = reward[i, k] + gamma * (0 if terminated[i, k] else v_tp1) - value[i, k]
                out[i, t] += (gamma * lam) ** (k - t) * delta
                if terminated[i, k] or truncated[i, k]:
                    break
    return out


@backends("reference", "cpu", "triton")
def test_hand_worked(backend, device):
    # gamma = lam = 1/2, values 1, 2, then V(obs_2) = 4; rewards 1, 1; ratio 1 then 2 (clipped to 1).
    # delta_1 = 1 + 4/2 - 2 = 1; delta_0 = 1 + 2/2 - 1 = 1; A_1 = 1; A_0 = 1 + 1/4 = 1.25.
    x = [torch.tensor(v, device=device) for v in ([[1.0, 2.0]], [[9.0, 4.0]], [[1.0, 1.0]])]
    no = torch.zeros(1, 2, dtype=torch.bool, device=device)
    ratio = torch.tensor([[1.0, 2.0]], device=device)
    a = puff_advantage(*x, no, no, ratio, gamma=0.5, lam=0.5, backend=backend)
    assert a.tolist() == [[1.25, 1.0]]


@pytest.mark.parametrize(
    "terminated, truncated, expected",
    # gamma .9, reward 1, value 1 at step 0; V(next) is 10 if truncated, else 5. Going on: delta_0 = 1 + 4.5 - 1
    # = 4.5 and A_0 = 4.5 + .9 A_1, where A_1 = 1 + .9 * 7 - 5 = 2.3.
    [(False, False, 4.5 + 0.9 * 2.3), (True, False, 0.0), (False, True, 9.0), (True, True, 0.0)],
)
@backends("reference", "cpu", "triton")
def test_terminated_by_truncated(backend, device, terminated, truncated, expected):
    value = torch.tensor([[1.0, 5.0]], device=device)
    next_value = torch.tensor([[10.0, 7.0]], device=device)
    flags = [torch.tensor([[f, False]], device=device) for f in (terminated, truncated)]
    one = torch.ones(1, 2, device=device)
    a = puff_advantage(value, next_value, one, *flags, one, gamma=0.9, lam=1.0, backend=backend)
    assert a[0, 0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n, t", [(1, 1), (3, 7), (8, 64)])
def test_ratio_one_is_gae(n, t):
    *x, _ = inputs(n, t, torch.float64)
    a = puff_advantage(*x, torch.ones(n, t, dtype=torch.float64), gamma=0.99, lam=0.9, backend="reference")
    assert (a - gae(*x, gamma=0.99, lam=0.9)).abs().max() <= 1e-6


def test_lambda_one_is_return_minus_value():
    value, next_value, reward, *_ = inputs(4, 16, torch.float64)
    no = torch.zeros(4, 16, dtype=torch.bool)
    a = puff_advantage(
        value, next_value, reward, no, no, torch.ones_like(value), gamma=0.9, lam=1.0, backend="reference"
    )
    ret = next_value[:, -1]
    for t in reversed(range(16)):
        ret = reward[:, t] + 0.9 * ret
        assert torch.allclose(a[:, t], ret - value[:, t], atol=1e-12)


def test_adjacent_episodes_do_not_leak():
    """Two episodes of constant reward: the first one's advantages do not change with the second's numbers."""
    *x, ratio = inputs(2, 20, p_end=0.0)
    value, next_value, reward, terminated, truncated = x
    terminated[:, 9] = True
    a = puff_advantage(value, next_value, reward, terminated, truncated, ratio, gamma=0.99, lam=0.95)
    value[:, 10:] += 100
    reward[:, 10:] -= 50
    b = puff_advantage(value, next_value, reward, terminated, truncated, ratio, gamma=0.99, lam=0.95)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.equal(a[:, 10:], b[:, 10:])


@pytest.mark.parametrize("n, t", [(1, 1), (1, 63), (5, 64), (33, 128), (2, 1000), (130, 3)])
@pytest.mark.parametrize("rho_clip, c_clip", [(1.0, 1.0), (1.5, 0.5)])
@backends("cpu", "triton")
def test_backend_matches_reference(backend, device, n, t, rho_clip, c_clip):
    x = inputs(n, t, seed=n * t, device=device)
    keywords = dict(gamma=0.99, lam=0.95, rho_clip=rho_clip, c_clip=c_clip)
    double = [v.double().cpu() if v.dtype.is_floating_point else v.cpu() for v in x]
    want = puff_advantage(*double, **keywords, backend="reference")
    assert_parity(puff_advantage(*x, **keywords, backend=backend), want, "advantage")


@backends("cpu", "triton")
def test_non_contiguous_inputs(backend, device):
    x = inputs(9, 12, device=device)
    strided = [v.t().contiguous().t() for v in x]
    a = puff_advantage(*strided, gamma=0.9, lam=0.9, backend=backend)
    assert_parity(a, puff_advantage(*x, gamma=0.9, lam=0.9, backend="reference"), "advantage")


def test_nan_stays_in_its_segment():
    x = inputs(3, 8)
    x[2][1, 4] = float("nan")
    a = puff_advantage(*x, gamma=0.9, lam=0.9)
    assert torch.isfinite(a[[0, 2]]).all()
    assert torch.isnan(a[1]).any()


def test_opcheck():
    x = inputs(3, 8)
    torch.library.opcheck(torch.ops.sharpwave.puff_advantage.default, (*x, 0.9, 0.9))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda x: x.__setitem__(2, x[2][:, :-1]), ValueError, "reward must have value's shape"),
        (lambda x: x.__setitem__(3, x[3].float()), TypeError, "terminated must be bool"),
        (lambda x: x.__setitem__(5, x[5].double()), TypeError, "ratio must have value's dtype"),
        (lambda x: x.__setitem__(0, x[0][0]), ValueError, r"value must be \(N, T\)"),
    ],
)
def test_errors_name_the_argument(change, error, words):
    x = inputs(2, 4)
    change(x)
    with pytest.raises(error, match=words):
        puff_advantage(*x, gamma=0.9, lam=0.9)


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("skips", [False, True])
def test_priority_is_the_size_of_the_advantages(backend, device, alpha, skips):
    """Over more steps than a kernel's block of time; a segment without valid steps has none, one with NaN has NaN."""
    tensors = inputs(5, 150, device=device)
    tensors[2][3, 7] = torch.nan
    valid = None
    if skips:
        valid = torch.rand(5, 150, generator=torch.Generator().manual_seed(1)).to(device) < 0.7
        valid[2] = False
    options = dict(gamma=0.9, lam=0.8, rho_clip=1.5, c_clip=0.5, backend=backend)
    advantage, priority = advantage_and_priority(*tensors, valid=valid, alpha=alpha, **options)
    want = puff_advantage(*tensors, **options)
    want = want if valid is None else torch.where(valid, want, 0)
    assert torch.allclose(advantage, want, equal_nan=True)
    sizes = want.abs().sum(1).pow(alpha)
    sizes[3] = torch.nan
    assert torch.allclose(priority, sizes, rtol=1e-5, equal_nan=True)
    if skips:
        assert priority[2] == (1 if alpha == 0 else 0)


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("skips", [False, True])
def test_rows_alone_are_what_all_give(backend, device, skips):
    """Segments that changed are computed anew, one of them twice; the others stay as they are."""
    tensors = inputs(21, 150, device=device)
    valid = torch.rand(21, 150, generator=torch.Generator().manual_seed(1)).to(device) < 0.7 if skips else None
    options = dict(gamma=0.9, lam=0.8, alpha=0.8, valid=valid, backend=backend)
    kept = advantage_and_priority(*tensors, **options)
    before = [x.clone() for x in kept]
    rows = torch.tensor([20, 3, 7, 3, 0, 11, 12, 13, 14, 2], device=device)
    tensors[5][:, 4] += 0.5
    out = advantage_and_priority(*tensors, rows=rows, out=kept, **options)
    assert all(x is y for x, y in zip(out, kept, strict=True))
    want = advantage_and_priority(*tensors, **options)
    others = torch.ones(21, dtype=torch.bool, device=device)
    others[rows] = False
    for got, new, old in zip(kept, want, before, strict=True):
        # The kernel's are the very bits; PyTorch's powers on a CPU depend on an entry's place by one.
        assert torch.equal(got[rows], new[rows]) if backend == "triton" else torch.allclose(got[rows], new[rows])
        assert not torch.equal(got[rows], old[rows])
        assert torch.equal(got[others], old[others])


def test_rows_errors():
    x = inputs(3, 4)
    options = dict(gamma=0.9, lam=0.9, alpha=1.0)
    out = torch.empty(3, 4), torch.empty(3)
    with pytest.raises(ValueError, match="rows needs out"):
        advantage_and_priority(*x, rows=torch.tensor([0]), **options)
    with pytest.raises(TypeError, match="rows must be int64"):
        advantage_and_priority(*x, rows=torch.tensor([0.0]), out=out, **options)
    with pytest.raises(ValueError, match="out must be contiguous"):
        advantage_and_priority(*x, out=(out[0], torch.empty(4)), **options)
