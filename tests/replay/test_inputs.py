"""Bad input: one clear error that names the field, and the buffer is as it was. And the kinds of storage."""

import copy
import json
import os
import shutil

import numpy as np
import pytest
import torch

from sharpwave.replay import PrioritizedReplay, SequenceReplay, SumTree
from sharpwave.replay.nest import flatten
from sharpwave.run.errors import CheckpointError


def data(n=4, **changes):
    fields = dict(
        obs={"image": torch.arange(n)[:, None].repeat(1, 3).to(torch.uint8), "speed": torch.arange(n).double()},
        action=torch.arange(n, dtype=torch.int32),
        reward=np.arange(n, dtype=np.float64),
        terminated=torch.zeros(n, dtype=torch.bool),
    )
    return fields | changes


def filled(**options):
    buffer = PrioritizedReplay(10, **options)
    buffer.add(data())
    return buffer


def snapshot(buffer):
    state = buffer.state_dict()
    return [t.clone() for t in (*state["tensors"].values(), *state["fields"].values())]


@pytest.mark.parametrize(
    "changes, error, says",
    [
        (dict(extra=torch.zeros(4)), KeyError, "extra"),
        (dict(action=torch.zeros(4, 1, dtype=torch.int32)), ValueError, "action.*batch"),
        (dict(action=torch.zeros(3, dtype=torch.int32)), ValueError, "action.*4 items"),
        (dict(action=torch.zeros(4)), TypeError, "action.*int32.*float32"),
        (dict(reward=torch.zeros(4, 1)), ValueError, "reward"),
        (dict(obs={"image": torch.zeros(4, 3)}), KeyError, "obs.speed"),
        (dict(obs=torch.zeros(4, 3)), KeyError, "obs"),
        (dict(action=["a", "b", "c", "d"]), TypeError, "action.*numbers"),
        (dict(terminated=[0, 1, 2, 1]), ValueError, "terminated.*0 and 1"),
        ({"obs.speed": torch.arange(4).double()}, ValueError, "'obs.speed' is given twice"),
        (dict(action=torch.tensor(3, dtype=torch.int32)), ValueError, "action"),
        (dict(action=torch.empty(4, dtype=torch.int32, device="meta")), ValueError, "action.*meta"),
        (dict(action=torch.ones(4, dtype=torch.int32).to_sparse()), ValueError, "action.*sparse"),
    ],
)
def test_add_refuses_and_changes_nothing(changes, error, says):
    buffer = filled()
    before = snapshot(buffer)
    with pytest.raises(error, match=says):
        buffer.add(data(**changes))
    missing = data()
    del missing["terminated"]
    with pytest.raises(KeyError, match="terminated"):
        buffer.add(missing)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(buffer), strict=True))


@pytest.mark.parametrize(
    "fields, error, says",
    [
        ({}, ValueError, "at least one field"),
        ({"weights": torch.zeros(2)}, ValueError, "weights"),
        ({"items": torch.zeros(2)}, ValueError, "items"),
        ({"a b": torch.zeros(2)}, ValueError, "a b"),
        ({"x": torch.tensor(1.0)}, ValueError, "batch dimension"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, ValueError, "'y'.*2 items"),
        ({"x": torch.zeros(2, device="meta")}, ValueError, "'x'.*meta"),
        ({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}, ValueError, "'a.b' is given twice"),
        ({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, ValueError, "'a.b' is given twice"),
        ({"a.b.c": torch.ones(2), "a": torch.zeros(2)}, ValueError, "'a.b.c' lies within 'a'"),
        ({3: torch.zeros(2)}, TypeError, "str"),
        ({"terminated": torch.zeros(2, 1, dtype=torch.bool)}, ValueError, "terminated.*one number"),
    ],
)
def test_the_first_batch_decides_the_fields(fields, error, says):
    buffer = PrioritizedReplay(10)
    with pytest.raises(error, match=says):
        buffer.add(fields)
    assert len(buffer) == 0 and buffer.storage is None
    with pytest.raises(ValueError, match="'x' is given twice"):
        buffer.add({"x": torch.zeros(2)}, x=torch.ones(2))
    buffer.add(x=torch.zeros(2))
    assert len(buffer) == 2


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(capacity=0), "capacity"),
        (dict(capacity=2.5), "capacity"),
        (dict(alpha=-0.1), "alpha"),
        (dict(alpha=3.0), "alpha"),
        (dict(alpha=1000), "alpha"),
        (dict(eps=1e-46, alpha=0.1), "eps"),
        (dict(p_max=1e39, alpha=0.0), "p_max"),
        (dict(beta=-1.0), "beta"),
        (dict(beta=(0.4, float("nan"), 5)), "beta"),
        (dict(beta=(0.4, 1.0)), "beta must be a number"),
        (dict(beta="high"), "beta must be a number"),
        (dict(eps=0.0), "eps"),
        (dict(gamma=1.5), "gamma"),
        (dict(n_step=3), "num_envs"),
        (dict(frame_stack=4), "num_envs"),
        (dict(num_envs=0), "num_envs"),
        (dict(num_envs=3, n_step=5), "capacity must be at least"),
        (dict(weight_norm="max"), "weight_norm"),
        (dict(max_priority_over="ever"), "max_priority_over"),
        (dict(storage="/tmp/somewhere"), "pathlib.Path"),
        (dict(storage="pinned", fields={"x": ((), torch.float32)}), "GPU"),
        (dict(fields={"x": torch.float32}), "fields"),
        (dict(fields={"reward": ((), torch.float64)}), "reward"),
        (dict(backend="numba"), "backend"),
    ],
)
def test_arguments(options, says):
    if torch.cuda.is_available() and options.get("storage") == "pinned":
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, TypeError), match=says):
        PrioritizedReplay(**{"capacity": 10, **options})


