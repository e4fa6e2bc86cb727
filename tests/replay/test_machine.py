"""Random operations on the buffers, against the plain Python model.

SHARPWAVE_FUZZ_SECONDS=600 runs each machine anew, with other seeds, until the time is spent (`make fuzz`).
"""

import os
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sharpwave.replay import PrioritizedReplay, SequenceReplay
from sharpwave.replay.nest import flatten
from tests.replay.model import Flat, Stream

SECONDS = float(os.environ.get("SHARPWAVE_FUZZ_SECONDS", "0"))
PROFILE = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    derandomize=SECONDS == 0,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
td_errors = st.one_of(
    st.floats(-100, 100, width=32), st.sampled_from([0.0, 1e-30, 1e9, float("nan"), float("inf"), float("-inf")])
)
backends = st.sampled_from(["cpu", "reference"])


class Machine(RuleBasedStateMachine):
    """What both layouts share: a buffer, and batches kept to be given back later."""

    buffer: PrioritizedReplay | SequenceReplay
    kept: list

    def expected_leaves(self) -> np.ndarray:
        raise NotImplementedError

    @invariant()
    def sums_and_leaves(self):
        if not hasattr(self, "buffer"):
            return
        leaves = self.buffer.state.tree.leaves.double().numpy()
        np.testing.assert_allclose(leaves, self.expected_leaves(), rtol=2e-6)
        assert len(self.buffer) == (leaves > 0).sum()
        assert abs(float(self.buffer.total_priority) - leaves.sum()) <= 1e-9 * max(leaves.sum(), 1)

    def check_draw(self, batch, n):
        leaves = self.expected_leaves()
        i = batch.indices.numpy()
        assert i.shape == (n,)
        assert (leaves[i] > 0).all(), "an item was drawn that cannot be"
        p = leaves[i] / leaves.sum()
        np.testing.assert_allclose(batch.probabilities.numpy(), p, rtol=1e-5)
        weights = ((leaves > 0).sum() * p) ** -0.4
        np.testing.assert_allclose(batch.weights.numpy(), weights / weights.max(), rtol=1e-4)

    @precondition(lambda self: getattr(self, "buffer", None) is not None and self.buffer.storage is not None)
    @rule()
    def reload(self):
        """A copy through state_dict draws the same, and goes on in the buffer's place."""
        options = self.buffer._options | {"backend": self.backend}
        other = type(self.buffer)(**options)
        other.load_state_dict(self.buffer.state_dict())
        if len(self.buffer):
            twin = type(self.buffer)(**options)
            twin.load_state_dict(self.buffer.state_dict())
            a, b = flatten(other.sample(7)), flatten(twin.sample(7))
            for key in a:
                assert torch.equal(a[key], b[key]), key
        again = type(self.buffer)(**options)
        again.load_state_dict(self.buffer.state_dict())
        self.buffer = again


