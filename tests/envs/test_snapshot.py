"""Saved environments continue bit for bit, or say that they cannot."""

import json
import random
import subprocess
import sys
from collections import deque
from enum import Enum
from functools import partial, wraps

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from safetensors.torch import load_file, save_file

from sharpwave import envs
from sharpwave.envs import _snapshot
from sharpwave.envs.gymnasium import GymnasiumVector
from tests.envs.toys import DictWalk, Opaque, Walk


def through_files(state: dict, folder) -> dict:
    """What a checkpoint makes of a state: tensors through safetensors, the rest through JSON."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, folder / "env.safetensors")
    (folder / "env.json").write_text(json.dumps({k: v for k, v in state.items() if k not in tensors}))
    return {**load_file(folder / "env.safetensors"), **json.loads((folder / "env.json").read_text())}


def actions_for(env, steps: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(env.action, envs.Continuous):
        return torch.randn(steps, *env._action_shape, generator=generator) * 3
    return torch.randint(0, env.action.nvec[0], (steps, *env._action_shape), generator=generator)


def run(env, steps: int, seed: int) -> list[list]:
    """Everything that so many steps return, as lists, exact."""
    found = [env.step(action) for action in actions_for(env, steps, seed)]
    return [[None if x is None else x.tolist() for x in step] for step in found]


def holding(box):
    return lambda: box.append(1)


def marked(**attributes):
    def function():
        return function.n

    vars(function).update(attributes)
    return function


def counting(deep=False):
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    def outer():
        def inner():
            nonlocal n
            n += 1

        inner()

    return outer if deep else count


def itself():
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    return fibonacci


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


class Colour(Enum):
    RED = 1
    BLUE = 2


class Everything(Walk):
    """State of each kind that can be kept, all of it in the observation."""

    def __init__(self):
        super().__init__(longest=9)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(4)
        self.children = np.random.default_rng(5)
        self.bits = np.random.PCG64(np.random.SeedSequence(6))  # four generators on one, each of which moves all
        self.streams = [
            np.random.Generator(self.bits),
            np.random.Generator(self.bits),
            np.random.RandomState(self.bits),
        ]
        self.streams.append(np.random.Generator(np.random.SFC64(self.bits.seed_seq)))
        self.shared = self.alias = np.zeros(2)
        self.history = deque(maxlen=3)
        self.table = {(0, 1): [1.5], "x": {"y": float("-inf")}, 3: None}
        self.rows = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        self.colour = Colour.RED
        self.count = np.int16(0)
        self.empty = np.zeros((0, 2))
        self.big = 2**100
        self.table["self"] = self.table
        self.text = np.array(["a", "bc"])
        self.raw, self.complex = b"\x00\xff", 1 - 2j

    def observe(self, action):
        self.shared += self.legacy.rand()
        assert self.alias is self.shared and self.table["self"] is self.table
        assert self.rows.flags.f_contiguous and self.empty.shape == (0, 2) and self.big == 2**100
        assert (self.text == ["a", "bc"]).all() and self.raw == b"\x00\xff" and self.complex == 1 - 2j
        self.history.append(self.python.random())
        self.count += 1
        self.table[0, 1][0] += float(self.count)
        self.rows[0] += self.children.spawn(1)[0].random(3)
        self.colour = Colour.BLUE if self.python.random() < 0.5 else Colour.RED
        drawn = sum(stream.normal() for stream in (*self.streams, *self.streams[0].spawn(1), *self.streams[3].spawn(1)))
        seen = (
            drawn + self.alias[0] + sum(self.history) + self.table[0, 1][0] + self.rows.sum() + 10 * self.colour.value
        )
        return np.array([seen, self.t, action], dtype=np.float32)


def vector_of(build, wrap=lambda vector: vector):
    return lambda: GymnasiumVector(wrap(SyncVectorEnv([build] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)))


def made(name: str, **options):
    return partial(envs.make, name, 3, **options)


EXACT = {
    "cartpole": made("CartPole-v1"),
    "cartpole-short": made("CartPole-v1", max_episode_steps=11),
    "cartpole-sync": made("CartPole-v1", vectorization_mode="sync"),
    "acrobot": made("Acrobot-v1", max_episode_steps=40),
    "pendulum": made("Pendulum-v1", max_episode_steps=40),
    "mountain-car": made("MountainCar-v0", max_episode_steps=40),
    "mountain-car-continuous": made("MountainCarContinuous-v0", max_episode_steps=40),
    "frozen-lake": made("FrozenLake-v1"),
    "walk": vector_of(Walk),
    "everything": vector_of(Everything),
    "dictionary": vector_of(DictWalk),
    "statistics": vector_of(lambda: gymnasium.wrappers.RecordEpisodeStatistics(Walk())),
    "normalised": vector_of(
        lambda: gymnasium.wrappers.NormalizeReward(gymnasium.wrappers.NormalizeObservation(Walk()))
    ),
    "vector-normalised": vector_of(Walk, gymnasium.wrappers.vector.NormalizeObservation),
}


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
class TestExact:
    def test_continues_bit_for_bit_in_a_fresh_object(self, build, tmp_path):
        env = build()
        env.reset(0)
        run(env, 95, seed=1)
        last = env.step(actions_for(env, 1, seed=2)[0])
        assert env.inexact_because is None
        state = through_files(env.state_dict(), tmp_path)
        again = build()
        loaded = again.load_state_dict(state)
        assert loaded.continued and torch.equal(loaded.obs, last.obs)
        assert run(again, 120, seed=3) == run(env, 120, seed=3)
        assert through_files(again.state_dict(), tmp_path)["count"] == 216

    def test_a_used_object_goes_back(self, build):
        env = build()
        env.reset(0)
        run(env, 30, seed=1)
        state = env.state_dict()
        want = run(env, 60, seed=2)
        env.load_state_dict(state)
        assert run(env, 60, seed=2) == want
        env.load_state_dict(state)
        assert run(env, 60, seed=2) == want, "loading twice: nothing in the state was changed by use"


def test_a_fresh_process_continues(tmp_path):
    env = envs.make("CartPole-v1", 3, vectorization_mode="sync")
    env.reset(0)
    run(env, 50, seed=1)
    through_files(env.state_dict(), tmp_path)
    program = """
