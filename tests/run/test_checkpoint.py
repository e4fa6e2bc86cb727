"""Checkpoints: what survives, what is refused, and that a kill at any instant leaves the last good one."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpwave.run import checkpoint
from sharpwave.run.errors import CheckpointError


def odd_tensors():
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "0-d": torch.tensor(2.5, dtype=torch.float64),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(5, 3).bfloat16(),
        "fp16": torch.randn(2).half(),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "int64": torch.tensor([2**62, -(2**62)]),
        "empty": torch.empty(0, 7),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "whole": base,
        "row": base[1],
        "again": base,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        # Bytes, not values: NaN and the sign of zero count too.
        a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (got[name], tensor))
        assert torch.equal(a, b), name


def test_every_kind_of_tensor_survives(tmp_path):
    tensors, meta = odd_tensors(), {"step": 3, "big": 2**127 + 1, "text": "ü", "list": [1.5, None, True]}
    checkpoint.save(tmp_path / "c", tensors, meta)
    got, got_meta = checkpoint.load(tmp_path / "c")
    assert_same(got, tensors)
    assert got_meta == meta


def test_saving_leaves_the_tensors_alone(tmp_path):
    tensors = odd_tensors()
    versions = {n: (t._version, t.data_ptr(), t.stride()) for n, t in tensors.items()}
    checkpoint.save(tmp_path / "c", tensors, {})
    assert versions == {n: (t._version, t.data_ptr(), t.stride()) for n, t in tensors.items()}


def test_both_files_have_the_same_permissions(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.zeros(1)}, {})
    assert len({path.stat().st_mode for path in (tmp_path / "c").iterdir()}) == 1


def test_loaded_tensors_share_no_memory(tmp_path):
    base = torch.zeros(4)
    checkpoint.save(tmp_path / "c", {"a": base, "b": base}, {})
    got, _ = checkpoint.load(tmp_path / "c")
    got["a"].fill_(1)
    assert torch.equal(got["b"], torch.zeros(4))


@pytest.mark.gpu
def test_a_gpu_tensor_comes_back_on_the_cpu(tmp_path):
    x = torch.randn(3, 4, device="cuda")
    checkpoint.save(tmp_path / "c", {"x": x.t()}, {})
    got, _ = checkpoint.load(tmp_path / "c")
    assert got["x"].device.type == "cpu"
    assert torch.equal(got["x"], x.t().cpu())


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", odd_tensors(), {"a": 1})

    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    checkpoint.load(tmp_path / "c")


def test_a_checkpoint_is_never_overwritten(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match="exists"):
        checkpoint.save(tmp_path / "c", {"x": torch.ones(1)}, {})
    assert checkpoint.load(tmp_path / "c")[0]["x"].item() == 0


class Killed(BaseException):
    """Like SIGKILL, it runs no `except Exception` and no clean-up of OSError."""


def test_a_kill_between_any_two_operations_leaves_a_good_checkpoint(tmp_path, monkeypatch):
    """Save step 1, then die at the k-th operation on the disk while saving step 2 and pruning, for every k."""
    names = ("mkdir", "rename", "fsync", "open", "close", "unlink", "rmdir")
    real = {name: getattr(os, name) for name in names}
    real_save_file = checkpoint.save_file
    k, finished = 0, False
    while not finished:
        k += 1
        directory = tmp_path / str(k)
        checkpoint.save(checkpoint.step_path(directory, 1), {"x": torch.tensor(1)}, {"step": 1})
        countdown = [k]

        def maybe_die(countdown=countdown):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed

        def hooked(name):
            def call(*args, **kwargs):
                maybe_die()
                return real[name](*args, **kwargs)

            return call

        def half_written(tensors, path, countdown=countdown):
            maybe_die()
            real_save_file(tensors, path)
            if countdown[0] == 1:  # the next one dies: it leaves half a file
                os.truncate(path, path.stat().st_size // 2)
            maybe_die()

        try:
            with monkeypatch.context() as patch:
                for name in names:
                    patch.setattr(os, name, hooked(name))
                patch.setattr(checkpoint, "save_file", half_written)
                checkpoint.save(checkpoint.step_path(directory, 2), {"x": torch.tensor(2)}, {"step": 2})
                checkpoint.prune(directory, 1)
            finished = True
        except Killed:
            pass
        steps = checkpoint.list_steps(directory)
        assert steps
        for step in steps:  # whatever has its final name is whole, also one that was being deleted
            tensors, meta = checkpoint.load(checkpoint.step_path(directory, step))
            assert meta["step"] == tensors["x"].item() == step
        # The run goes on: what the kill left behind is in nobody's way, and is cleared.
        checkpoint.save(checkpoint.step_path(directory, 3), {"x": torch.tensor(3)}, {"step": 3})
        checkpoint.prune(directory, 1)
        assert [p.name for p in directory.iterdir()] == [checkpoint.step_path(directory, 3).name]
    assert k > 12  # several operations were interrupted, and the last round by none


def test_a_failing_disk_is_reported_and_cleaned_up(tmp_path, monkeypatch):
    checkpoint.save(checkpoint.step_path(tmp_path, 1), {"x": torch.zeros(1)}, {})

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; earlier ones are intact"):
        checkpoint.save(checkpoint.step_path(tmp_path, 2), {"x": torch.zeros(1)}, {})
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.step_path(tmp_path, 1).name]


def test_the_newest_are_kept(tmp_path):
    for step in (5, 100, 20):
        checkpoint.save(checkpoint.step_path(tmp_path, step), {}, {"step": step})
    (tmp_path / "step-x").mkdir()  # not ours
    assert checkpoint.list_steps(tmp_path) == [5, 20, 100]
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.list_steps(tmp_path) == [20, 100]
    assert checkpoint.load(checkpoint.latest(tmp_path))[1]["step"] == 100
    assert (tmp_path / "step-x").exists()
    assert checkpoint.latest(tmp_path / "nowhere") is None


def truncate(name, part):
    def damage(path):
        os.truncate(path / name, int((path / name).stat().st_size * part))

    return damage


def flip_last_byte(path):
    data = bytearray((path / checkpoint.TENSORS).read_bytes())
    data[-1] ^= 1
    (path / checkpoint.TENSORS).write_bytes(data)


def edit_meta(**changes):
    def damage(path):
        header = json.loads((path / checkpoint.META).read_text())
        (path / checkpoint.META).write_text(json.dumps(header | changes))

    return damage


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncate(checkpoint.TENSORS, 0), "has 0 bytes"),
        (truncate(checkpoint.TENSORS, 0.5), "bytes"),
        (truncate(checkpoint.META, 0), "meta.json cannot be read"),
        (truncate(checkpoint.META, 0.7), "meta.json cannot be read"),
        (flip_last_byte, "its hash differs"),
        (edit_meta(meta={"step": 9}), "meta.json is not what was written"),
        (edit_meta(format="something"), "not of a sharpwave checkpoint"),
        (edit_meta(version=checkpoint.VERSION + 1), "upgrade sharpwave"),
        (edit_meta(tensors=None), "meta.json is not what was written"),
        (lambda path: (path / checkpoint.META).unlink(), "holds no meta.json"),
        (lambda path: (path / checkpoint.TENSORS).unlink(), "tensors.safetensors cannot be read"),
        (lambda path: (path / checkpoint.META).write_bytes(b"\x80\x04\x95pickle"), "meta.json cannot be read"),
        (shutil.rmtree, "no checkpoint at"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, damage, words):
    checkpoint.save(checkpoint.step_path(tmp_path, 1), {"x": torch.zeros(100)}, {"step": 1})
    path = checkpoint.step_path(tmp_path, 2)
    checkpoint.save(path, {"x": torch.zeros(100)}, {"step": 2})
    damage(path)
    with pytest.raises(CheckpointError, match=words) as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    if "is damaged" in str(error.value):
        assert "delete it to go on from step-000000000001" in str(error.value)


def test_flatten_names_and_structure():
    weight = torch.zeros(2)
    state = {
        "policy": {"net.0.weight": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(3)}, 1: {}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    }
    tensors, structure = checkpoint.flatten(state)
    assert list(tensors) == ["policy.net.0.weight", "optimizer.state.0.step"]
    assert tensors["policy.net.0.weight"] is weight
    back = checkpoint.unflatten(tensors, json.loads(json.dumps(structure)))
    assert back["policy"]["net.0.weight"] is weight
    assert back["optimizer"]["state"].keys() == {0, 1}
    assert back["optimizer"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def test_equal_names_do_not_collide():
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    tensors, structure = checkpoint.flatten(state)
    back = checkpoint.unflatten(tensors, structure)
    assert len(tensors) == 2 and back["a.b"] == 1 and back["a"]["b"] == 2


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox])
def test_a_numpy_generator_continues(tmp_path, kind):
    rng = np.random.Generator(kind(7))
    rng.integers(5, size=3, dtype=np.uint32)  # leaves half a word behind, where the kind has one
    tensors, structure = checkpoint.flatten({"rng": rng.bit_generator.state})
    checkpoint.save(tmp_path / "c", tensors, structure)
    want = rng.random(10)
    fresh = np.random.Generator(kind(0))
    fresh.bit_generator.state = checkpoint.unflatten(*checkpoint.load(tmp_path / "c"))["rng"]
    assert np.array_equal(fresh.random(10), want)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "uint32", "uint64", "int64", "float32", ">f8", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_numpy_arrays_survive(tmp_path, dtype, shape):
    array = np.ones(shape, dtype)
    checkpoint.save(tmp_path / "c", *checkpoint.flatten([array, array.T]))
    for got in checkpoint.unflatten(*checkpoint.load(tmp_path / "c")):
        assert got.dtype == array.dtype.newbyteorder("=") and np.array_equal(got.reshape(shape), array)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["$tensor", "$dict", "a.b"])
states = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(states)
@settings(max_examples=200, deadline=None)
def test_flatten_round_trip(state):
    tensors, structure = checkpoint.flatten(state)
    text = json.dumps(structure, allow_nan=False)
    back = checkpoint.unflatten(tensors, json.loads(text))
    assert back == state and repr(back) == repr(state)  # repr: 1 is not 1.0, (1,) is not [1]


def test_nan_in_the_structure():
    _, structure = checkpoint.flatten({"best": float("-inf"), "mean": np.float64("nan")})
    assert json.dumps(structure, allow_nan=False)
    back = checkpoint.unflatten({}, structure)
    assert back["best"] == float("-inf") and back["mean"] != back["mean"]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", np.array([None])])
def test_what_cannot_be_kept_is_named(value):
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is a"):
        checkpoint.flatten({"a": [value]})


def test_a_missing_tensor_is_an_error():
    tensors, structure = checkpoint.flatten({"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        checkpoint.unflatten({}, structure)
    assert tensors
