"""Muon: singular values, hand-worked momentum, batching, skipped steps, state."""

import copy

import pytest
import torch

from sharpwave.optim import Muon, orthogonalize
from sharpwave.optim.adam import FlatAdam
from tests.conftest import backends


@pytest.mark.parametrize("shape", [(8, 8), (64, 16), (16, 64), (3, 5, 40, 20)])
def test_singular_values_end_near_one(shape):
    g = torch.Generator().manual_seed(0)
    rows, cols = shape[-2:]
    k = min(rows, cols)
    u, _ = torch.linalg.qr(torch.randn(*shape[:-2], rows, k, generator=g, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(*shape[:-2], cols, k, generator=g, dtype=torch.float64))
    s = torch.logspace(-1.5, 0, k, dtype=torch.float64)
    s = s / s.norm()  # so that |M|_F = 1: the interval of the polynomial is relative to it
    x = orthogonalize(((u * s) @ v.mT).float())
    singular = torch.linalg.svdvals(x.double())
    assert singular.min() > 0.97 and singular.max() < 1.04
    assert torch.allclose(x.double(), u @ v.mT, atol=0.05)  # the nearest semi-orthogonal matrix is u v^T


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8, 1e30])
def test_steps_in_float16_do_not_depend_on_the_size(size):
    """Entries that float16 would round to 0 or infinity; and an eighth of bfloat16's errors, more or less."""
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(48, 96, generator=g) * size
    want = orthogonalize(matrix.double())
    errors = []
    for dtype in (torch.float16, torch.bfloat16):
        got = orthogonalize(matrix, dtype)
        assert got.dtype == dtype
        errors.append((got.double() - want).norm() / want.norm())
    assert errors[0] < 3e-3 and errors[0] < errors[1] / 4


def test_zero_stays_zero_and_nan_stays_in_its_matrix():
    x = torch.zeros(3, 4, 6)
    x[1, 0, 0] = float("nan")
    x[2] = torch.eye(4, 6)
    y = orthogonalize(x)
    assert (y[0] == 0).all()
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[2]).all()


def test_vector_step_hand_worked():
    # mu = .5, lr = .1, w = 1, g = 2 twice. m = 2, u = 2 + .5*2 = 3, w = .7. Then m = 3, u = 2 + 1.5 = 3.5, w = .35.
    p = torch.nn.Parameter(torch.tensor([1.0]))
    opt = Muon([p], lr=0.1, momentum=0.5)
    p.grad = torch.tensor([2.0])
    opt.step()
    assert p.item() == pytest.approx(0.7)
    opt.step()
    assert p.item() == pytest.approx(0.35)


def test_matrix_step_has_the_stated_size():
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(36, 4))
    opt = Muon([p], lr=0.1, momentum=0.0)
    p.grad = torch.randn(36, 4, generator=g)
    opt.step()
    # All four singular values are about lr sqrt(rows / cols) = .1 * 3.
    assert torch.linalg.svdvals(p.data).tolist() == pytest.approx([0.3] * 4, rel=0.04)


def test_two_dimensional_vector_takes_the_plain_step():
    p = torch.nn.Parameter(torch.zeros(1, 3))
    opt = Muon([p], lr=0.1, momentum=0.0, vectors=[p])
    p.grad = torch.tensor([[1.0, 2.0, 3.0]])
    opt.step()
    assert p.data.tolist() == [pytest.approx([-0.1, -0.2, -0.3])]


