"""Every adapter against its library's own stepping of each environment alone, step by step across episodes' ends."""

import importlib
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.envs import Continuous
from sharpwave.envs.gymnasium import environment_seeds

N = 3

# Craftax compiles in a few minutes of a CPU this way, in many otherwise; JAX reads it when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


class Gymnasium:
    """`gymnasium.make`, reset by hand."""

    def __init__(self, name: str, seed: int, show: Callable[[Any], Any] = np.asarray, **options):
        self.envs = [gymnasium.make(name, **options) for _ in range(N)]
        self.seeds, self.show = environment_seeds(seed, N), show

    def begin(self, i):
        seed, self.seeds[i] = self.seeds[i], None
        return self.show(self.envs[i].reset(seed=seed)[0])

    def step(self, i, action):
        space = self.envs[i].action_space
        if isinstance(space, gymnasium.spaces.Box):
            action = np.clip(action, space.low, space.high)
        obs, *rest = self.envs[i].step(action)
        return self.show(obs), *rest[:3]


def minigrid_reference(name, seed):
    gymnasium.register_envs(pytest.importorskip("minigrid"))

    def show(obs):
        image = obs["image"]
        return np.concatenate([np.eye(n, dtype=np.int8)[image[..., k]] for k, n in enumerate((11, 6, 4))], axis=2)

    return Gymnasium(name, seed, show, max_steps=20)


class Atari:
    """ale-py's vector class with one game each, which begins an episode in the step after the last."""

    def __init__(self, name, seed):
        ale_py = pytest.importorskip("ale_py")
        options = dict(reward_clipping=False, repeat_action_probability=0.25, max_num_frames_per_episode=400)
        game = name.partition("/")[2].partition("-")[0].lower()
        self.games = [ale_py.AtariVectorEnv(game, 1, num_threads=1, **options) for _ in range(N)]
        self.seeds = environment_seeds(seed, N)

    def begin(self, i):
        seed, self.seeds[i] = self.seeds[i], None
        if seed is not None:
            return self.games[i].reset(seed=np.array([seed]))[0][0]
        return self.games[i].step(np.zeros(1, dtype=np.int64))[0][0]

    def step(self, i, action):
        obs, *rest = self.games[i].step(np.array([action]))
        return obs[0], *(x[0] for x in rest[:3])


class Jax:
    """The environment's own `step_env` and `reset_env`, not batched, with the keys that the vector draws.

    Compiled for one environment, XLA orders a sum otherwise than for several: the last bit may differ.
    """

    tolerance = 1e-5

    def __init__(self, name, seed):
        self.jax = jax = pytest.importorskip("jax")
        kind = name.partition("/")[2]
        if name.startswith("gymnax"):
            self.env, self.params = pytest.importorskip("gymnax").make(kind)
            self.params = self.params.replace(max_steps_in_episode=25)
        else:
            make = pytest.importorskip("craftax.craftax_env").make_craftax_env_from_name
            self.env = make(kind, auto_reset=False)
            self.params = self.env.default_params.replace(max_timesteps=12)
        self.is_gymnax = name.startswith("gymnax")
        words = np.random.SeedSequence(seed).generate_state(2)
        self.key = jax.numpy.asarray(words, dtype=jax.numpy.uint32)
        self.key, sub, self.later = jax.random.split(self.key, 3)
        self.keys = list(jax.random.split(sub, N))  # of beginnings, at first; then of steps
        self.begun = 0
        self.states = [None] * N
        self.one_step, self.one_reset = jax.jit(self.env.step_env), jax.jit(self.env.reset_env)

    def begin(self, i):
        obs, self.states[i] = self.one_reset(self.key_to_begin(i), self.params)
        return np.asarray(obs)

    def key_to_begin(self, i):
        self.begun += 1
        if self.begun <= N:
            return self.keys[i]
        if self.is_gymnax:
            return self.jax.random.split(self.later, N)[i]
        # Craftax's worlds are made one at a time here, each for the next that ends.
        self.later, sub = self.jax.random.split(self.later)
        return self.jax.random.split(sub, 1)[0]

    def step(self, i, action):
        if i == 0:
            self.key, sub, later = self.jax.random.split(self.key, 3)
            self.later = later if self.is_gymnax else self.later
            self.keys = list(self.jax.random.split(sub, N))
        obs, state, reward, done, _ = self.one_step(self.keys[i], self.states[i], action, self.params)
        self.states[i] = state
        late = bool(self.env.is_truncated(state, self.params)) if self.is_gymnax else int(state.timestep) >= 12
        if not self.is_gymnax:
            done = float(state.player_health) <= 0
        return np.asarray(obs), float(reward), bool(done), late