class FlatMachine(Machine):
    @initialize(capacity=st.integers(1, 70), alpha=st.sampled_from([0.0, 0.5, 1.0]), backend=backends)
    def start(self, capacity, alpha, backend):
        self.backend = backend
        self.buffer = PrioritizedReplay(capacity, alpha=alpha, p_max=1e5, backend=backend)
        self.model = Flat(capacity, alpha, 1e-6, 1e5)
        self.kept = []
        self.next = 0

    def expected_leaves(self):
        return self.model.leaves()

    @rule(n=st.integers(1, 90))
    def add(self, n):
        values = torch.arange(self.next, self.next + n)
        self.next += n
        slots = self.buffer.add(obs={"x": values[:, None].float(), "y": values}, flag=values % 2 == 0)
        self.model.add(values.tolist())
        held = [self.model.items[s][1] for s in slots.tolist()]
        assert held == values.tolist()[-self.model.capacity :]

    @precondition(lambda self: getattr(self, "model", None) and self.model.items)
    @rule(n=st.integers(1, 40))
    def sample(self, n):
        batch = self.buffer.sample(n)
        self.check_draw(batch, n)
        for i, y, x, flag, generation in zip(
            batch.indices.tolist(),
            batch.obs.y.tolist(),
            batch.obs.x[:, 0].tolist(),
            batch.flag.tolist(),
            batch.generations.tolist(),
            strict=True,
        ):
            number, value, _ = self.model.items[i]
            assert (generation, y, x, flag) == (number, value, float(value), value % 2 == 0)
        self.kept.append((batch.indices.clone(), batch.generations.clone()))

    @precondition(lambda self: getattr(self, "kept", None))
    @rule(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
    def update(self, data, dtype):
        indices, generations = data.draw(st.sampled_from(self.kept))
        td = data.draw(st.lists(td_errors, min_size=len(indices), max_size=len(indices)))
        self.buffer.update_priorities(indices, torch.tensor(td, dtype=dtype), generations)
        self.model.update(indices.tolist(), np.float32(td).astype(float).tolist(), generations.tolist())
        stats = self.buffer.stats()
        assert (stats["stale"], stats["bad_td_errors"]) == (self.model.stale, self.model.bad)

    @rule()
    def clear(self):
        if getattr(self, "buffer", None) is not None:
            self.buffer.clear()
            self.model.clear()


class StreamMachine(Machine):
    sequences = False

    @initialize(
        envs=st.integers(1, 3),
        span=st.integers(1, 4),
        frames=st.integers(1, 3),
        extra=st.integers(0, 12),
        backend=backends,
        period=st.integers(1, 3),
        pad=st.booleans(),
    )
    def start(self, envs, span, frames, extra, backend, period, pad):
        self.backend = backend
        if self.sequences:
            ring = span + 3 + extra
            frames = 1
            self.buffer = SequenceReplay(
                ring * envs, num_envs=envs, length=span, period=period, pad=pad, alpha=1.0, p_max=1e5, backend=backend
            )
        else:
            ring, period, pad = span + frames + 2 + extra, 1, True
            self.buffer = PrioritizedReplay(
                ring * envs,
                num_envs=envs,
                n_step=span,
                frame_stack=frames,
                gamma=0.5,
                alpha=1.0,
                p_max=1e5,
                backend=backend,
            )
        self.model = Stream(envs, ring, span, pad, period, frames, 0.5)
        self.leaf = {}
        self.kept = []

    def obs(self, e, place):
        return [1000 * e + place[0], place[1]]

    def expected_leaves(self):
        drawable = self.model.drawable()
        leaves = np.zeros(self.model.envs * self.model.ring)
        real = self.buffer.state.tree.leaves.numpy()
        for slot, w in drawable.items():
            # An episode's beginnings need fewer frames than a full stack; the buffer gives up those at the write head.
            e, position = divmod(slot, self.model.ring)
            ahead = (position - self.model.history[e][-1]["position"]) % self.model.ring
            if real[slot] == 0 and 2 <= ahead <= self.model.frames:
                continue
            leaves[slot] = self.leaf.get(w["number"], 1.0)
        return leaves

    @rule(data=st.data())
    def add(self, data):
        m = self.model
        kinds = data.draw(st.lists(st.sampled_from("....tuB-"), min_size=m.envs, max_size=m.envs))
        valid = [k != "-" for k in kinds]
        terminated, truncated = [k in "tB" for k in kinds], [k in "uB" for k in kinds]
        reward = data.draw(st.lists(st.integers(-4, 4), min_size=m.envs, max_size=m.envs))
        place = [(m.episode[e], m.step[e]) for e in range(m.envs)]
        following = [(p[0], p[1] + 1) for p in place]
        slots = self.buffer.add(
            obs=torch.tensor([self.obs(e, p) for e, p in enumerate(place)]),
            next_obs=torch.tensor([self.obs(e, p) for e, p in enumerate(following)]),
            action=torch.tensor([m.written + e for e in range(m.envs)]),
            reward=torch.tensor(reward).float(),
            terminated=torch.tensor(terminated),
            truncated=torch.tensor(truncated),
            valid=None if all(valid) else torch.tensor(valid),
        )
        before = self.model.drawable()
        m.add(reward, terminated, truncated, valid)
        assert slots.tolist() == [e * m.ring + m.history[e][-1]["position"] if valid[e] else -1 for e in range(m.envs)]
        largest = float(self.buffer.max_priority)
        known = {w["number"] for w in before.values()}
        for w in m.drawable().values():
            if w["number"] not in known:
                self.leaf[w["number"]] = largest

    @precondition(lambda self: getattr(self, "buffer", None) is not None and len(self.buffer))
    @rule(n=st.integers(1, 20))
    def sample(self, n):
        m = self.model
        batch = self.buffer.sample(n)
        self.check_draw(batch, n)
        for k, slot in enumerate(batch.indices.tolist()):
            e = slot // m.ring
            w = m.window(e, slot % m.ring)
            assert w is not None
            assert batch.generations[k] == w["number"]
            following = [self.obs(e, p) for p in w["next_obs"]]
            if self.sequences:
                steps = w["steps"]
                pad = m.span - len(steps)
                numbers = [s["number"] for s in steps]
                assert batch.action[k].tolist() == numbers + [0] * pad
                assert batch.mask[k].tolist() == [True] * len(steps) + [False] * pad
                places = [self.obs(e, (s["episode"], s["step"])) for s in steps]
                assert batch.obs[k].tolist() == places + [[0, 0]] * pad
                assert batch.next_obs[k].tolist() == following[0]
                assert batch.reward[k].tolist() == [s["reward"] for s in steps] + [0] * pad
                continue
            obs = [self.obs(e, p) for p in w["obs"]]
            assert batch.obs[k].tolist() == (obs if m.frames > 1 else obs[0])
            assert batch.next_obs[k].tolist() == (following if m.frames > 1 else following[0])
            assert batch.action[k] == w["number"]
            assert float(batch.reward[k]) == w["return"]
            assert float(batch.discount[k]) == w["discount"]
            assert bool(batch.terminated[k]) == w["terminated"]
            assert bool(batch.truncated[k]) == w["truncated"]
        self.kept.append((batch.indices.clone(), batch.generations.clone()))

    @precondition(lambda self: getattr(self, "kept", None))
    @rule(data=st.data(), named=st.booleans())
    def update(self, data, named):
        indices, generations = data.draw(st.sampled_from(self.kept))
        real = self.buffer.state.tree.leaves.clone()
        td = data.draw(st.lists(st.floats(-50, 50, width=32), min_size=len(indices), max_size=len(indices)))
        self.buffer.update_priorities(indices, torch.tensor(td), generations if named else None)
        drawable = self.model.drawable()
        for i, number, error in zip(indices.tolist(), generations.tolist(), td, strict=True):
            if real[i] > 0 and (not named or drawable[i]["number"] == number):
                self.leaf[drawable[i]["number"]] = float(np.float32(abs(error)) + np.float32(1e-6))


class SequenceMachine(StreamMachine):
    sequences = True


MACHINES = pytest.mark.parametrize("machine", [FlatMachine, StreamMachine, SequenceMachine])


@MACHINES
def test_random_operations_agree_with_the_model(machine):
    run_state_machine_as_test(machine, settings=PROFILE)


@pytest.mark.skipif(SECONDS == 0, reason="set SHARPWAVE_FUZZ_SECONDS to run for that long")
@pytest.mark.timeout(0)
@MACHINES
def test_random_operations_for_long(machine):
    end, runs = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        run_state_machine_as_test(machine, settings=settings(PROFILE, max_examples=50, stateful_step_count=60))
        runs += 1
    print(f"{machine.__name__}: {runs} x 50 runs of 60 operations, nothing found")
