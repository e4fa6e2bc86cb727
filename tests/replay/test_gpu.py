"""What only a GPU can show: one captured graph of add, sample and update; no waits; no allocations."""

import pytest
import torch

from sharpwave.replay import PrioritizedReplay, SequenceReplay
from sharpwave.replay.nest import flatten

pytestmark = pytest.mark.gpu
ENVS, STEPS = 4, 120


def steps(seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.zeros(ENVS, dtype=torch.int64)
    for t in range(STEPS):
        ends = torch.rand(ENVS, 2, generator=gen) < 0.1
        obs, after = (1000 * t + x)[:, None].float(), (1000 * (t + 1) + x + 1)[:, None].float()
        yield dict(
            obs=obs.expand(-1, 5).contiguous(),
            next_obs=after.expand(-1, 5).contiguous(),
            action=torch.full((ENVS,), t),
            reward=torch.randn(ENVS, generator=gen),
            terminated=ends[:, 0].contiguous(),
            truncated=ends[:, 1].contiguous(),
        )
        x = torch.where(ends.any(1), 0, x + 1)


def errors(batch):
    return 2.0 ** (batch.indices % 5 - 2).float()


@pytest.mark.parametrize("options", [dict(n_step=3, frame_stack=2), dict(n_step=1)])
def test_one_graph_fills_wraps_and_overwrites(options):
    """Priorities that are powers of two leave nothing to round, so a CPU's buffer draws the same, bit for bit."""
    options = dict(num_envs=ENVS, alpha=1.0, beta=0.0, eps=2.0**-44, **options)
    gpu, cpu = PrioritizedReplay(40 * ENVS, "cuda", **options), PrioritizedReplay(40 * ENVS, **options)
    static = {k: x.cuda() for k, x in next(steps()).items()}
    batch = None

    def step():
        gpu.add(static)
        gpu.sample(32, out=batch)
        gpu.update_priorities(batch.indices, errors(batch), batch.generations)

    graph = None
    for t, new in enumerate(steps()):
        for k, x in new.items():
            static[k].copy_(x)
        if t == 4:
            batch = gpu.sample(32)
            cpu.sample(32)
        cpu.add(new)
        if t < 4:
            gpu.add(static)
            continue
        if t < 7:
            step()
        else:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            graph.replay()
        want = cpu.sample(32)
        cpu.update_priorities(want.indices, errors(want), want.generations)
        got = flatten(batch)
        for key, x in flatten(want).items():
            torch.testing.assert_close(
                got[key].cpu(), x, rtol=1e-6, atol=1e-6, msg=lambda m, k=key, t=t: f"{t} {k}: {m}"
            )
        assert torch.equal(gpu.state.counters.cpu(), cpu.state.counters), t
    assert torch.equal(gpu.state.generation.cpu(), cpu.state.generation)
    assert len(gpu) == len(cpu) > 30 * ENVS


def test_reseeding_and_replaying():
    buffer = PrioritizedReplay(100, "cuda")
    buffer.add(x=torch.arange(100, device="cuda"))
    batch = buffer.sample(50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.sample(50, out=batch)

    def draws():
        buffer.state.offset.zero_()
        graph.replay()
        first = batch.x.clone()
        graph.replay()
        return first, batch.x.clone()

    a, b = draws()
    c, d = draws()
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)


def test_nothing_waits_or_allocates():
    flat = PrioritizedReplay(1000, "cuda", weight_norm="buffer", max_priority_over="buffer")
    stream = PrioritizedReplay(1000, "cuda", num_envs=ENVS, n_step=3)
    sequences = SequenceReplay(1000, "cuda", num_envs=ENVS, length=4, burn_in=1)
    data = [{k: x.cuda() for k, x in step.items()} for step in steps()]
    for step in data[:40]:
        for buffer in (flat, stream, sequences):
            buffer.add(step)
    outs = [buffer.sample(64) for buffer in (flat, stream, sequences)]
    torch.cuda.synchronize()

    def work():
        for buffer, out in zip((flat, stream, sequences), outs, strict=True):
            for step in data[40:44]:
                buffer.add(step)
            buffer.sample(64, out=out)
            td = out.reward if out.reward.ndim == 1 else out.reward[:, 1:]
            buffer.update_priorities(out.indices, td, out.generations)
            buffer.update_priorities(out.indices, td)

    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_pinned_storage_and_empty_buffers():
    buffer = PrioritizedReplay(50, "cuda", storage="pinned", num_envs=ENVS)
    for step in list(steps())[:20]:
        buffer.add(step)
    batch = buffer.sample(16)
    assert batch.obs.is_cuda and (batch.next_obs != batch.obs).all()
    buffer.clear()
    batch = buffer.sample(16)
    assert (batch.weights == 0).all() and (batch.generations == -2).all()
    buffer.update_priorities(batch.indices, torch.ones(16, device="cuda"), batch.generations)
    assert len(buffer) == 0 and float(buffer.total_priority) == 0
    stats = buffer.stats()
    assert stats["empty"] == 1 and stats["stale"] == 16


def test_indices_on_another_device_are_refused():
    buffer = PrioritizedReplay(50, "cuda")
    buffer.add(x=torch.arange(50, device="cuda"))
    with pytest.raises(ValueError, match="device"):
        buffer.update_priorities(torch.tensor([1]), torch.tensor([1.0]))


def test_files_go_between_devices(tmp_path):
    gpu = PrioritizedReplay(50, "cuda", num_envs=ENVS, alpha=1.0)
    for step in list(steps())[:30]:
        gpu.add({k: x.cuda() for k, x in step.items()})
    gpu.save(tmp_path / "saved")
    cpu = PrioritizedReplay.load(tmp_path / "saved", device="cpu")
    for _ in range(5):
        a, b = gpu.sample(20), cpu.sample(20)
        assert torch.equal(a.indices.cpu(), b.indices) and torch.equal(a.obs.cpu(), b.obs)


def test_transitions_on_a_gpu_with_priorities_on_the_host():
    buffer = PrioritizedReplay(8, storage="cuda")
    buffer.add(x=torch.arange(8))
    batch = buffer.sample(50)
    assert buffer.storage.tensors["x"].is_cuda and torch.equal(batch.x, batch.indices)
    buffer.update_priorities(batch.indices, torch.ones(50), batch.generations)
