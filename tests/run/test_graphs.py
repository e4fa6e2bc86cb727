"""Functions captured as CUDA graphs."""

import pytest
import torch

from sharpwave.run.graphs import Captured

pytestmark = pytest.mark.gpu


def test_the_first_replay_draws_what_an_eager_call_would(monkeypatch):
    """However late the GPU begins the capture: what the capture's stream is given at its beginning takes 0.2 s here."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(*args, **kwargs):
        torch.cuda._sleep(400_000_000)
        begin(*args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)

    def draws(enabled):
        generator, x = torch.Generator("cuda").manual_seed(3), torch.zeros(4, device="cuda")
        run = Captured(lambda: x.uniform_(generator=generator), x.device, [generator], enabled)
        return [(run(), x.tolist())[1] for _ in range(6)]

    assert draws(enabled=True) == draws(enabled=False)


def test_a_capture_during_which_an_old_graph_becomes_garbage():
    x = torch.zeros(4, device="cuda")
    old = Captured(lambda: x.mul_(1), x.device)
    for _ in range(3):
        old()
    kept = [old]
    del old

    def add_two():
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            cycle = [kept.pop()]
            cycle.append(cycle)
            del cycle
            junk = [[k] for k in range(10_000)]  # more new objects than a collection waits for
            assert junk
        x.add_(1)

    new = Captured(add_two, x.device)
    for _ in range(5):
        new()
    assert x.tolist() == [10] * 4
