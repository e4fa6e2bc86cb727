"""nn.MinGRU: forward and step agree, resets, the ways PyTorch runs a module, errors."""

import copy

import pytest
import torch

from sharpwave.nn.mingru import MinGRU
from tests.parity import assert_parity

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(device="cpu", layers=2, seed=0, **options):
    torch.manual_seed(seed)
    net = MinGRU(16, layers, **options).to(device)
    x = torch.randn(3, 21, 16, device=device)
    state = torch.randn(layers, 3, 16, device=device)
    reset = torch.rand(3, 21, device=device) < 0.2
    return net, x, state, reset


def test_hand_worked():
    # H = 1, weights (1, 0, 0): hidden = x, z = p = 1/2, c = x + 1/2. x = 1: h = 3/4, y = 1 + (3/4 - 1)/2 = 7/8.
    # A second layer reads 7/8: c = 11/8, h = 11/16, y = 7/8 + (11/16 - 7/8)/2 = 25/32.
    net = MinGRU(1, 2)
    with torch.no_grad():
        for weight in net.weights:
            weight.copy_(torch.tensor([[1.0], [0.0], [0.0]]))
    y, state = net(torch.ones(1, 1, 1))
    assert y.item() == pytest.approx(25 / 32)
    assert state.flatten().tolist() == pytest.approx([3 / 4, 11 / 16])


@DEVICES
def test_a_rollout_by_steps_is_the_segment(device):
    net, x, state, reset = make(device)
    with torch.no_grad():
        y, last = net(x, state, reset)
        h, steps = state, []
        for t in range(x.shape[1]):
            y_t, h = net.step(x[:, t], h, reset[:, t])
            steps.append(y_t)
    assert_parity(torch.stack(steps, dim=1), y, "y")
    assert_parity(h, last, "state")
    assert ((torch.stack(steps, dim=1).log_softmax(-1) - y.log_softmax(-1)).exp() - 1).abs().max() <= 1e-5


@DEVICES
def test_no_state_is_zeros_and_a_reset_forgets(device):
    net, x, state, _ = make(device)
    zeros = net.initial_state(3)
    assert zeros.shape == (2, 3, 16)
    assert zeros.device == x.device
    assert zeros.dtype == torch.float32
    assert not zeros.any()
    fresh, last = net(x)
    assert torch.equal(net(x, zeros)[0], fresh)
    reset = torch.zeros(3, 21, dtype=torch.bool, device=device)
    reset[:, 0] = True
    again, last_again = net(x, state, reset)
    assert torch.equal(again, fresh)
    assert torch.equal(last_again, last)
    assert torch.equal(net.step(x[:, 0])[0], net.step(x[:, 0], state, reset[:, 0])[0])


@DEVICES
def test_every_gradient_is_the_references(device):
    net, x, state, reset = make(device)
    exact = copy.deepcopy(net).double().cpu()
    exact.backend = "reference"
    grads = []
    for module, dtype, where in ((net, torch.float32, device), (exact, torch.float64, "cpu")):
        leaves = [v.detach().to(where, dtype).requires_grad_() for v in (x, state)]
        y, last = module(*leaves, reset.to(where))
        grads.append(torch.autograd.grad(y.square().sum() + last.sum(), [*leaves, *module.weights]))
    for i, (got, want) in enumerate(zip(*grads, strict=True)):
        assert_parity(got, want, f"gradient {i}")


def test_init_is_uniform_within_one_over_sqrt_hidden():
    torch.manual_seed(0)
    net = MinGRU(64, 2)
    assert [tuple(w.shape) for w in net.parameters()] == [(192, 64)] * 2
    for w in net.weights:
        assert w.abs().max() <= 1 / 8
        assert w.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not torch.equal(net.weights[0], net.weights[1])


def test_state_dict_round_trip():
    net, x, state, reset = make()
    other = MinGRU(16, 2)
    assert not torch.equal(other(x, state, reset)[0], net(x, state, reset)[0])
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x, state, reset)[0], net(x, state, reset)[0])


