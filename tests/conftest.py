"""Shared fixtures: the `gpu` marker, and the backends a test of an op runs on."""

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Must be set before Triton is first imported: the GPU kernels' own source then runs on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

# JAX takes three quarters of a GPU as soon as it is first used, from other test processes too, unless told before.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Small tensors and two test processes on two cores: more threads would only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="GPU tests that cannot run are errors, not skips")


def pytest_ignore_collect(collection_path, config):
    """Under --require-gpu: modules without GPU tests, which may be skipped for what a GPU machine need not have."""
    if config.getoption("--require-gpu") and collection_path.name.startswith("test_"):
        text = collection_path.read_text(encoding="utf-8")
        return True if "mark.gpu" not in text and "@backends" not in text else None
    return None


def pytest_collection_modifyitems(config, items):
    if HAS_CUDA:
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu: torch.cuda.is_available() is false on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("triton", "cpu"), id="interpreter", marks=pytest.mark.skipif(HAS_CUDA, reason="compiled instead")),
    pytest.param(("triton", "cuda"), id="gpu", marks=pytest.mark.gpu),
]


def backends(*names: str):
    """Parametrize `backend, device` over those of an op's backends: @backends("reference", "cpu", "triton")."""
    keep = [p for p in BACKENDS if p.values[0][0] in names]
    return pytest.mark.parametrize(
        "backend, device", [pytest.param(*p.values[0], id=p.id, marks=p.marks) for p in keep]
    )


@pytest.fixture
def gen():
    """A seeded CPU generator."""
    return torch.Generator().manual_seed(0)