def test_sequence_arguments():
    for options, says in [
        (dict(length=0), "length"),
        (dict(length=3, burn_in=-1), "burn_in"),
        (dict(length=3, eta=2.0), "eta"),
        (dict(length=30), "capacity must be at least"),
        (dict(length=3, period=0), "period"),
    ]:
        with pytest.raises(ValueError, match=says):
            SequenceReplay(20, num_envs=1, **options)
    buffer = SequenceReplay(20, num_envs=1, length=3)
    with pytest.raises(KeyError, match="next_obs"):
        buffer.add(obs=torch.zeros(1), reward=torch.zeros(1), terminated=[False], truncated=[False])
    with pytest.raises(ValueError, match=r"\(n, 3\)"):
        buffer.update_priorities(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4))


def test_sampling():
    buffer = PrioritizedReplay(10)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(4)
    buffer.add(data())
    for n in (0, -1, 2.0):
        with pytest.raises(ValueError, match="n must be"):
            buffer.sample(n)
    batch = buffer.sample(4)
    for out in (filled().sample(4), buffer.sample(5), {}):
        with pytest.raises(ValueError, match="out"):
            buffer.sample(4, out=out)
    assert buffer.sample(4, out=batch) is batch
    batch.obs.speed = batch.obs.speed.float()
    with pytest.raises(ValueError, match=r"out\.obs\.speed is not the tensor"):
        buffer.sample(4, out=batch)
    with pytest.raises(AttributeError, match=r"it has .*action"):
        _ = batch.actions
    buffer.clear()
    with pytest.raises(ValueError, match="nothing to draw"):
        buffer.sample(4)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((torch.tensor([1]), torch.tensor([1.0, 2.0])), ValueError, "both be"),
        ((torch.tensor([[1]]), torch.tensor([[1.0]])), ValueError, "both be"),
        ((torch.tensor([1.0]), torch.tensor([1.0])), TypeError, "int64"),
        ((torch.tensor([1]), torch.tensor([1])), TypeError, "floating"),
        ((torch.tensor([1]), torch.tensor([1.0]), torch.tensor([1, 2])), ValueError, "generation"),
        ((torch.tensor([1]), torch.tensor([1.0], device="meta")), ValueError, "device"),
    ],
)
def test_updates(arguments, error, says):
    buffer = filled()
    with pytest.raises(error, match=says):
        buffer.update_priorities(*arguments)


@pytest.mark.parametrize("index", [-1, 10, 500])
def test_priorities_of_what_is_not_there(index):
    with pytest.raises(IndexError, match=rf"\[0, 10\); got {index}"):
        filled().priorities(torch.tensor([index]))


def test_a_batch_larger_than_the_buffer_keeps_the_last():
    buffer = PrioritizedReplay(10)
    slots = buffer.extend(data(25))
    assert len(buffer) == 10 and buffer.storage.tensors["action"][slots].tolist() == list(range(15, 25))


