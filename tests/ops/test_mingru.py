"""mingru_scan and mingru_step: hand-worked numbers, identities, every backend against the reference, bits, errors."""

import math

import pytest
import torch

from sharpwave.ops.mingru import mingru_layer, mingru_scan, mingru_step, parity, reference
from tests.conftest import backends
from tests.parity import assert_parity

KERNELS = backends("cpu", "triton")
ALL = backends("reference", "cpu", "triton")
# Not the interpreter, which takes a millisecond a step.
GPU = pytest.param("triton", "cuda", marks=pytest.mark.gpu, id="gpu")
COMPILED = pytest.mark.parametrize("backend, device", [("cpu", "cpu"), GPU])
QUICK = pytest.mark.parametrize("backend, device", [("reference", "cpu"), ("cpu", "cpu"), GPU])
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def _poison():
    """What torch.empty returns is NaN, so that anything a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(b, t, h, *, p_reset=0.1, scale=2.0, dtype=torch.float32, device="cpu", seed=0):
    """combined, state, x, reset, and the gradients of out and next_state."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(b, t, 3 * h), (b, h), (b, t, h), (b, t, h), (b, h)]
    combined, state, x, dout, dnext = (torch.randn(s, generator=g) for s in shapes)
    reset = torch.rand(b, t, generator=g) < p_reset if p_reset else None
    combined, x, dout = ((v * scale).to(dtype) for v in (combined, x, dout))
    return [None if v is None else v.to(device) for v in (combined, state, x, reset, dout, dnext)]


def run(combined, state, x, reset, dout, dnext, *, backend, backward="tiled"):
    """out, next_state, dcombined, dstate, dx."""
    leaves = [v.detach().clone().requires_grad_() for v in (combined, state, x)]
    outs = mingru_scan(*leaves, reset, backward=backward, backend=backend)
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, (dout, dnext))]


def exact(combined, state, x, reset, dout, dnext):
    """The reference in float64."""
    wide = [v.detach().double().cpu() for v in (combined, state, x)]
    return run(
        *wide, None if reset is None else reset.cpu(), dout.double().cpu(), dnext.double().cpu(), backend="reference"
    )


NAMES = ("out", "next_state", "dcombined", "dstate", "dx")


def assert_same_bits(got, want):
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert a.dtype == b.dtype, name
        assert torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype])), f"{name}: bits differ"


# ---- numbers worked by hand


@ALL
def test_hand_worked(backend, device):
    # hidden .5 -> c = 1; 1.5 -> c = 2; -ln 3 -> c = 1/4. All gates and projs 0: z = p = 1/2. state 0, x = 1.
    # h = 1/2, then 1/2 + (2 - 1/2)/2 = 5/4, then 5/4 + (1/4 - 5/4)/2 = 3/4; out = 1 + (h - 1)/2.
    combined = torch.tensor([[[0.5, 0, 0], [1.5, 0, 0], [-math.log(3), 0, 0]]], device=device)
    state, x = torch.zeros(1, 1, device=device), torch.ones(1, 3, 1, device=device)
    out, next_state = mingru_scan(combined, state, x, backend=backend)
    assert out.flatten().tolist() == pytest.approx([0.75, 1.125, 0.875], abs=1e-6)
    assert next_state.item() == pytest.approx(0.75, abs=1e-6)
    # An episode begins at step 1: h = (1/2, 0 + 2/2, 1 + (1/4 - 1)/2 = 5/8).
    reset = torch.tensor([[False, True, False]], device=device)
    out, next_state = mingru_scan(combined, state, x, reset, backend=backend)
    assert out.flatten().tolist() == pytest.approx([0.75, 1.0, 0.8125], abs=1e-6)
    assert next_state.item() == pytest.approx(0.625, abs=1e-6)


