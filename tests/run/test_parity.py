"""The parity harness: passes on sound kernels, fails on broken ones, and says why."""

import pytest
import torch

from sharpwave.ops.cdf import cpu as cdf_kernels
from sharpwave.ops.sumtree import parity as tree_cases
from sharpwave.run import parity
from sharpwave.run.parity import Outcome


@pytest.fixture
def compiled_only(monkeypatch):
    """Leave the Triton interpreter out: tests/ops compares it, at sizes that it can bear."""
    for op in ("cdf", "sumtree"):
        monkeypatch.setattr(f"sharpwave.ops.{op}.parity.backends_on", lambda *_: ["cpu"])


@pytest.mark.parametrize("op", ["cdf", "sumtree"])
def test_sound_kernels_pass(op, compiled_only, capsys, monkeypatch):
    monkeypatch.setattr(tree_cases, "MANY", 20_000)
    assert parity.main(op, "cpu") == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert out.splitlines()[-1].startswith(f"{op} on the CPU")
    assert out.count("same bits") == len(out.splitlines()) - 1


def test_a_wrong_kernel_fails(compiled_only, capsys, monkeypatch):
    sound = cdf_kernels.build_cdf

    def wrong(weights, out):
        sound(weights, out)
        out[-1] *= 0.999

    monkeypatch.setattr(cdf_kernels, "build_cdf", wrong)
    assert parity.main("cdf", "cpu") == 1
    assert "FAIL  build_cdf cpu uniform n=1000" in capsys.readouterr().out


@pytest.mark.parametrize(
    "outcome, passed",
    [
        (Outcome("x", 0.0, 0.0, True), True),
        (Outcome("x", 1e-7, 0.0, True), False),
        (Outcome("x", 0.0, 1.0, False), False),
        (Outcome("x", 0.0, 1.0, True, False), False),
        (Outcome("x", float("nan"), 1.0, True), False),
    ],
)
def test_what_passes(outcome, passed):
    assert outcome.passed is passed


def test_relative_error():
    assert parity.relative_error(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])) == 0.5
    assert parity.relative_error(torch.tensor([1.0]), torch.tensor([0.0])) == float("inf")
    assert parity.relative_error(torch.tensor([torch.nan, 1.0]), torch.ones(2)) != parity.relative_error(
        torch.ones(2), torch.ones(2)
    )


def test_unknown_ops_and_devices_are_refused():
    with pytest.raises(ValueError, match="op must have parity cases"):
        parity.main("fft", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA GPU"):
            parity.main("cdf", "cuda")


def test_interpreted_kernels_are_among_the_backends():
    """On a machine without a GPU the tests run Triton's kernels interpreted, and the harness knows."""
    want = ["cpu"] if torch.cuda.is_available() else ["cpu", "triton"]
    assert parity.backends_on("cdf", "cpu") == want


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["cdf", "sumtree"])
def test_gpu_kernels_pass(op):
    assert parity.main(op, "cuda") == 0
