"""Q networks: shapes, what they read, dueling and noisy layers against their equations."""

import pytest
import torch

from sharpwave.envs import Observation
from sharpwave.nn import q_network
from sharpwave.nn.noisy import NoisyLinear, scaled_noise
from sharpwave.nn.q_network import FirstConv2d, QNetwork, greedy

IMAGE = Observation((36, 36), torch.uint8)


@pytest.mark.parametrize(
    "shape, dtype, kind, frames",
    [
        ((), torch.float32, "mlp", 1),
        ((5,), torch.float64, "auto", 3),
        ((4, 4, 2), torch.uint8, "auto", 1),  # too small for convolutions
        ((36, 40), torch.uint8, "nature", 4),
        ((3, 36, 36), torch.uint8, "auto", 1),
        ((36, 36, 3), torch.uint8, "nature", 2),
        ((10, 10, 4), torch.bool, "auto", 1),
        ((20, 20), torch.float32, "impala", 2),
    ],
)
@pytest.mark.parametrize("atoms", [1, 5])
def test_shapes(shape, dtype, kind, frames, atoms, gen):
    net = QNetwork(Observation(shape, dtype), 3, kind, hidden=8, frames=frames, atoms=atoms)
    lead = (2, frames) if frames > 1 else (2,)
    out = net(torch.randint(0, 2, (*lead, *shape), generator=gen).to(dtype))
    assert out.shape == ((2, 3) if atoms == 1 else (2, 3, 5)) and out.dtype == torch.float32
    out.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_channels_are_frames_by_their_channels(gen):
    """(frames, H, W, C) and (frames, C, H, W) of the same pictures are the same to the network."""
    last = QNetwork(Observation((36, 36, 3), torch.uint8), 2, "nature", hidden=8, frames=2)
    first = QNetwork(Observation((3, 36, 36), torch.uint8), 2, "nature", hidden=8, frames=2)
    first.load_state_dict(last.state_dict())
    obs = torch.randint(0, 256, (4, 2, 36, 36, 3), generator=gen).to(torch.uint8)
    assert torch.allclose(last(obs), first(obs.permute(0, 1, 4, 2, 3)), atol=1e-6)
    changed = obs.clone()
    changed[0, 1, 5, 5, 2] += 100
    assert not torch.equal(last(changed)[0], last(obs)[0]) and torch.equal(last(changed)[1:], last(obs)[1:])


def test_observations_are_left_as_they_are_and_bytes_divided(gen):
    net = QNetwork(IMAGE, 2, hidden=8)
    obs = torch.randint(0, 256, (2, 36, 36), generator=gen).to(torch.uint8)
    kept = obs.clone()
    floats = QNetwork(Observation((36, 36), torch.float32), 2, "nature", hidden=8)
    floats.load_state_dict(net.state_dict())
    assert torch.allclose(net(obs), floats(obs / 255), atol=1e-6) and torch.equal(obs, kept)
    once = obs / 255
    kept = once.clone()
    floats(once)
    assert torch.equal(once, kept)


@pytest.mark.parametrize("size, kernel, stride, patch", [((36, 40), 8, 4, 4), ((37, 40), 8, 4, 1), ((9, 9), 3, 1, 1)])
def test_patches_as_channels_are_the_same_convolution(size, kernel, stride, patch, gen):
    first = FirstConv2d(3, 5, kernel, stride, size, 1 / 255).double()
    assert first.patch == patch
    x = torch.randint(0, 256, (2, 3, *size), generator=gen).to(torch.uint8)
    plain = torch.nn.Conv2d(3, 5, kernel, stride).double()
    plain.load_state_dict(first.state_dict())
    out, want = first(first.prepare(x, torch.float64)), plain(x.double() / 255)
    assert torch.allclose(out, want, atol=1e-6)
    out.square().sum().backward()
    want.square().sum().backward()
    assert torch.allclose(first.weight.grad, plain.weight.grad, rtol=1e-4)


def test_bias_and_relu_in_one_pass_are_the_same(monkeypatch, gen):
    torch.manual_seed(0)
    net = QNetwork(Observation((36, 36), torch.uint8), 3, "nature", hidden=8, frames=2)
    obs = torch.randint(256, (4, 2, 36, 36), dtype=torch.uint8, generator=gen)
    results = []
    for chosen in ("reference", "triton"):
        monkeypatch.setattr(q_network, "choose", lambda op, device, chosen=chosen: chosen)
        net.zero_grad()
        q = net(obs)
        q.square().sum().backward()
        results.append((q.detach(), *(p.grad.clone() for p in net.parameters())))
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("atoms", [1, 5])
def test_dueling_is_value_plus_centred_advantage(atoms, gen):
    """Wang et al. 2016, eq. 9: Q = V + A - mean_a A, so that the mean over actions is V, whatever A is."""
    net = QNetwork(Observation((4,), torch.float32), 3, hidden=8, atoms=atoms)
    obs = torch.randn(6, 4, generator=gen)
    x = torch.relu(net.stream(net.trunk(obs)))
    value, advantage = net.value(x[:, :8]), net.advantage(x[:, 8:]).view(6, 3, atoms)
    want = value[:, None] + advantage - advantage.mean(1, keepdim=True)
    out = net(obs).view(6, 3, atoms)
    assert torch.allclose(out, want, atol=1e-6) and torch.allclose(out.mean(1), value, atol=1e-6)


def test_head_is_float32_under_autocast(gen):
    net = QNetwork(Observation((4,), torch.float32), 3, hidden=8)
    obs = torch.randn(64, 4, generator=gen)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(obs)
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float()), "values of float32, not rounded to bfloat16"
    assert torch.allclose(out, net(obs), atol=0.05)


def test_noisy_linear_is_its_equation(gen):
    """Fortunato et al. 2018, eq. 9 and 10, with the weights written out."""
    layer = NoisyLinear(5, 3)
    layer.weight_sigma.data.uniform_(0, 1, generator=gen)
    x = torch.randn(4, 5, generator=gen)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    block = scaled_noise(4, layer.noise_size, gen)
    layer.set_noise(block)
    y = layer(x)
    for row in range(4):
        e_in, e_out = block[row, :5], block[row, 5:]
        weight = layer.weight + layer.weight_sigma * torch.outer(e_out, e_in)
        want = weight @ x[row] + layer.bias + layer.bias_sigma * e_out
        assert torch.allclose(y[row], want, atol=1e-5)
    layer.set_noise(None)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_scaled_noise(gen):
    """E f(n)^2 = E |n| = sqrt(2 / pi), and no sign is preferred."""
    noise = scaled_noise(200, 500, gen)
    assert noise.square().mean().item() == pytest.approx((2 / torch.pi) ** 0.5, rel=0.02)
    assert noise.mean().abs() < 0.02


def test_greedy():
    values = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]])
    action, value = greedy(values, None)
    assert action.tolist() == [1, 0] and value.tolist() == [3.0, 2.0]
    logits = torch.tensor([[[40.0, 0.0, -40.0], [-40.0, 40.0, 0.0]]])
    action, value = greedy(logits, torch.tensor([0.0, 1.0, 5.0]))
    assert action.tolist() == [1] and value.item() == pytest.approx(1.0, abs=1e-4)


def test_errors():
    with pytest.raises(ValueError, match="network must be one of auto, mlp, nature, impala; got 'resnet'"):
        QNetwork(IMAGE, 2, "resnet")
    with pytest.raises(ValueError, match=r"'impala' needs an image of at least 8 x 8; observations are \(4, 4, 2\)"):
        QNetwork(Observation((4, 4, 2), torch.uint8), 2, "impala")