@ALL
def test_hand_worked_gradient(backend, device):
    # Two steps as above from state 0; loss = out_1 + h_1, so g = (0, 1), dnext = 1. p = z = 1/2.
    # dh_1 = 1 + 1/2 = 3/2; dhidden_1 = 3/2 * 1/2; dgate_1 = 3/2 (2 - 1/2) / 4; dproj_1 = (5/4 - 1) / 4; dx_1 = 1/2.
    # dh_0 = 3/4; dhidden_0 = 3/8; dgate_0 = 3/4 (1 - 0) / 4; dstate = 3/8.
    combined = torch.tensor([[[0.5, 0, 0], [1.5, 0, 0]]], device=device)
    state, x = torch.zeros(1, 1, device=device), torch.ones(1, 2, 1, device=device)
    dout, dnext = torch.tensor([[[0.0], [1.0]]], device=device), torch.ones(1, 1, device=device)
    *_, dcombined, dstate, dx = run(combined, state, x, None, dout, dnext, backend=backend)
    assert dcombined.flatten().tolist() == pytest.approx([3 / 8, 3 / 16, 0, 3 / 4, 9 / 16, 1 / 16], abs=1e-6)
    assert dx.flatten().tolist() == pytest.approx([0, 0.5], abs=1e-6)
    assert dstate.item() == pytest.approx(3 / 8, abs=1e-6)
    # With an episode beginning at step 1 nothing flows further back, and step 1 starts from 0.
    reset = torch.tensor([[False, True]], device=device)
    *_, dcombined, dstate, dx = run(combined, state, x, reset, dout, dnext, backend=backend)
    assert dcombined.flatten().tolist() == pytest.approx([0, 0, 0, 3 / 4, 3 / 4, 0], abs=1e-6)
    assert dstate.item() == 0


# ---- identities


@pytest.mark.parametrize("p_reset", [0, 0.3])
def test_gradcheck(p_reset):
    combined, state, x, reset, *_ = inputs(2, 5, 3, p_reset=p_reset, dtype=torch.float64)
    leaves = [v.double().requires_grad_() for v in (combined, state, x)]
    assert torch.autograd.gradcheck(lambda *v: mingru_scan(*v, reset, backend="reference"), leaves)


@pytest.mark.parametrize("p_reset", [0, 0.2])
def test_gradient_formulas_are_those_of_autograd(p_reset):
    combined, state, x, reset, dout, dnext = inputs(3, 40, 7, p_reset=p_reset, dtype=torch.float64)
    leaves = [v.double().requires_grad_() for v in (combined, state, x)]
    out, next_state, _ = reference.mingru_scan(*leaves, reset)
    want = torch.autograd.grad((out, next_state), leaves, (dout, dnext.double()))
    got = run(combined, state.double(), x, reset, dout, dnext.double(), backend="reference")[2:]
    for name, a, b in zip(NAMES[2:], got, want, strict=True):
        assert_parity(a, b, name)


@QUICK
def test_two_scans_are_one(backend, device):
    combined, state, x, reset, *_ = inputs(2, 37, 5, device=device)
    out, last = mingru_scan(combined, state, x, reset, backend=backend)
    for cut in (1, 16, 23):
        first, middle = mingru_scan(combined[:, :cut], state, x[:, :cut], reset[:, :cut], backend=backend)
        second, end = mingru_scan(combined[:, cut:], middle, x[:, cut:], reset[:, cut:], backend=backend)
        assert_same_bits((torch.cat([first, second], dim=1), end), (out, last))


@ALL
def test_steps_are_the_scan(backend, device):
    steps = 3 if device == "cpu" and backend == "triton" else 20
    combined, state, x, reset, *_ = inputs(3, steps, 33, p_reset=0.3, device=device)
    out, last = mingru_scan(combined, state, x, reset, backend=backend)
    h = state
    for t in range(steps):
        out_t, h = mingru_step(combined[:, t], h, x[:, t], reset[:, t], backend=backend)
        assert_same_bits((out_t,), (out[:, t].contiguous(),))
    assert_same_bits((h,), (last,))
    with_none, _ = mingru_step(combined[:, 0], state, x[:, 0], backend=backend)
    no = torch.zeros(3, dtype=torch.bool, device=device)
    assert torch.equal(with_none, mingru_step(combined[:, 0], state, x[:, 0], no, backend=backend)[0])


