"""`sharpwave doctor` on machines that this one pretends to be."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sharpwave.cli import main
from sharpwave.run import doctor


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def pretend(monkeypatch, *, nvidia=("", []), cuda=None, available=False):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "nvidia", lambda: nvidia)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


def only(findings):
    (finding,) = findings
    return finding


def test_this_machine_can_run_the_tests(capfd):
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    assert out.endswith("no problem\n") and "Traceback" not in out
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capfd.readouterr().out)
    assert {"Python", "PyTorch", "CPU kernels", "disk"} <= {finding["what"] for finding in findings}
    assert all(finding["state"] in ("ok", "note") for finding in findings)


def test_a_gpu_that_this_torch_cannot_use(monkeypatch):
    pretend(monkeypatch, nvidia=("580.65.06", ["NVIDIA H200"]), cuda=None)
    finding = only(doctor.gpu())
    assert finding.state == "note" and "NVIDIA H200" in finding.found and "download.pytorch.org" in finding.advice


@pytest.mark.parametrize(
    "gloo, nccl, gpus, state, words",
    [
        (True, False, 0, "ok", "gloo, for CPUs"),
        (True, False, 2, "note", "no NCCL"),
        (True, True, 2, "ok", "NCCL 2.27.5"),
        (False, True, 2, "note", "without gloo"),
    ],
)
def test_what_connects_ranks(monkeypatch, gloo, nccl, gpus, state, words):
    pretend(monkeypatch, cuda="13.0", available=gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: gloo)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    finding = only(doctor.ranks())
    assert finding.state == state and words in finding.found


@pytest.mark.parametrize(
    "driver, cuda, words",
    [
        ("550.54.15", "13.0", "CUDA 13.0 needs driver 580 or later"),
        ("470.82.01", "12.8", "CUDA 12.8 needs driver 525 or later"),
        ("580.65.06", "13.0", "CUDA_VISIBLE_DEVICES"),
        ("580.65.06", "99.0", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_that_does_not_do(monkeypatch, driver, cuda, words):
    pretend(monkeypatch, nvidia=(driver, ["NVIDIA H200"]), cuda=cuda)
    finding = only(doctor.gpu())
    assert finding.state == "problem" and words in finding.advice


def test_a_gpu_that_was_hidden_is_no_problem(monkeypatch):
    pretend(monkeypatch, nvidia=("580.65.06", ["NVIDIA H200"]), cuda="13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only(doctor.gpu()).state == "note"


def test_no_gpu(monkeypatch):
    pretend(monkeypatch, cuda="13.0")
    assert only(doctor.gpu()).state == "note"
    pretend(monkeypatch, cuda=None)
    assert only(doctor.gpu()).state == "ok"


def fake_gpu(monkeypatch, free=100, total=140):
    pretend(monkeypatch, nvidia=("580.1", ["NVIDIA H200"]), cuda="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free * 2**30, total * 2**30))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())


def test_a_gpu_is_tried_and_not_only_seen(monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(doctor, "_cdf_error", lambda device: 1e-7)
    driver, gpu = doctor.gpu()
    assert (driver.found, gpu.state, gpu.what) == ("580.1", "ok", "cuda:0")

    monkeypatch.setattr(doctor, "_cdf_error", lambda device: float("nan"))
    assert list(doctor.gpu())[1].state == "problem"

    for message, words in (("Failed to find C compiler", "gcc"), ("no kernel image", "lack kernels for this GPU")):

        def fail(device, message=message):
            raise RuntimeError(message)

        monkeypatch.setattr(doctor, "_cdf_error", fail)
        finding = list(doctor.gpu())[1]
        assert finding.state == "problem" and message in finding.found and words in finding.advice


def test_a_full_gpu(monkeypatch):
    fake_gpu(monkeypatch, free=1)
    monkeypatch.setattr(doctor, "_cdf_error", lambda device: 1e-7)
    assert list(doctor.gpu())[1].state == "note"


def test_interpreted_kernels_on_a_gpu(monkeypatch):
    pretend(monkeypatch, available=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset TRITON_INTERPRET" in only(doctor.triton()).advice
    monkeypatch.setitem(sys.modules, "triton", None)
    assert only(doctor.triton()).advice == "pip install 'sharpwave[triton]'"
    pretend(monkeypatch)
    assert only(doctor.triton()).state == "ok"


@pytest.mark.parametrize(
    "version, state", [((3, 10), "problem"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "problem")]
)
def test_python(monkeypatch, version, state):
    monkeypatch.setattr(sys, "version_info", version)
    assert only(doctor.python()).state == state


def test_packages_that_are_missing_or_old(monkeypatch):
    versions = {"torch": "2.11.0", "rich": "12.0", "matplotlib": "3.0"}

    def version(name):
        if name == "numba":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name, "99")

    wants = [
        "torch>=2.11",
        "rich>=13",
        "numba>=0.61",
        'matplotlib>=3.8; extra == "plot"',
        'numba>=0.61; extra == "video"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: wants)
    monkeypatch.setattr(metadata, "version", version)
    found = {f.what: (f.state, f.found, f.advice) for f in doctor.requirements()}
    assert found == {
        "rich": ("problem", "12.0", 'pip install "rich>=13"'),
        "numba": ("problem", "not installed", 'pip install "numba>=0.61"'),
    }
    monkeypatch.setattr(
        metadata, "metadata", lambda name: type("M", (), {"get_all": lambda self, key: ["plot", "video"]})()
    )
    old, missing = doctor.extras()
    assert (old.state, old.what, old.found) == ("note", "matplotlib", "3.0, too old for sharpwave[plot]")
    assert missing.found == "not installed: video (eval --video)"


def test_a_numba_that_computes_nonsense(monkeypatch):
    monkeypatch.setattr(doctor, "_cdf_error", lambda device: 0.5)
    assert only(doctor.numba()).state == "problem"


def test_the_disk(monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 2**30, "total": 2**36})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    finding = next(doctor.disk(Path("runs/not/yet")))
    assert (finding.state, finding.found) == ("note", f"1.0 GiB free at {tmp_path}")

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert only(doctor.disk(Path("runs"))).state == "problem"


def test_variables_that_slow_things_down(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    assert only(doctor.variables()).advice == "unset CUDA_LAUNCH_BLOCKING"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "nvidia", lambda: 1 / 0)
    (finding,) = [f for f in doctor.examine() if f.state == "problem"]
    assert (finding.what, finding.found) == ("gpu", "ZeroDivisionError: division by zero")


def test_a_broken_torch_is_told_and_not_a_traceback(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run([sys.executable, "-m", "sharpwave", "doctor"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert re.fullmatch(r"problem +PyTorch +ImportError: libcudart.so.13: cannot open shared object file", problem)
    assert "-> pip install torch" in done.stdout