class EnvPool:
    """A pool of one environment each, which begins an episode in the step after the last."""

    def __init__(self, name, seed):
        envpool = pytest.importorskip("envpool")
        first = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1
        task = name.partition("/")[2]
        self.pools = [
            envpool.make(task, env_type="gymnasium", num_envs=1, seed=first + i, max_episode_steps=25) for i in range(N)
        ]
        self.begun = [False] * N

    def begin(self, i):
        if not self.begun[i]:
            self.begun[i] = True
            return self.pools[i].reset()[0][0]
        return self.pools[i].step(self.pools[i].action_space.sample()[None])[0][0]

    def step(self, i, action):
        space = self.pools[i].action_space
        if isinstance(space, gymnasium.spaces.Box):
            action = np.clip(action, space.low, space.high)
        obs, *rest = self.pools[i].step(np.asarray(action)[None])
        return obs[0], *(x[0] for x in rest[:3])


class PettingZoo:
    """One copy of a parallel environment, its agents the environments; `begin` resets when the last has left."""

    def __init__(self, name, seed):
        pytest.importorskip("pettingzoo")
        if ":" in name:
            self.env = importlib.import_module(name.partition(":")[0]).Relay()
            self.show = lambda obs: obs["observation"]
        else:
            self.env = importlib.import_module(name.replace("/", ".")).parallel_env(max_cycles=12)
            space = self.env.observation_space(self.env.possible_agents[0])
            self.show = lambda obs: gymnasium.spaces.flatten(space, obs)
        self.seed, self.waiting, self.first, self.actions = environment_seeds(seed, 1)[0], set(), {}, {}
        self.agents = self.env.possible_agents
        assert len(self.agents) == self.rows

    rows = N

    def begin(self, i):
        if not getattr(self.env, "agents", None) and i not in self.first:
            obs, _ = self.env.reset(seed=self.seed)
            self.seed = None
            self.first = {k: self.show(obs[agent]) for k, agent in enumerate(self.agents)}
        return self.first.pop(i, None)

    def acting(self):
        return [agent in self.env.agents for agent in self.agents]

    def step_all(self, actions):
        acting = self.acting()
        given = {agent: actions[k] for k, agent in enumerate(self.agents) if acting[k]}
        found = self.env.step(given)
        return {
            k: (self.show(found[0][agent]), *(part[agent] for part in found[1:4]))
            for k, agent in enumerate(self.agents)
            if acting[k]
        }


class TwoPlayers(PettingZoo):
    """Games of two."""

    rows = 2