@ALL
@pytest.mark.parametrize("b", [3, 300])
def test_the_next_state_is_written_where_it_is_wanted(backend, device, b):
    if b == 300 and backend == "triton" and device == "cpu":
        pytest.skip("the interpreter takes a millisecond a step")
    combined, state, x, reset, *_ = inputs(b, 1, 128, p_reset=0.3, device=device)
    step = (combined[:, 0], state, x[:, 0], reset[:, 0])
    want = mingru_step(*step, backend=backend)
    room = torch.full_like(state, math.nan)
    out, last = mingru_step(*step, out_state=room, backend=backend)
    assert last is room
    assert_same_bits((out, last), want)
    out, last = mingru_step(*step, out_state=state, backend=backend)
    assert last is state
    assert_same_bits((out, last), want)
    with pytest.raises(ValueError, match="out_state must be contiguous"):
        mingru_step(*step, out_state=room[:, :5], backend=backend)
    with pytest.raises(ValueError, match="out_state has no gradient"):
        mingru_step(step[0].requires_grad_(), *step[1:], out_state=room, backend=backend)


@COMPILED
def test_a_large_step_is_the_scan(backend, device):
    combined, state, x, reset, *_ = inputs(300, 1, 128, p_reset=0.3, device=device)
    out, last = mingru_scan(combined, state, x, reset, backend=backend)
    step = mingru_step(combined[:, 0], state, x[:, 0], reset[:, 0], backend=backend)
    assert_same_bits(step, (out[:, 0].contiguous(), last))


@QUICK
def test_step_has_the_scans_gradient(backend, device):
    combined, state, x, reset, dout, dnext = inputs(3, 1, 6, p_reset=0.5, device=device)
    want = run(combined, state, x, reset, dout, dnext, backend=backend)
    leaves = [v.clone().requires_grad_() for v in (combined[:, 0], state, x[:, 0])]
    outs = mingru_step(*leaves, reset[:, 0], backend=backend)
    grads = torch.autograd.grad(outs, leaves, (dout[:, 0], dnext))
    assert_same_bits(grads, (want[2][:, 0].contiguous(), want[3], want[4][:, 0].contiguous()))


@ALL
def test_a_reset_is_a_fresh_start_even_from_nan(backend, device):
    combined, state, x, _, dout, dnext = inputs(1, 9, 5, p_reset=0, device=device)
    reset = torch.zeros(1, 9, dtype=torch.bool, device=device)
    reset[:, 4] = True
    dout[:, :4] = 0
    got = run(combined, torch.full_like(state, math.nan), x, reset, dout, dnext, backend=backend)
    zero = torch.zeros_like(state)
    want = run(combined[:, 4:], zero, x[:, 4:], None, dout[:, 4:], dnext, backend=backend)
    assert got[0][:, :4].isnan().all()
    assert_same_bits((got[0][:, 4:].contiguous(), got[1]), want[:2])
    assert_same_bits((got[2][:, 4:].contiguous(),), (want[2],))
    assert not got[3].any(), "the gradient crossed the reset"


@pytest.mark.parametrize("tiling", [(16, 4, 32, 2), (16, 2, 64, 2), (8, 2, 64, 2)])
@pytest.mark.parametrize("t", [17, pytest.param(32, marks=pytest.mark.gpu)])
@backends("triton")
def test_every_tiling_gives_the_serial_numbers(backend, device, tiling, t, monkeypatch):
    """States that are not finite included, which resets end in the middle of a tile."""
    from sharpwave.ops.mingru import triton

    combined, state, x, reset, dout, dnext = inputs(1, t, 34, p_reset=0.2, device=device)
    state[0, 3], combined[0, 5, 33], combined[0, 9, 40] = math.nan, math.inf, -math.nan
    tensors = combined, state, x, reset, dout, dnext
    want = run(*tensors, backend=backend, backward="serial")
    assert want[0].isnan().any() and not want[0].isnan().any(1).all()
    monkeypatch.setattr(triton, "_tiling", lambda *_args, **_options: triton._Tiling(*tiling))
    for name, got, serial in zip(NAMES, run(*tensors, backend=backend), want, strict=True):
        assert torch.equal(got.isnan(), serial.isnan()), name
        assert torch.equal(got.nan_to_num(0.25), serial.nan_to_num(0.25)), name