def test_same_shapes_in_one_batch_equal_one_by_one():
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(12, 4, generator=g) for _ in range(3)] + [torch.randn(4, 12, generator=g)]
    grads = [torch.randn(x.shape, generator=g) for x in start]
    together = [torch.nn.Parameter(x.clone()) for x in start]
    alone = [torch.nn.Parameter(x.clone()) for x in start]
    for params in (together, *[[p] for p in alone]):
        opt = Muon(params, lr=0.1)
        for p in params:
            p.grad = grads[next(i for i, x in enumerate(start) if torch.equal(x, p.data))]
        opt.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_not_kept_changes_nothing(bad):
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]
    opt = Muon(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step(keep=torch.tensor(True))
    before = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    params[1].grad[1] = bad
    opt.step()  # noticed by itself
    assert opt.skipped == 1 and opt.first_bad == 3 * 2 + 1 and not torch.isfinite(opt.grad_norm)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step(keep=torch.tensor(False))  # or told so
    assert opt.skipped == 2
    assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
    for now, then in zip(opt.state_dict()["state"].values(), before[1]["state"].values(), strict=True):
        assert torch.equal(now["momentum"], then["momentum"])


def test_clip_by_global_norm():
    """Gradients (3) and (4) have norm 5; clipped to 1 they are 0.6 and 0.8 (to 1e-6)."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt = Muon(params, lr=1.0, momentum=0.0, max_grad_norm=1.0)
    for p, g in zip(params, (3.0, 4.0), strict=True):
        p.grad = torch.tensor([g])
    opt.step()
    assert [p.item() for p in params] == pytest.approx([-0.6, -0.8], abs=1e-6)
    assert opt.grad_norm.item() == pytest.approx(5)


def test_state_dict_continues_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(5, 3, generator=g) for _ in range(6)]

    def run(p, opt, todo):
        for grad in todo:
            p.grad = grad.clone()
            opt.step()

    p = torch.nn.Parameter(torch.ones(5, 3))
    opt = Muon([p], lr=0.1)
    run(p, opt, grads[:3])
    q = torch.nn.Parameter(p.detach().clone())
    other = Muon([q], lr=0.1)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(p, opt, grads[3:])
    run(q, other, grads[3:])
    assert torch.equal(p, q)


def test_tensor_learning_rate():
    p = torch.nn.Parameter(torch.zeros(2))
    lr = torch.tensor(0.5)
    opt = Muon([p], lr=lr, momentum=0.0)
    p.grad = torch.ones(2)
    opt.step()
    lr.fill_(0.25)
    opt.step()
    assert p.tolist() == [-0.75, -0.75]


def test_works_with_torch_schedulers():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = Muon([p], lr=1.0, momentum=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
        schedule.step()
    assert p.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    "keywords, words",
    [(dict(lr=0.0), "lr must be > 0"), (dict(momentum=1.0), "momentum must be"), (dict(max_grad_norm=0.0), "max_grad")],
)
def test_errors(keywords, words):
    with pytest.raises(ValueError, match=words):
        Muon([torch.nn.Parameter(torch.zeros(2))], **keywords)
    with pytest.raises(ValueError, match="two dimensions"):
        orthogonalize(torch.zeros(3))


def test_groups_and_copies_are_checked():
    p, q = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    opt = Muon([dict(params=[]), dict(params=[p])])
    with pytest.raises(ValueError, match="lr must be > 0"):
        opt.add_param_group(dict(params=[q], lr=-1.0))
    opt.add_param_group(dict(params=[q], lr=0.5, momentum=0.0))
    q.grad = torch.eye(2)
    opt.step()
    assert q.abs().max() > 0.4
    with pytest.raises(ValueError, match=r"at least its parameter's rows and columns, \(2, 2\); got \(1, 2\)"):
        Muon([p], copies={p: torch.zeros(1, 2)})
    with pytest.raises(TypeError, match="keep must be a 0-d tensor; got True"):
        opt.step(keep=True)


@backends("reference", "triton")
def test_loading_goes_on_from_what_was_saved(backend, device):
    """Also after steps that left tables of where the momenta lie; and a bf16 parameter's momentum stays float32."""
    p = torch.nn.Parameter(torch.ones(8, 8, device=device))
    opt = Muon([p], lr=0.1, backend=backend)
    saved = copy.deepcopy(opt.state_dict())
    momentum = opt.state[p]["momentum"]
    for _ in range(2):
        p.grad = torch.ones(8, 8, device=device)
        opt.step()
        assert torch.equal(opt.state[p]["momentum"], torch.ones_like(p))
        opt.load_state_dict(saved)
        assert opt.state[p]["momentum"] is momentum and not momentum.any()
    low = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    other = Muon([low])
    other.load_state_dict(Muon([low]).state_dict())
    assert other.state[low]["momentum"].dtype == torch.float32


def test_loading_keeps_a_schedules_tensor_and_changes_nothing_where_it_fails():
    lr, p = torch.tensor(0.1), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([p], lr)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = torch.tensor(0.2)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr and lr == torch.tensor(0.2)
    saved["param_groups"][0]["lr"] = torch.tensor(0.3)
    saved["state"][0]["momentum"] = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"momentum of parameter 0 must have its shape \(4, 4\); got shape \(5, 4\)"):
        optimizer.load_state_dict(saved)
    assert lr == torch.tensor(0.2) and not optimizer.state[p]["momentum"].any()
    with pytest.raises(ValueError, match="lr must be >= 0"):
        Muon([p], torch.tensor(-1.0))


SHAPES = [(70, 30), (24, 100), (9, 5), (7,), (3, 2, 2), (1, 130)]