import json, sys
from safetensors.torch import load_file
from sharpwave import envs
from tests.envs.test_snapshot import run
env = envs.make("CartPole-v1", 3, vectorization_mode="sync")
state = {**load_file(sys.argv[1] + "/env.safetensors"), **json.load(open(sys.argv[1] + "/env.json"))}
assert env.load_state_dict(state).continued
print(json.dumps(run(env, 100, seed=2)))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == run(env, 100, seed=2)


class TestInexact:
    @pytest.mark.parametrize(
        "attribute, value, why",
        [
            ("handle", object(), "a builtins.object"),
            ("seen", {1, 2}, "a builtins.set"),
            ("sample", np.random.default_rng(0).random, "a numpy.random"),
            ("ask", partial(print, 1), "a functools.partial"),
            ("closure", holding([]), "a builtins.list"),
            ("default", lambda x=[]: x.append(1), "a builtins.list"),
            ("objects", np.array([object()]), "an array of dtype object"),
            ("module", json, "a builtins.module"),
            ("attribute", marked(n=1), "a function with an attribute, n"),
            ("counter", counting(), "a function that changes its n"),
            ("nested", counting(deep=True), "a function that changes its n"),
            ("deep", nested(2000), "nested too deeply"),
            ("sparse", np.arange(6.0).reshape(2, 3)[:, ::2], "a view with gaps"),
        ],
        ids=lambda x: x if isinstance(x, str) and " " not in x else "",
    )
    def test_what_cannot_be_kept_is_named(self, attribute, value, why):
        env = vector_of(Walk)()
        env.reset(0)
        assert env.exact_resume
        setattr(env.vector.envs[1], attribute, value)
        assert not env.exact_resume
        assert attribute == "deep" or f"SyncVectorEnv.envs[1].{attribute}" in env.inexact_because
        assert why in env.inexact_because

    def test_functions_that_hold_nothing_are_no_state(self):
        env = vector_of(Walk)()
        env.reset(0)
        wrapped = wraps(vector_of)(lambda x, y=2: x + y)
        for name, value in {"f": np.sin, "g": wrapped, "h": len, "k": int, "d": np.dtype("f4"), "r": itself()}.items():
            setattr(env.vector.envs[1], name, value)
        assert env.inexact_because is None

    def test_arrays_that_share_memory(self):
        env = vector_of(Walk)()
        env.reset(0)
        inner = env.vector.envs[0]
        inner.whole = np.zeros(4)
        inner.part = inner.whole[:2]
        assert "envs[0].part shares its memory with SyncVectorEnv.envs[0].whole" in env.inexact_because

    def test_state_held_in_slots(self):
        class Slotted(gymnasium.Wrapper):
            __slots__ = ("hidden",)

        env = vector_of(lambda: Slotted(Walk()))()
        env.reset(0)
        assert env.exact_resume
        env.vector.envs[2].hidden = 1
        assert "envs[2].hidden is held in a slot" in env.inexact_because

    @pytest.mark.parametrize("build", [vector_of(Opaque), lambda: GymnasiumVector(AsyncVectorEnv([Walk] * 3))])
    def test_loading_begins_new_episodes_that_differ(self, build, tmp_path):
        with build() as env, build() as again, build() as third:
            first = env.reset(0).obs
            run(env, 10, seed=1)
            state = through_files(env.state_dict(), tmp_path)
            a, b = again.load_state_dict(state), third.load_state_dict(state)
            assert not a.continued
            assert torch.equal(a.obs, b.obs), "the same state, the same new episodes"
            assert not torch.equal(a.obs, first), "and not the first ones once more"
            run(env, 10, seed=1)
            assert not torch.equal(again.load_state_dict(env.state_dict()).obs, a.obs), "later, others"
            run(again, 10, seed=1)
            assert not torch.equal(env.load_state_dict(again.state_dict()).obs, a.obs)