@QUICK
def test_rows_and_channels_do_not_meet(backend, device):
    base = inputs(2, 20, 4, p_reset=0.1, device=device)
    changed = [None if v is None else v.clone() for v in base]
    changed[0][0], changed[1][0], changed[2][0], changed[4][0] = 7.0, -3.0, math.nan, 2.0
    before, after = run(*base, backend=backend), run(*changed, backend=backend)
    assert_same_bits([v[1] for v in after], [v[1] for v in before])
    changed = [None if v is None else v.clone() for v in base]
    changed[0][..., 2] = math.nan  # `hidden` of channel 2
    after = run(*changed, backend=backend)
    others = [0, 1, 3]
    assert_same_bits([after[0][..., others], after[1][..., others]], [before[0][..., others], before[1][..., others]])


@QUICK
def test_the_gradient_reaches_back_through_every_step(backend, device):
    # dh_{t-k}/d... : out_{T-1} depends on state by p_{T-1} prod (1 - z_t).
    combined, state, x, _, *_ = inputs(1, 40, 3, p_reset=0, scale=0.5, device=device)
    dout = torch.zeros(1, 40, 3, device=device)
    dout[:, -1] = 1
    *_, dstate, _ = run(combined, state, x, None, dout, torch.zeros(1, 3, device=device), backend=backend)
    _, gate, proj = combined.double().chunk(3, dim=-1)
    want = torch.sigmoid(proj[:, -1]) * torch.sigmoid(-gate).prod(dim=1)
    assert (want != 0).all()
    assert_parity(dstate, want, "dstate", scale=10)  # a product of 40 numbers, each rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rollout_by_steps_trains_with_ratio_one(dtype):
    """log-probabilities of a policy on top agree between steps and scan, across resets."""
    combined, state, x, reset, *_ = inputs(8, 64, 16, dtype=dtype)
    out, _ = mingru_scan(combined, state, x, reset)
    h, outs = state, []
    for t in range(64):
        o, h = mingru_step(combined[:, t], h, x[:, t], reset[:, t])
        outs.append(o)
    logp, logp_steps = (torch.log_softmax(o.float(), dim=-1) for o in (out, torch.stack(outs, dim=1)))
    assert ((logp - logp_steps).exp() - 1).abs().max() <= 1e-5


@QUICK
def test_a_layer_is_a_projection_and_a_scan(backend, device):
    _, state, x, reset, dout, dnext = inputs(3, 20, 8, device=device)
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).to(device)
    dtype = torch.float64 if backend == "reference" else torch.float32
    leaves = [v.to(dtype).requires_grad_() for v in (x, weight, state)]
    outs = mingru_layer(*leaves, reset, backend=backend)
    apart = mingru_scan(torch.nn.functional.linear(leaves[0], leaves[1]), leaves[2], leaves[0], reset, backend=backend)
    assert_same_bits(outs, apart)
    upstream = (dout.to(dtype), dnext.to(dtype))
    for got, want in zip(*(torch.autograd.grad(o, leaves, upstream) for o in (outs, apart)), strict=True):
        assert_parity(got, want)
    strided = upstream[0].transpose(0, 1).contiguous().transpose(0, 1)
    for got, want in zip(
        *(
            torch.autograd.grad(mingru_layer(*leaves, reset, backend=backend)[0], leaves, g)
            for g in (strided, upstream[0])
        ),
        strict=True,
    ):
        assert_same_bits((got,), (want,))
    # Weights alone, or the state alone, may be what is trained.
    for i in range(3):
        only = [v.detach().requires_grad_(i == k) for k, v in enumerate(leaves)]
        got = torch.autograd.grad(mingru_layer(*only, reset, backend=backend)[0], only[i], upstream[0])[0]
        want = torch.autograd.grad(mingru_layer(*leaves, reset, backend=backend)[0], leaves[i], upstream[0])[0]
        assert_same_bits((got,), (want,))


