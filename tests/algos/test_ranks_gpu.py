"""Two ranks on two GPUs by NCCL, in captured graphs and without."""

import time

import pytest
import torch

from tests.algos import ranks
from tests.algos.test_ranks import assert_same_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_two_gpus(tmp_path):
    """Gradients of the union, eager and captured; a stop and an exact resume; and no wait for a rank that failed."""
    cases = ("talk", "gradients", "skips", "captured", f"train={tmp_path / 'ppo'}", f"dqn={tmp_path / 'dqn'}", "fails")
    processes = ranks.start(*cases, device="cuda")
    found = ranks.finish(processes, 200)
    ended = time.monotonic()
    for code, out, err in found:
        assert code and out.split() == ["talk", "gradients", "skips", "captured", "train", "dqn"], err
    assert "rank 0 stops: rank 1 failed: the pole broke" in found[0][2]
    assert time.monotonic() - ended < 10
    for algorithm in ("ppo", "dqn"):
        assert_same_run(tmp_path / algorithm / "whole", tmp_path / algorithm / "half")
