"""FlatAdam: PyTorch's Adam after PyTorch's clipping, the steps that it skips, and parameters as views of one vector."""

import copy
import math
import pickle

import pytest
import torch

from sharpwave.optim import Muon
from sharpwave.optim.adam import FlatAdam, flatten_parameters
from tests.conftest import backends


@pytest.mark.parametrize("limit", [0.5, 1e6, math.inf])
def test_is_adam_after_clipping(limit):
    torch.manual_seed(0)
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = FlatAdam(nets[0].parameters(), torch.tensor(0.01), eps=1e-5, max_grad_norm=limit)
    theirs = torch.optim.Adam(nets[1].parameters(), lr=0.01, eps=1e-5)
    for _ in range(10):
        x = torch.randn(8, 3)
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(nets[1].parameters(), limit if limit < math.inf else 1e30)
        ours.step()
        theirs.step()
        assert ours.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_changes_nothing_and_is_found(bad):
    net = torch.nn.Linear(3, 2)
    optimizer = FlatAdam(net.parameters(), torch.tensor(0.1))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = [x.clone() for p in net.parameters() for x in (p, *optimizer.state[p].values())]
    net.bias.grad[1] = bad
    optimizer.step()
    net.bias.grad[1] = 0.0
    optimizer.step(keep=torch.tensor(False))
    after = [x for p in net.parameters() for x in (p, *optimizer.state[p].values())]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert optimizer.first_bad == 7 and optimizer.state[net.bias]["count"] == 1
    optimizer.step(keep=torch.tensor(True))
    assert not torch.equal(before[0], net.weight)


def test_the_learning_rate_is_the_tensor_given():
    net = torch.nn.Linear(1, 1, bias=False)
    lr = torch.tensor(0.5)
    optimizer = FlatAdam(net.parameters(), lr)
    before = net.weight.item()
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert net.weight.item() == pytest.approx(before - 0.5, abs=1e-5)  # Adam's first step is lr
    lr.fill_(0.25)
    optimizer.step()
    assert net.weight.item() == pytest.approx(before - 0.75, abs=1e-5)


def test_parameters_keep_values_shapes_and_memory_order():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    strides = {name: p.stride() for name, p in net.named_parameters()}
    flat = flatten_parameters(net.parameters())
    assert flat.shape == (4 * 12 + 4 + 8 + 2,)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]) and p.stride() == strides[name] and p.is_leaf
        assert p.data_ptr() >= flat.data_ptr()
    flat.zero_()
    assert not any(p.any() for p in net.parameters())
    net.load_state_dict(before)
    assert flat.any()


def test_convolutions_in_channels_last():
    torch.manual_seed(0)
    nets = [torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours, theirs = FlatAdam(nets[0].parameters(), torch.tensor(0.01)), torch.optim.Adam(nets[1].parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(nets[0].weight, nets[1].weight, atol=1e-6)


@backends("triton")
def test_gradients_side_by_side(backend, device):
    from sharpwave.optim._collect_triton import collect

    parts = [torch.randn(n, device=device) for n in (1, 5000, 3, 2048, 2049)]
    assert torch.equal(collect(parts), torch.cat(parts))
    assert torch.equal(collect(parts[1:2]), parts[1])


@pytest.mark.parametrize("make", [lambda p: FlatAdam(p, torch.tensor(0.1)), lambda p: Muon(p, torch.tensor(0.1))])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_alone(make, duplicate):
    net = torch.nn.Linear(3, 2)
    pair = net, make(net.parameters())

    def step(net, optimizer, x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    begin = step(*pair, torch.ones(4, 3))
    twin = duplicate(pair)
    moved = step(*twin, torch.eye(3))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), begin, strict=True))
    assert not torch.equal(moved[0], begin[0])
    assert all(torch.equal(p, q) for p, q in zip(step(*pair, torch.eye(3)), moved, strict=True))