# ---- every backend against the reference in float64

SMALL = {
    "one step": {"b": 2, "t": 1, "h": 5},
    "no reset, two blocks of channels": {"b": 1, "t": 16, "h": 33, "p_reset": 0},
    "whole tiles": {"b": 1, "t": 32, "h": 3, "p_reset": 0.3},
    "a tile and a step": {"b": 1, "t": 65, "h": 3},
}
LARGE = {
    "T = 63": {"b": 3, "t": 63, "h": 64},
    "T = 1000, H = 1": {"b": 2, "t": 1000, "h": 1},
    "H = 500": {"b": 2, "t": 33, "h": 500},
    "B = 300": {"b": 300, "t": 17, "h": 8, "p_reset": 0},
    "even": {"b": 4, "t": 128, "h": 256},
}


def check(backend, device, b, t, h, **options):
    tensors = inputs(b, t, h, device=device, **options)
    for name, got, want in zip(NAMES, run(*tensors, backend=backend), exact(*tensors), strict=True):
        assert_parity(got, want, name)


@pytest.mark.parametrize("case", SMALL)
@KERNELS
def test_parity_small(backend, device, case):
    check(backend, device, **SMALL[case])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LARGE)
@COMPILED
def test_parity_large(backend, device, case, dtype):
    check(backend, device, dtype=dtype, **LARGE[case])


@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
@COMPILED
def test_parity_resets(backend, device, where):
    tensors = inputs(1, 18, 4, p_reset=0, device=device)
    reset = torch.zeros(1, 18, dtype=torch.bool, device=device)
    reset[:, {"first": 0, "middle": 16, "last": 17, "all": slice(None)}[where]] = True
    tensors[3] = reset
    for name, got, want in zip(NAMES, run(*tensors, backend=backend), exact(*tensors), strict=True):
        if where in ("first", "all") and name == "dstate":
            assert not got.any()
        else:
            assert_parity(got, want, name)


@KERNELS
def test_extreme_gates(backend, device):
    """hidden, gate and proj of +-80: nothing overflows, forwards or backwards."""
    tensors = inputs(1, 33, 8, device=device)
    g = torch.Generator().manual_seed(3)
    tensors[0] = (torch.randint(-1, 2, (1, 33, 24), generator=g) * 80.0).to(device)
    for name, got, want in zip(NAMES, run(*tensors, backend=backend), exact(*tensors), strict=True):
        assert_parity(got, want, name)


@KERNELS
def test_non_contiguous(backend, device):
    combined, state, x, reset, dout, dnext = inputs(1, 17, 6, device=device)
    strided = [
        combined.transpose(0, 1).contiguous().transpose(0, 1),
        state.t().contiguous().t(),
        x.repeat(1, 1, 2)[..., :6],
        reset.t().contiguous().t(),
        dout[:1, :1, :1].expand_as(dout),
        dnext.t().contiguous().t(),
    ]
    got = run(*strided, backend=backend)
    assert_same_bits(got, run(*(v.contiguous() for v in strided), backend=backend))


@COMPILED
def test_misaligned(backend, device):
    tensors = inputs(2, 17, 8, device=device)
    shifted = [None if v is None else torch.cat([v.flatten()[:1], v.flatten()])[1:].view_as(v) for v in tensors]
    assert_same_bits(run(*shifted, backend=backend), run(*tensors, backend=backend))