def test_every_dtype_comes_back_as_it_went():
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    dtypes += [torch.complex64, torch.uint16, torch.bool]
    for backend in ("cpu", "reference"):
        buffer = PrioritizedReplay(8, backend=backend)
        sent = {f"f{k}": torch.arange(24).view(8, 3).to(d) for k, d in enumerate(dtypes)}
        buffer.add(sent)
        batch = buffer.sample(20)
        for key, x in sent.items():
            assert batch[key].dtype == x.dtype
            assert torch.equal(batch[key], x[batch.indices]), key


def test_steps_are_refused_and_nothing_changes():
    ends = torch.zeros(2, dtype=torch.bool)
    good = dict(obs=torch.zeros(2, 3), next_obs=torch.ones(2, 3), reward=torch.ones(2), terminated=ends, truncated=ends)
    buffer = PrioritizedReplay(20, num_envs=2)
    for _ in range(2):  # before and after the fields are known
        before = snapshot(buffer)
        for changes, error, says in [
            (dict(next_obs=torch.ones(2, 4)), ValueError, "'next_obs'.*3"),
            (dict(next_obs=torch.ones(2, 3).double()), TypeError, "'next_obs'"),
            (dict(next_obs={"a": torch.ones(2, 3)}), KeyError, "next_obs"),
            (dict(obs=torch.zeros(3, 3)), ValueError, "'obs'.*num_envs = 2"),
            (dict(terminated=torch.tensor([0.3, 2.0])), ValueError, "'terminated'.*0 and 1"),
            (dict(reward=torch.ones(2, 2, 2)), ValueError, "reward"),
        ]:
            with pytest.raises(error, match=says):
                buffer.add(good | changes)
        without = {k: x for k, x in good.items() if k != "truncated"}
        with pytest.raises(KeyError, match="truncated"):
            buffer.add(without)
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(buffer), strict=True))
        buffer.add(good)


def test_several_steps_at_once_are_the_steps_one_by_one():
    steps = dict(
        obs=torch.arange(12).view(6, 2),
        next_obs=torch.arange(12).view(6, 2) + 2,
        reward=torch.ones(6, 2),
        terminated=torch.zeros(6, 2, dtype=torch.bool),
        truncated=torch.zeros(6, 2, dtype=torch.bool),
    )
    one, many = PrioritizedReplay(20, num_envs=2), PrioritizedReplay(20, num_envs=2)
    slots = many.add(steps)
    assert torch.equal(slots, torch.stack([one.add({k: x[t] for k, x in steps.items()}) for t in range(6)]))
    assert all(torch.equal(a, b) for a, b in zip(snapshot(one), snapshot(many), strict=True))


# Files


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    buffer = filled()
    buffer.save(tmp_path / "good")
    with pytest.raises(CheckpointError, match="exists"):
        buffer.save(tmp_path / "good")
    with pytest.raises(CheckpointError, match=r"load it with PrioritizedReplay\.load"):
        SequenceReplay.load(tmp_path / "good")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        PrioritizedReplay.load(tmp_path / "nothing")

    def broken(name):
        return shutil.copytree(tmp_path / "good", tmp_path / name)

    path = broken("short")
    with open(path / "tensors.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match="100 bytes"):
        PrioritizedReplay.load(path)
    path = broken("altered")
    with open(path / "tensors.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(CheckpointError, match="hash"):
        PrioritizedReplay.load(path)
    path = broken("newer")
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(CheckpointError, match="version"):
        PrioritizedReplay.load(path)
    (path / "meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not of a sharpwave"):
        PrioritizedReplay.load(path)


def test_a_state_of_another_buffer_is_refused():
    state = filled().state_dict()
    other = PrioritizedReplay(11)
    with pytest.raises(ValueError, match="with capacity 10, not 11: make"):
        other.load_state_dict(state)
    other = PrioritizedReplay(10)
    other.add(x=torch.ones(3))
    before = snapshot(other)
    for bad, says in [
        (state, "fields"),
        ({}, "state_dict"),
        (state | {"version": 7}, "version"),
        (state | {"kind": "SequenceReplay"}, "kind"),
    ]:
        with pytest.raises(ValueError, match=says):
            other.load_state_dict(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(other), strict=True))


def test_a_state_with_impossible_values_is_refused():
    state, buffer = filled().state_dict(), filled()
    before = snapshot(buffer)

    def altered(name, at, value):
        tensor = state["tensors"][name].clone()
        tensor[at] = value
        return state | {"tensors": state["tensors"] | {name: tensor}}

    for name, at, value in [
        *(("leaves", 1, x) for x in (float("nan"), float("inf"), 1e30, -5.0)),
        *(("head", 0, x) for x in (1000, -1)),
        ("generation", 2, 99),
        ("offset", 0, 2**50),
        ("max_priority", 0, float("nan")),
        ("beta", 0, -1.0),
    ]:
        with pytest.raises(ValueError, match=f"{name!r} must be .*; got .*damaged"):
            buffer.load_state_dict(altered(name, at, value))
    for bad in (altered("leaves", 7, 1.0), altered("counters", 0, 3), altered("generation", 1, -1)):
        with pytest.raises(ValueError, match="contradict"):
            buffer.load_state_dict(bad)
    for key in ("kind", "layout", "spec", "used", "alpha"):
        with pytest.raises(ValueError, match=f"lacks .*{key}"):
            buffer.load_state_dict({k: x for k, x in state.items() if k != key})
    for key, value in (("alpha", 1000.0), ("used", 99)):
        with pytest.raises(ValueError, match=key):
            buffer.load_state_dict(state | {key: value})
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(buffer), strict=True))
    buffer.load_state_dict(state)