class TestMismatch:
    def test_other_wrappers_begin_new_episodes(self):
        env, other = vector_of(Walk)(), vector_of(DictWalk)()
        for e in (env, other):
            e.reset(0)
        state = {**other.state_dict(), "name": env.name}
        assert not env.load_state_dict(state).continued
        run(env, 20, seed=0)

    @pytest.mark.parametrize("key, value", [("gymnasium", "0.1"), ("autoreset_mode", "SameStep")])
    def test_another_gymnasium_or_mode_begins_new_episodes(self, key, value):
        env = vector_of(Walk)()
        env.reset(0)
        assert not env.load_state_dict({**env.state_dict(), key: value}).continued

    def test_a_failed_restore_changes_nothing(self):
        env = vector_of(Walk)()
        env.reset(0)
        tree, arrays = _snapshot.take(env.vector)
        before = json.dumps(_snapshot.take(env.vector)[0])
        spoiled = json.loads(json.dumps(tree).replace("toys.Walk", "toys.Other"))
        with pytest.raises(_snapshot.MismatchError, match=r"envs\[0\].*toys\.Other.*toys\.Walk"):
            _snapshot.restore(env.vector, spoiled, arrays)
        assert json.dumps(_snapshot.take(env.vector)[0]) == before

    @pytest.mark.parametrize(
        "node, why",
        [
            (["enum", "os", "system", "x"], "not an enumeration"),
            (["bits", 0, "Generator", 1, None], "unknown random generator"),
            (["scalar", "|O", "00"], "not plain data"),
            (["_init__", "x"], "unknown kind"),
            (["require", "x"], "unknown kind"),
            (["constant", "os.system"], "here is"),
        ],
        ids=str,
    )
    def test_files_cannot_ask_for_more_than_data(self, node, why):
        with pytest.raises(_snapshot.MismatchError, match=why):
            _snapshot.restore(Walk(), node, torch.zeros(1, dtype=torch.uint8))