@ALL
def test_nothing_in_nothing_out(backend, device):
    for b, h in ((0, 4), (2, 0)):
        tensors = inputs(b, 3, h, device=device)
        got = run(*tensors, backend=backend)
        assert [v.shape for v in got] == [(b, 3, h), (b, h), (b, 3, 3 * h), (b, h), (b, 3, h)]


@COMPILED
def test_long_sequence(backend, device):
    tensors = inputs(1, 16384, 4, p_reset=1e-4, device=device)
    wanted = exact(*tensors)
    for backward in ("tiled", "fast"):
        for name, got, want in zip(NAMES, run(*tensors, backend=backend, backward=backward), wanted, strict=True):
            assert_parity(got, want, name)


@COMPILED
def test_runs_repeat_bit_for_bit(backend, device):
    tensors = inputs(2, 33, 5, device=device)
    assert_same_bits(run(*tensors, backend=backend), run(*tensors, backend=backend))


# ---- the three backward kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", parity.WIDTHS)
def test_tiled_is_serial_bit_for_bit(h, dtype):
    """With the other two widths and dtypes, 240 random cases."""
    outcome = parity.tiled_is_serial("cuda", h, dtype)
    assert outcome.passed, outcome


@pytest.mark.parametrize("t, dtype", [(37, torch.float32), (66, torch.bfloat16)])
@backends("triton")
def test_tiled_is_serial_bit_for_bit_small(backend, device, t, dtype):
    tensors = inputs(1, t, 3, dtype=dtype, device=device)
    tensors[4][:, -1] = -0.0  # padding must keep a zero's sign
    tensors[5].fill_(-0.0)
    serial = run(*tensors, backend=backend, backward="serial")
    assert_same_bits(run(*tensors, backend=backend, backward="tiled"), serial)


@backends("triton")
def test_fast_is_close(backend, device):
    """Summaries of chunks are composed instead of walked: the sums over T are associated otherwise."""
    tensors = inputs(1, 70, 2, device=device)
    wanted = exact(*tensors)
    for name, got, want in zip(NAMES, run(*tensors, backend=backend, backward="fast"), wanted, strict=True):
        assert_parity(got, want, name)


# ---- torch.library, compilation, graphs


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_opcheck(backend):
    combined, state, x, reset, *_ = inputs(2, 5, 3)
    leaves = [v.clone().requires_grad_() for v in (combined, state, x)]
    torch.library.opcheck(torch.ops.sharpwave.mingru_scan.default, (*leaves, reset, True, "tiled", backend))
    weight = torch.randn(9, 3).requires_grad_()
    torch.library.opcheck(
        torch.ops.sharpwave.mingru_layer.default, (leaves[2], weight, leaves[1], reset, True, "tiled", backend)
    )


