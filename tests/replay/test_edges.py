"""What is promised at the edges: exponents and bounds, what a state carries, copies, arrays of any kind, threads."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

from sharpwave.replay import PrioritizedReplay, SequenceReplay
from sharpwave.replay.her import relabel
from sharpwave.replay.nest import flatten
from sharpwave.run import checkpoint
from sharpwave.run.errors import CheckpointError
from tests.conftest import backends


def filled(n=4, capacity=10, **options):
    buffer = PrioritizedReplay(capacity, **options)
    buffer.add(x=torch.arange(float(n)))
    return buffer


def steps(*lead, dtype=torch.float32):
    """Steps (num_envs) or (steps, num_envs) that end no episode."""
    obs = torch.arange(torch.Size(lead).numel()).view(lead).to(dtype)
    ends = torch.zeros(lead, dtype=torch.bool)
    return dict(obs=obs, next_obs=obs, reward=torch.ones(lead), terminated=ends, truncated=ends)


def stepped(n=8, make=PrioritizedReplay, dtype=torch.float32, **options):
    buffer = make(40, num_envs=2, **options)
    for _ in range(n):
        buffer.add(steps(2, dtype=dtype))
    return buffer


# Exponents and bounds of priorities


@backends("reference", "cpu", "triton")
def test_the_beta_of_a_draw_is_given_or_refused(backend, device):
    buffer = filled(beta=0.4, alpha=1.0, backend=backend, device=device)
    buffer.update_priorities(torch.arange(4, device=device), torch.tensor([1.0, 2, 3, 4], device=device))
    weights = [buffer.sample(3, beta=b).weights for b in (0.0, torch.zeros((), device=device))]
    assert all((w == 1).all() for w in weights), "0 is a beta, not the buffer's own"
    bad = [-1.0, float("nan"), float("inf"), torch.ones(2, device=device), torch.ones((), device="meta")]
    if torch.device(device).type == "cpu":  # a GPU would have to wait
        bad += [torch.tensor(x) for x in (-1.0, float("nan"), float("inf"))]
    for beta in bad:
        with pytest.raises(ValueError, match="beta must be"):
            buffer.sample(4, beta=beta)


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("over", ["all_time", "buffer"])
def test_new_items_keep_within_the_bounds(backend, device, over):
    for bounds, first in ((dict(eps=2.0), 2.0), (dict(p_max=0.5), 0.5)):
        buffer = filled(2, alpha=1.0, backend=backend, device=device, max_priority_over=over, **bounds)
        for _ in range(2):
            assert buffer.priorities(torch.arange(2, device=device)).tolist() == [first, first]
            assert buffer.max_priority.item() == first
            buffer.clear()
            buffer.add(x=torch.zeros(2))


@backends("reference", "cpu", "triton")
def test_a_large_td_error_is_not_a_bad_one(backend, device):
    buffer = filled(3, alpha=1.0, p_max=100.0, backend=backend, device=device)
    td = torch.tensor([-1e300, 2.0, torch.inf], dtype=torch.float64, device=device)
    buffer.update_priorities(torch.arange(3, device=device), td)
    assert buffer.priorities(torch.arange(3, device=device)).tolist() == pytest.approx([100.0, 2.0, 100.0], rel=1e-5)
    assert buffer.stats()["bad_td_errors"] == 1
    windows = stepped(3, make=SequenceReplay, length=2, p_max=100.0, backend=backend, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    windows.update_priorities(first, torch.full((1, 2), 1e300, dtype=torch.float64, device=device))
    assert windows.stats()["bad_td_errors"] == 0 and windows.max_priority.item() == 100.0


def test_rewards_that_float32_cannot_hold():
    buffer = PrioritizedReplay(5)
    buffer.add(reward=np.array([1e30, np.inf]))
    with pytest.raises(ValueError, match=r"'reward' is kept as torch\.float32, which cannot hold 1e\+300"):
        buffer.add(reward=np.array([1.0, 1e300]))
    with pytest.raises(TypeError, match=r"'reward'.*real"):
        buffer.add(reward=np.array([1j]))
    assert len(buffer) == 2


def test_alpha_stays_within_the_bounds():
    buffer = filled(2, alpha=1e-7, eps=0.5, p_max=4.0)
    buffer.update_priorities(torch.arange(2), torch.tensor([0.0, 9.0]))
    buffer.alpha = 1.0  # from powers that float32 hardly tells from 1
    assert ((buffer.priorities(torch.arange(2)) >= 0.5) & (buffer.priorities(torch.arange(2)) <= 4)).all()
    buffer = filled(2, alpha=0.0, p_max=0.5)
    buffer.alpha = 1.0
    assert buffer.priorities(torch.arange(2)).tolist() == [0.5, 0.5]


def test_the_histogram_counts_every_leaf():
    buffer = filled(3, alpha=1.0, eps=2.0**-44, p_max=2.0**20)
    buffer.update_priorities(torch.arange(3), torch.tensor([0.0, 1e9, 1e-20]))
    counts, edges = buffer.stats()["histogram"]
    assert counts.sum() == 3 and counts[0] == 2 and len(edges) == len(counts) + 1


# States


def test_a_state_goes_into_an_equal_buffer_alone(tmp_path):
    plain, sequences = stepped(), stepped(make=SequenceReplay, length=2)
    before = plain.state_dict()
    changes = dict(gamma=0.5, stratified=True, weight_norm="buffer", eps=0.1, p_max=2.0, max_priority_over="buffer")
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"buffer with {name}=.*, not {value!r}: make"):
            PrioritizedReplay(40, num_envs=2, **{name: value}).load_state_dict(before)
    with pytest.raises(ValueError, match=r"eta=0\.9, not 0\.5"):
        SequenceReplay(40, num_envs=2, length=2, eta=0.5).load_state_dict(sequences.state_dict())
    old = {k: x for k, x in before.items() if k != "settings"}  # as before settings were kept
    other = PrioritizedReplay(40, num_envs=2, gamma=0.5, alpha=0.3, beta=1.0, seed=7)
    other.load_state_dict(old)
    assert other.alpha == 0.6 and torch.equal(other.sample(9).indices, plain.sample(9).indices)
    plain.save(tmp_path / "saved")
    assert PrioritizedReplay.load(tmp_path / "saved").gamma == 0.99


def test_a_damaged_state_names_what_is_wrong(tmp_path):
    buffer = stepped()
    state = buffer.state_dict()
    reward_lacks = {k: x for k, x in state["spec"].items() if k != "reward"}
    for key, value, says in [
        *((key, 3, f"'{key}' must be of type Mapping") for key in ("tensors", "fields", "spec", "layout")),
        ("alpha", "1", "'alpha' must be of type int or float"),
        ("used", True, "'used' must be of type int"),
        ("settings", 3, "'settings' must be"),
        ("spec", {"obs": 3}, "'spec' must hold"),
        ("spec", reward_lacks, "missing: .'reward'"),
    ]:
        with pytest.raises(ValueError, match=says):
            PrioritizedReplay(40, num_envs=2).load_state_dict(state | {key: value})
    buffer.save(tmp_path / "good")
    tensors, meta = checkpoint.load(tmp_path / "good")
    for k, (key, value) in enumerate(
        [*((key, None) for key in ("kind", "version", "device")), ("options", 3)]
        + [("options", meta["options"] | change) for change in ({"colour": 1}, {"capacity": 3}, {"capacity": "x"})]
    ):
        path = tmp_path / f"bad{k}"
        checkpoint.save(path, tensors, meta | {key: value})
        with pytest.raises(CheckpointError, match=f"'{key}'.*damaged"):
            PrioritizedReplay.load(path)
    with pytest.raises(ValueError, match="backend must be"):  # no damage: the caller's own
        PrioritizedReplay.load(tmp_path / "good", backend="numba")


# Batches and what goes in


def test_copies_of_a_batch_are_their_own():
    buffer = stepped()
    batch = buffer.sample(5)
    saved = {k: x.clone() for k, x in flatten(batch).items()}
    for copied in (copy.deepcopy(batch), copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert type(copied) is type(batch) and torch.equal(copied.obs, batch.obs)
        with pytest.raises(ValueError, match="out must be"):
            buffer.sample(5, out=copied)
    copy.deepcopy(batch).obs.fill_(-1)
    assert all(torch.equal(x, saved[k]) for k, x in flatten(batch).items())
    assert buffer.sample(5, out=batch) is batch


def test_printed_are_shapes_not_values():
    """A million transitions must not fill a terminal."""
    buffer = PrioritizedReplay(4)
    buffer.add(obs={"speed": torch.zeros(2, 3)}, action=torch.zeros(2, dtype=torch.int64))
    assert repr(buffer) == "PrioritizedReplay(capacity=4, device='cpu', alpha=0.6)"
    shown = repr(buffer.sample(5))
    assert shown.startswith("Batch(") and "obs=Batch(speed=float32[5, 3])" in shown and "action=int64[5]" in shown


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_arrays_of_any_strides_byte_order_and_unsigned_dtypes(backend):
    buffer = PrioritizedReplay(4, backend=backend)
    counts = np.arange(4)
    packed = np.zeros(4, [("a", "u1"), ("b", "<i4")])
    packed["b"] = counts
    sent = {"mirrored": counts[::-1], "foreign": counts.astype(">f4"), "packed": packed["b"]}
    sent |= {d: counts.astype(d) * 2 + 2 ** (8 * np.dtype(d).itemsize - 1) for d in ("uint16", "uint32", "uint64")}
    sent = {k: x.astype(x.dtype) if k.startswith("uint") else x for k, x in sent.items()}
    buffer.add(sent)
    batch = buffer.sample(20)
    for key, x in sent.items():
        assert np.array_equal(batch[key].numpy(), x[batch.indices.numpy()]), key
    windows = stepped(make=SequenceReplay, dtype=torch.uint32, length=3, pad=True, backend=backend)
    windows.add(steps(2, dtype=torch.uint32), valid=torch.tensor([True, False]))
    got = windows.sample(5)
    assert got.obs.dtype == torch.uint32 and got.terminated.dtype == torch.bool
    assert set(got.obs.flatten().tolist()) <= {0, 1}


@backends("reference", "cpu", "triton")
def test_several_steps_are_stored_whole_or_not_at_all(backend, device):
    for known in (False, True):
        buffer = PrioritizedReplay(40, num_envs=2, backend=backend, device=device)
        if known:
            buffer.add(steps(2))
        before = buffer.state_dict()["tensors"]
        for name, value in (("terminated", 0.5), ("reward", 1e300)):
            block = steps(3, 2)
            block[name] = block[name].double()
            block[name][2, 0] = value
            with pytest.raises(ValueError, match=name):
                buffer.add(block)
        with pytest.raises(ValueError, match=r"'obs' must hold 3 steps of num_envs = 2 rows; got \(4, 2\)"):
            buffer.add(steps(3, 2) | {"obs": torch.zeros(4, 2)})
        assert all(torch.equal(x, before[k]) for k, x in buffer.state_dict()["tensors"].items())
        assert buffer.add(steps(0, 2)).shape == (0, 2)
        assert buffer.add(steps(3, 2)).shape == (3, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals_say_what_to_do():
    item = ((3,), torch.float32)
    ends = {"reward": ((), torch.float32), "terminated": ((), torch.bool), "truncated": ((), torch.bool)}
    for fields, says in [
        ({"obs": item}, "missing: .*'reward'"),
        (ends | {"obs": item, "next_obs": item}, "not next_obs"),
        ({}, "fields must be"),
    ]:
        for make in (PrioritizedReplay, lambda *a, **o: SequenceReplay(*a, length=2, **o)):
            with pytest.raises(ValueError, match=says):
                make(40, num_envs=2, fields=fields)
    for name in ("_outputs", "__class__", "_x", "keys"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be an attribute"):
            PrioritizedReplay(5).add({name: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'x' must be a dense tensor.*nested"):
        PrioritizedReplay(5).add(x=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    buffer = filled(capacity=np.int64(10))
    assert buffer.sample(np.int32(3)).x.shape == (3,) and buffer.capacity == 10


def test_relabelled_rewards_are_one_a_transition():
    goal = {"achieved_goal": torch.zeros(3, 1), "desired_goal": torch.zeros(3, 1)}
    episode = dict(obs=goal, next_obs=goal, reward=torch.zeros(3))
    good = relabel(episode, lambda a, g: np.zeros(len(a)), copies=np.int64(2), success=lambda r: r == 0)
    assert good.reward.shape == (6,) and good.terminated.dtype == torch.bool
    for reward in (lambda a, g: (a - g).abs(), lambda a, g: 0.0):
        with pytest.raises(ValueError, match=r"reward must return .*\(12,\)"):
            relabel(episode, reward)
    with pytest.raises(TypeError, match="success must return bool"):
        relabel(episode, lambda a, g: (a - g)[:, 0], success=lambda r: r)


def test_threads_take_turns():
    """An item's two fields are written together, and never seen apart."""
    buffer = PrioritizedReplay(1000)
    buffer.add(x=torch.zeros(1000, 50), y=torch.zeros(1000, 50))
    done = threading.Event()

    def write():
        k = 0
        while not done.is_set():
            k += 1
            rows = torch.full((500, 50), float(k))
            buffer.add(x=rows, y=rows)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        batches = [buffer.sample(64) for _ in range(400)]
    finally:
        done.set()
        writer.join()
    assert all(torch.equal(b.x, b.y) for b in batches)
    assert sum(bool((b.x > 0).any()) for b in batches) > 10, "the writer ran"