@backends("triton")
@pytest.mark.parametrize(
    "shapes, whole",
    [(SHAPES, False), (SHAPES, True), ([(30, 20)], True), ([(20, 32)], True), ([(7,)], True)],
    ids=["many", "many in one launch", "tall", "wide", "vector"],
)
def test_the_kernels_take_the_reference_step(backend, device, shapes, whole, monkeypatch):
    """Tall, wide, small and batched matrices, vectors, a matrix taken as a vector; then a step with NaN in it."""
    from sharpwave.optim import _muon_whole_triton

    serves = _muon_whole_triton.serves
    monkeypatch.setattr(_muon_whole_triton, "serves", lambda *group: whole and serves(*group))
    if whole and device == "cpu" and len(shapes) > 1:
        pytest.skip("the interpreter runs programs one after the other")
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=g) for s in shapes]
    nets = [[torch.nn.Parameter(x.clone().to(device)) for x in start] for _ in range(2)]
    rows, cols = shapes[0] if len(shapes[0]) == 2 else (0, 0)
    copy = torch.zeros(rows + 2, cols + 2, dtype=torch.bfloat16, device=device)
    lr = torch.tensor(0.1, device=device)
    options = dict(lr=lr, momentum=0.9, max_grad_norm=1.5, dtype=torch.float16)
    vectors = [net[-1] if len(shapes) > 1 else net[0].new_empty(0) for net in nets]
    want = Muon(nets[0], **options, vectors=vectors[:1], backend="reference")
    options["dtype"] = None
    copies = {nets[1][0]: copy} if rows else {}
    got = Muon(nets[1], **options, vectors=vectors[1:], backend=backend, copies=copies)
    for step in range(3):
        grads = [torch.randn(s, generator=g) for s in shapes]
        bad = min(1, len(shapes) - 1)
        if step == 2:
            grads[bad].view(-1)[5] = torch.nan
        before = [p.detach().clone() for p in nets[1]]
        for net, optimizer in zip(nets, (want, got), strict=True):
            for p, x in zip(net, grads, strict=True):
                p.grad = x.to(device)
            optimizer.step(keep=torch.tensor(1.0, device=device))
        bound = 0.003 * 0.1 * 2
        for a, b in zip(*nets, strict=True):
            assert (a - b).abs().max() <= bound
            assert torch.allclose(want.state[a]["momentum"], got.state[b]["momentum"], atol=1e-6)
        if rows:
            assert torch.allclose(copy[:rows, :cols].float(), nets[1][0].detach(), rtol=2**-7)
        assert not copy[rows:].any() and not copy[:, cols:].any()
        assert torch.allclose(want.grad_norm, got.grad_norm, equal_nan=True)
        assert torch.equal(want.skipped, got.skipped) and got.skipped.item() == (step == 2)
        if step == 2:
            assert all(torch.equal(p, b) for p, b in zip(nets[1], before, strict=True))
            assert torch.equal(want.first_bad, got.first_bad)
            assert got.first_bad.item() == sum(x.numel() for x in start[:bad]) + 5
    served = whole and serves(nets[1], [got._orthogonal(p) for p in nets[1]])
    assert isinstance(next(iter(got._plans.values())), _muon_whole_triton.Plan) == served


def test_what_takes_one_launch():
    """On a CPU, by the interpreter, one program; never a matrix whose Gram matrix has no room on a multiprocessor."""
    from sharpwave.optim import _muon_whole_triton

    small, wide, large = (torch.zeros(s) for s in ((30, 32), (8, 64), (300, 600)))
    assert _muon_whole_triton.serves([small], [True]) and not _muon_whole_triton.serves([wide], [True])
    assert not _muon_whole_triton.serves([large], [True])


@backends("reference", "triton")
@pytest.mark.parametrize("keep", [torch.tensor(False), torch.tensor(torch.nan), torch.tensor(torch.inf)])
def test_keep_is_a_bool_or_a_number_that_must_be_finite(backend, device, keep):
    p = torch.nn.Parameter(torch.ones(3, 2, device=device))
    optimizer = Muon([p], torch.tensor(0.1, device=device), backend=backend)
    p.grad = torch.ones_like(p)
    optimizer.step(keep=keep.to(device))
    assert (p == 1).all() and optimizer.skipped.item() == 1
    optimizer.step(keep=torch.tensor(True, device=device))
    assert (p != 1).all() and optimizer.skipped.item() == 1


def test_copies_follow_on_every_backend():
    p = torch.nn.Parameter(torch.ones(3, 2))
    copy = torch.zeros(8, 8, dtype=torch.bfloat16)
    optimizer = Muon([p], 0.1, copies={p: copy})
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(copy[:3, :2], p.detach().bfloat16()) and not copy[3:].any()


def test_weights_that_moved_are_found_again():
    """The kernels go by addresses: a parameter whose storage was replaced must not leave them at the old one."""
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Muon([p], torch.tensor(0.1), backend="triton")
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.zeros(3, 2)
    optimizer.step()
    assert (p != 0).all()


@pytest.mark.parametrize("make", [Muon, lambda params: FlatAdam(params, torch.tensor(0.1))])
def test_making_one_does_not_load_the_compiler(make, monkeypatch):
    """torch.optim's own method imports it, which takes seconds."""
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", None)
    assert len(make([torch.nn.Parameter(torch.ones(2, 2))]).param_groups) == 1