def test_files_in_place_of_memory(tmp_path):
    stored, memory = filled(storage=tmp_path / "files", seed=1), filled(seed=1)
    for n in (7, 3, 25):
        stored.add(data(n))
        memory.add(data(n))
    a, b = flatten(stored.sample(50)), flatten(memory.sample(50))
    assert all(torch.equal(a[k], b[k]) for k in b)
    with pytest.raises(ValueError, match="not empty"):
        filled(storage=tmp_path / "files")
    stored.save(tmp_path / "saved")
    again = PrioritizedReplay.load(tmp_path / "saved", storage=tmp_path / "others")
    a, b = flatten(stored.sample(50)), flatten(again.sample(50))
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_a_hundred_gigabytes_on_a_small_machine(tmp_path):
    """100 GB of 84x84 observations in sparse files: only what is written takes space, on the disk and in memory."""
    capacity = 100 * 10**9 // (84 * 84)
    buffer = PrioritizedReplay(capacity, num_envs=1, storage=tmp_path / "files", n_step=2)

    def step(t):
        pictures = (torch.full((1, 84, 84), x % 251, dtype=torch.uint8) for x in (t, t + 1))
        ends = torch.zeros(2, 1, dtype=torch.bool)
        flags = dict(zip(("terminated", "truncated"), ends, strict=True))
        return dict(zip(("obs", "next_obs"), pictures, strict=True), action=torch.tensor([t]), reward=[1.0], **flags)

    buffer.add(step(0))
    assert (tmp_path / "files" / "obs.bin").stat().st_size >= 99.9e9
    # Jump ahead, so that writing begins anew shortly before the ring's end and wraps.
    buffer.clear()
    buffer.state.head.fill_(capacity - 100)
    for t in range(200):
        buffer.add(step(t))
    assert len(buffer) == 199
    batch = buffer.sample(256)
    assert (batch.indices > capacity - 101).any() and (batch.indices < 100).any()
    assert torch.equal(batch.obs[:, 5, 5].long(), batch.action % 251)
    assert torch.equal(batch.next_obs[:, 83, 83].long(), (batch.action + 2) % 251)
    buffer.update_priorities(batch.indices, torch.rand(256), batch.generations)
    used = sum(f.stat().st_blocks * 512 for f in (tmp_path / "files").iterdir())
    assert used < 50e6, f"{used / 1e6:.0f} MB of the disk are used"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lazily_conjugated_and_negated_tensors_are_taken(backend):
    x = torch.complex(torch.arange(3.0), torch.arange(3.0))
    buffer = PrioritizedReplay(3, backend=backend)
    buffer.add(x=x.conj(), y=x.conj().imag)
    assert torch.equal(buffer.storage.tensors["x"], x.conj().resolve_conj())
    assert buffer.storage.tensors["y"].tolist() == [0.0, -1.0, -2.0]


def test_beta_may_be_a_list_as_json_makes_it():
    buffer = filled(beta=[0.5, 1.0, 10])
    assert buffer.beta.item() == 0.5
    with pytest.raises(ValueError, match="beta must be a number >= 0"):
        buffer.sample(2, beta=-1.0)


def test_what_cannot_be_pickled_says_what_to_do():
    with pytest.raises(TypeError, match="use save"):
        copy.deepcopy(filled())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("make", [PrioritizedReplay, SumTree])
def test_a_gpu_that_is_not_there(make):
    with pytest.raises(RuntimeError, match="sees no GPU here: use device='cpu'"):
        make(10, device="cuda")