# name, options of the vector, its library's own stepping, steps
CASES = {
    "gymnasium, discrete": ("Acrobot-v1", dict(max_episode_steps=17), Gymnasium, 60),
    "gymnasium, continuous": ("Pendulum-v1", dict(max_episode_steps=9), Gymnasium, 40),
    "gymnasium, processes": (
        "CartPole-v1",
        dict(max_episode_steps=15, vectorization_mode="async"),
        lambda name, seed: Gymnasium(name, seed, max_episode_steps=15),
        60,
    ),
    "mujoco": ("InvertedPendulum-v5", dict(max_episode_steps=20), Gymnasium, 60),
    "box2d": ("LunarLander-v3", dict(max_episode_steps=60), Gymnasium, 150),
    "minigrid": ("MiniGrid-MemoryS7-v0", dict(max_steps=20), minigrid_reference, 60),
    "atari": ("ALE/Breakout-v5", dict(max_num_frames_per_episode=400, num_threads=1), Atari, 230),
    "pettingzoo, agents leave": ("tests.envs.relay:Relay", {}, PettingZoo, 40),
    "pettingzoo, a game": ("pettingzoo/classic/rps_v2", dict(max_cycles=12), TwoPlayers, 40),
    "gymnax": ("gymnax/CartPole-v1", dict(max_steps_in_episode=25), Jax, 60),
    "gymnax, pictures": ("gymnax/Breakout-MinAtar", dict(max_steps_in_episode=25), Jax, 60),
    "craftax": ("craftax/Craftax-Symbolic-v1", dict(max_timesteps=12), Jax, 30),
    "craftax classic": ("craftax/Craftax-Classic-Symbolic-v1", dict(max_timesteps=12), Jax, 30),
    "envpool": ("envpool/CartPole-v1", dict(max_episode_steps=25), EnvPool, 60),
    "envpool, continuous": ("envpool/Pendulum-v1", dict(max_episode_steps=25), EnvPool, 60),
}
NEEDS = {"mujoco": "mujoco", "box2d": "Box2D", "minigrid": "minigrid", "atari": "ale_py", "envpool": "envpool"}

COMPILES = (pytest.mark.slow, pytest.mark.timeout(1800))  # minutes of a CPU


@pytest.mark.parametrize(
    "name, options, reference, steps",
    [pytest.param(*case, marks=COMPILES if "craftax" in label else ()) for label, case in CASES.items()],
    ids=CASES,
)
def test_transitions_are_the_librarys_own(name, options, reference, steps, request, monkeypatch):
    # ale-py's own class, made here too, writes into what all vector environments share.
    monkeypatch.setattr(gymnasium.vector.VectorEnv, "metadata", dict(gymnasium.vector.VectorEnv.metadata))
    label = request.node.callspec.id.partition(",")[0]
    for needed in {label.partition(" ")[0]} & NEEDS.keys():
        pytest.importorskip(NEEDS[needed])
    if reference is Gymnasium:
        own: Any = Gymnasium(name, 5, **options)
    else:
        own = reference(name, 5)
    rows = getattr(own, "rows", N)
    same = partial(np.testing.assert_allclose, rtol=0, atol=getattr(own, "tolerance", 0))
    with envs.make(name, rows, **options) as env:
        obs = env.reset(5).obs
        for i in range(rows):
            same(obs[i].numpy(), own.begin(i))
        generator, ends = torch.Generator().manual_seed(0), 0
        for t in itertools.count():
            if t == steps:
                break
            if isinstance(env.action, Continuous):
                action = 3 * torch.randn(rows, env.action.dim, generator=generator)
            else:
                action = torch.randint(0, env.action.nvec[0], (rows,), generator=generator)
            step = env.step(action)
            if hasattr(own, "step_all"):
                found = own.step_all(action.numpy())
            else:
                found = {i: own.step(i, action[i].numpy() if action.ndim > 1 else int(action[i])) for i in range(rows)}
            for i in range(rows):
                assert (step.valid is None or bool(step.valid[i])) == (i in found)
                if i not in found:
                    assert not (step.reward[i] or step.terminated[i] or step.truncated[i])
                    continue
                want, reward, terminated, truncated = found[i]
                same(step.next_obs[i].numpy(), want, err_msg=f"step {t}, row {i}")
                same(step.reward[i].numpy(), np.float32(reward))
                assert (bool(step.terminated[i]), bool(step.truncated[i])) == (terminated, truncated)
                ends += terminated or truncated
            for i in range(rows):
                ended = bool(step.begins[i])
                first = own.begin(i) if ended else None
                if first is not None:
                    same(step.obs[i].numpy(), first)
                elif not ended:
                    assert torch.equal(step.obs[i], step.next_obs[i])
    assert ends >= 3, "episodes must have ended for this to show anything"
