"""The CPU's and the GPU's kernels against plain PyTorch, over streams with every kind of end."""

import pytest
import torch

from sharpwave.ops.sumtree import tree_rebuild
from sharpwave.replay import PrioritizedReplay
from sharpwave.replay.nest import flatten
from tests.conftest import backends
from tests.parity import assert_parity


def stream(envs, steps, seed=0):
    """Steps of environments with ends of all four kinds, and of fields of several dtypes and row sizes."""
    gen = torch.Generator().manual_seed(seed)
    count = torch.zeros(envs, dtype=torch.int64)
    for t in range(steps):
        ends = torch.rand(envs, 2, generator=gen) < 0.15

        def look(episode_step, t=t):
            x = 100 * t + episode_step
            return {"image": (x[:, None] + torch.arange(7)).to(torch.uint8), "pair": torch.stack([x, -x], 1).double()}

        obs, following = look(count), look(count + 1, t + 1)
        yield dict(
            obs=obs,
            next_obs=following,
            action=torch.randint(9, (envs,), generator=gen, dtype=torch.int16),
            hidden=torch.randn(envs, 3, generator=gen).bfloat16(),
            reward=torch.randn(envs, generator=gen),
            terminated=ends[:, 0],
            truncated=ends[:, 1],
        )
        count = torch.where(ends.any(1), 0, count + 1)


def move(nest, device):
    return {k: move(x, device) if isinstance(x, dict) else x.to(device) for k, x in nest.items()}


def assert_state(got, want):
    """Everything but the leaves, whose powers may differ in the last place; which of them are positive does count."""
    for name, x in want.state.tensors.items():
        y = got.state.tensors[name].cpu()
        assert torch.equal(x > 0, y > 0) if name in ("leaves", "max_priority") else torch.equal(x, y), name


@backends("cpu", "triton")
@pytest.mark.parametrize("norm, n_step, frames, envs", [("batch", 1, 1, 1), ("buffer", 3, 2, 2), (None, 2, 3, 2)])
def test_streams(backend, device, norm, n_step, frames, envs):
    options = dict(
        num_envs=envs, n_step=n_step, frame_stack=frames, alpha=0.7, beta=(0.2, 1.0, 100), weight_norm=norm, seed=3
    )
    want = PrioritizedReplay(8 * envs, **options, backend="reference")
    got = PrioritizedReplay(8 * envs, device, **options, backend=backend)
    gen = torch.Generator().manual_seed(1)
    out = None
    for t, step in enumerate(stream(envs, 16)):
        # Now and then some environments take no step of their own; what is given for them must not be kept.
        took = None if t % 4 else torch.rand(envs, generator=gen) < 0.6
        slots = got.add(move(step, device), valid=None if took is None else took.to(device))
        assert torch.equal(want.add(step, valid=took), slots.cpu())
        assert_state(got, want)
        if t not in (7, 11, 15):
            continue
        a, b = want.sample(4), got.sample(4, out=out)
        out = b
        flat_a, flat_b = flatten(a), flatten(b)
        assert flat_a.keys() == flat_b.keys()
        for key, x in flat_a.items():
            assert_parity(flat_b[key].cpu(), x, key)
        td = torch.randn(4, generator=gen)
        td[3] = float("nan")
        named = t != 11
        want.update_priorities(a.indices, td, a.generations if named else None)
        got.update_priorities(b.indices, td.to(device), b.generations if named else None)
        got.state.tree.leaves.copy_(want.state.tree.leaves)  # powers may differ in the last place
        tree_rebuild(got.state.tree)
    assert_state(got, want)


@backends("cpu", "triton")
def test_unrelated_items(backend, device):
    want = PrioritizedReplay(20, backend="reference", gamma=0.9)
    got = PrioritizedReplay(20, device, backend=backend, gamma=0.9)
    for size in (1, 19, 7, 30):  # the last two wrap around
        gen = torch.Generator().manual_seed(size)
        batch = dict(
            x=torch.randn(size, 3, generator=gen),
            empty=torch.zeros(size, 0),
            terminated=torch.rand(size, generator=gen) < 0.5,
        )
        assert torch.equal(want.add(batch), got.add(move(batch, device)).cpu())
        assert_state(got, want)
        a, b = want.sample(9, beta=0.7), got.sample(9, beta=0.7)
        assert a.keys() == b.keys()
        for key, x in a.items():
            assert_parity(b[key].cpu(), x, key)
        assert set(a.discount.tolist()) <= {0.0, torch.tensor(0.9).item()}
    assert len(got) == 20