@pytest.mark.parametrize(
    "device, compiler", [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
def test_compiled(device, compiler):
    tensors = inputs(2, 17, 8, device=device)

    def scan(combined, state, x, reset):
        out, last = mingru_scan(combined * 1.0, state, x, reset)
        return mingru_step(combined[:, 0], last, out[:, 0], reset[:, 0])

    compiled = torch.compile(scan, fullgraph=True, backend=compiler)
    leaves = [v.clone().requires_grad_() for v in tensors[:3]]
    want, got = scan(*leaves, tensors[3]), compiled(*leaves, tensors[3])
    assert_same_bits(got, want)
    grads = [torch.autograd.grad(outs, leaves, (tensors[4][:, 0], tensors[5])) for outs in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert_parity(a, b)
    with torch.no_grad():
        assert_same_bits(compiled(*tensors[:4]), scan(*tensors[:4]))


@pytest.mark.gpu
def test_graph_replay_with_new_data():
    static = inputs(3, 70, 40, device="cuda")
    leaves = [v.requires_grad_() for v in static[:3]]

    def step():
        outs = mingru_scan(*leaves, static[3])
        return [*outs, *torch.autograd.grad(outs, leaves, static[4:])]

    torch.use_deterministic_algorithms(False)  # its fills would be captured too
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        new = inputs(3, 70, 40, device="cuda", seed=seed)
        with torch.no_grad():
            for old, value in zip(static, new, strict=True):
                old.copy_(value)
        graph.replay()
        assert_same_bits(captured, run(*new, backend="triton"))


# ---- errors


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"x": torch.zeros(2, 3)}, ValueError, r"x must be \(B, T, H\)"),
        ({"x": torch.zeros(2, 0, 4)}, ValueError, "T >= 1"),
        ({"combined": torch.zeros(2, 3, 8)}, ValueError, r"combined must be \(2, 3, 12\)"),
        (
            {"combined": torch.zeros(2, 3, 12, dtype=torch.int32), "x": torch.zeros(2, 3, 4, dtype=torch.int32)},
            TypeError,
            "x must be float32",
        ),
        (
            {"x": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
            TypeError,
            "combined.s dtype torch.float32; got torch.bfloat16",
        ),
        ({"state": torch.zeros(2, 5)}, ValueError, r"state must be \(B, H\) = \(2, 4\)"),
        ({"state": torch.zeros(2, 4, dtype=torch.bfloat16)}, TypeError, "state must be torch.float32"),
        ({"reset": torch.zeros(2, 4, dtype=torch.bool)}, ValueError, r"reset must be \(2, 3\)"),
        ({"reset": torch.zeros(2, 3)}, TypeError, "reset must be bool"),
        ({"backward": "quick"}, ValueError, "tiled, serial, fast; got 'quick'"),
        ({"backend": "numpy"}, ValueError, "backend must be one of"),
    ],
)
def test_errors(change, error, match):
    given = {"combined": torch.zeros(2, 3, 12), "state": torch.zeros(2, 4), "x": torch.zeros(2, 3, 4)}
    with pytest.raises(error, match=match):
        mingru_scan(**{**given, **change})


def test_layer_errors():
    x, state = torch.zeros(2, 3, 4), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"weight must be \(3H, H\) = \(12, 4\); got \(12, 5\)"):
        mingru_layer(x, torch.zeros(12, 5), state)
    with pytest.raises(TypeError, match=r"weight must have x's dtype torch.float32; got torch.bfloat16"):
        mingru_layer(x, torch.zeros(12, 4, dtype=torch.bfloat16), state)


def test_step_errors():
    with pytest.raises(ValueError, match=r"x must be \(B, H\)"):
        mingru_step(torch.zeros(2, 1, 12), torch.zeros(2, 4), torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match=r"combined must be \(2, 12\)"):
        mingru_step(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4))
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="out_state shares memory with x"):
        mingru_step(torch.zeros(2, 12), torch.zeros(2, 4), x, out_state=x)


@KERNELS
def test_float64_is_the_references(backend, device):
    wide = [v.double() for v in inputs(1, 2, 3, device=device)[:3]]
    with pytest.raises(TypeError, match="backend='reference'"):
        mingru_scan(*wide, backend=backend)
    with pytest.raises(TypeError, match="backend='reference'"):
        mingru_step(wide[0][:, 0], wide[1], wide[2][:, 0], backend=backend)


def test_auto_takes_the_reference_for_float64():
    combined, state, x, reset, dout, dnext = inputs(2, 5, 3, dtype=torch.float64)
    tensors = combined, state.double(), x, reset, dout, dnext.double()
    for got, want in zip(run(*tensors, backend="auto"), run(*tensors, backend="reference"), strict=True):
        assert got.dtype == torch.float64 and torch.equal(got, want)
    step = mingru_step(combined[:, 0], state.double(), x[:, 0])[0]
    assert torch.equal(step, mingru_step(combined[:, 0], state.double(), x[:, 0], backend="reference")[0])


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(ValueError, match="state must be on x's device, cpu; got meta"):
        mingru_scan(torch.zeros(1, 2, 9), torch.zeros(1, 3, device="meta"), torch.zeros(1, 2, 3))