@pytest.mark.parametrize(
    "device, compiler", [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
def test_compiled_whole_and_used_twice(device, compiler):
    net, x, state, reset = make(device)

    def twice(x, state, reset):
        y, middle = net(x, state, reset)
        y, last = net(y, middle, reset)
        return y, net.step(y[:, -1], last, reset[:, -1])[1]

    compiled = torch.compile(twice, fullgraph=True, backend=compiler)
    results = []
    for run in (twice, compiled):
        y, last = run(x, state, reset)
        results.append([y, last, *torch.autograd.grad(y.sum() + last.sum(), list(net.weights))])
    for got, want in zip(*reversed(results), strict=True):
        assert_parity(got, want)


@DEVICES
def test_autocast(device):
    net, x, state, reset = make(device)
    want, want_last = net(x, state, reset)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, last = net(x, state, reset)
        y_t, _ = net.step(x[:, 0], state, reset[:, 0])
    assert y.dtype == y_t.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    # Weights, inputs and each layer's combined are rounded to 8 bits, one after the other.
    assert_parity(y, want, "y", scale=4)
    assert_parity(last.to(torch.bfloat16), want_last, "state", scale=4)
    y.float().sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in net.weights)


def test_export():
    net, x, state, reset = make()
    batch = torch.export.Dim("batch", min=2)
    time = torch.export.Dim("time", min=2)
    shapes = ({0: batch, 1: time}, {1: batch}, {0: batch, 1: time})
    with torch.no_grad():  # with gradients the carried states are kept, every 16 steps: min=17 then
        exported = torch.export.export(net, (x, state, reset), dynamic_shapes=shapes).module()
    for b, t in ((3, 21), (5, 4)):
        x, state = torch.randn(b, t, 16), torch.randn(2, b, 16)
        reset = torch.rand(b, t) < 0.1
        for got, want in zip(exported(x, state, reset), net(x, state, reset), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_two_layers_in_one_graph_replayed_with_new_data():
    net, x, state, reset = make("cuda")
    weights = list(net.weights)

    def update():
        y, last = net(x, state, reset)
        return [y, last, *torch.autograd.grad(y.square().sum() + last.sum(), weights)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = update()
    x.normal_()
    state.normal_()
    reset.logical_not_()
    graph.replay()
    for got, want in zip(captured, update(), strict=True):
        assert_parity(got, want.double())


def test_errors():
    with pytest.raises(ValueError, match="integers >= 1; got hidden=0"):
        MinGRU(0)
    net, x, state, reset = make()
    with pytest.raises(ValueError, match=r"state must be \(layers, B, H\) with layers = 2; got shape \(1, 3, 16\)"):
        net(x, state[:1], reset)
    with pytest.raises(ValueError, match=r"state must be \(layers, B, H\)"):
        net.step(x[:, 0], state[0])
    with pytest.raises(ValueError, match=r"x must be \(B, T, H\)"):
        net(x[:, 0], state)
    with pytest.raises(ValueError, match="backward must be one of"):
        MinGRU(16, 2, backward="quick")
    with pytest.raises(ValueError, match="backend must be one of"):
        MinGRU(16, 2, backend="quick")
    for call in (net, lambda x: net.step(x[:, 0])):
        with pytest.raises(ValueError, match=r"x must end in H = 16 channels; got shape"):
            call(x[..., 1:])
    for layers in (1, 3):
        with torch.no_grad(), pytest.raises(ValueError, match=r"out_state must be \(layers, B, H\) = \(2, 3, 16\)"):
            net.step(x[:, 0], state, out_state=torch.zeros(layers, 3, 16))


def test_autocast_leaves_float64_and_meta_tensors_alone():
    net, x, _, _ = make(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = net(x.double())
        assert y.dtype == state.dtype == torch.float64
        assert net.step(x[:, 0].double(), state)[0].dtype == torch.float64
    assert net.to("meta")(x.double().to("meta"))[0].shape == x.shape


@pytest.mark.parametrize("rounded", [False, True])
def test_a_second_derivative_is_refused(rounded):
    """The gradient of a sum comes in as a constant; what goes out depends on the inputs all the same."""
    net, x, state, reset = make()
    if rounded:
        net.rounded = [weight.detach().bfloat16() for weight in net.weights]
    x.requires_grad_()
    y = net(x, state, reset)[0]
    with pytest.raises(RuntimeError, match="first-order gradients only: leave create_graph=True out"):
        torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
