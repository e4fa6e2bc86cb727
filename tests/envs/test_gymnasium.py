"""The Gymnasium adapter against stepping each environment alone, in every autoreset mode."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

from sharpwave import envs
from sharpwave.envs import Continuous, Discrete, EnvFault, Observation
from sharpwave.envs._spaces import flattening, layout
from sharpwave.envs.gymnasium import GymnasiumVector, environment_seeds
from tests.envs.toys import DictWalk, Rewriting, Walk

MODES = list(AutoresetMode)


def policy(obs: np.ndarray, action) -> np.ndarray:
    """An action for each row that depends on the row alone, so that ignored actions do not shift the others."""
    rows = np.asarray(obs, dtype=np.float64).reshape(len(obs), -1)
    code = np.floor(np.abs(rows @ np.arange(1, rows.shape[1] + 1)) * 1000).astype(np.int64)
    if isinstance(action, Continuous):
        return (code[:, None] % 7 - 3).astype(np.float32) * np.ones(action.dim, dtype=np.float32)
    heads = [(code + i) % n for i, n in enumerate(action.nvec)]
    return heads[0] if len(heads) == 1 else np.stack(heads, axis=1)


def alone(build, seed: int, steps: int, action, to_gymnasium=lambda a: a) -> list[tuple]:
    """The first transitions of one environment, reset by hand."""
    env = build()
    obs, _ = env.reset(seed=seed)
    found = []
    for _ in range(steps):
        a = policy(np.asarray(obs)[None], action)[0]
        before = np.array(obs)
        after, reward, terminated, truncated, _ = env.step(to_gymnasium(a))
        found.append((before.tolist(), a.tolist(), np.float32(reward), terminated, truncated, np.array(after).tolist()))
        obs = env.reset()[0] if terminated or truncated else after
    return found


def in_vector(env, seed: int, steps: int) -> list[list[tuple]]:
    """The valid transitions of each environment of a vector, `steps` steps."""
    obs, _, _ = env.reset(seed)
    found = [[] for _ in range(env.num_envs)]
    for _ in range(steps):
        action = policy(obs.numpy(), env.action)
        step = env.step(torch.from_numpy(action))
        for i in range(env.num_envs):
            if step.valid is None or step.valid[i]:
                fields = (obs[i], action[i], step.reward[i], step.terminated[i], step.truncated[i], step.next_obs[i])
                found[i].append(tuple(x.tolist() for x in fields))
        obs = step.obs
    return found


def assert_same_transitions(got, build, seed, action, **options):
    for transitions, s in zip(got, environment_seeds(seed, len(got)), strict=True):
        want = alone(build, s, len(transitions), action, **options)
        assert transitions == want
        assert sum(t[3] or t[4] for t in want) >= 3, "episodes must have ended for this to show anything"


class Plain(VectorWrapper):
    """A wrapper that changes nothing, but hides that it could be reset by a mask."""


class TestTransitions:
    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize("wrap", [lambda v: v, Plain], ids=["bare", "wrapped"])
    def test_all_modes_give_the_transitions_of_single_environments(self, mode, wrap):
        env = GymnasiumVector(wrap(SyncVectorEnv([Walk] * 5, autoreset_mode=mode)))
        assert env.may_skip == (mode is AutoresetMode.NEXT_STEP and wrap is Plain)
        got = in_vector(env, 3, 60)
        assert_same_transitions(got, Walk, 3, env.action)
        assert {(t[3], t[4]) for t in got[0] + got[1] + got[2]} == {
            (False, False),
            (True, False),
            (False, True),
            (True, True),
        }
        assert (min(map(len, got)) < 60) == env.may_skip

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize(
        "shared_memory", [True, pytest.param(False, marks=pytest.mark.long)], ids=["shared", "pipes"]
    )
    def test_in_processes(self, mode, shared_memory):
        vector = AsyncVectorEnv([Walk] * 2, autoreset_mode=mode, shared_memory=shared_memory)
        with GymnasiumVector(vector) as env:
            assert env.may_skip == (mode is AutoresetMode.NEXT_STEP and not shared_memory)
            assert_same_transitions(in_vector(env, 3, 30), Walk, 3, env.action)
            assert not env.exact_resume

    @pytest.mark.parametrize("copy", [True, False])
    def test_vectors_that_do_not_copy(self, copy):
        env = GymnasiumVector(SyncVectorEnv([Walk] * 2, copy=copy, autoreset_mode=AutoresetMode.DISABLED))
        assert_same_transitions(in_vector(env, 0, 40), Walk, 0, env.action)

    @pytest.mark.parametrize("name", ["tests.envs.toys:Rewriting", "Rewriting-v0"])
    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_environments_that_rewrite_their_observation(self, name, mode):
        """Made by us, their final observation is read before they begin the next episode in the same array."""
        options = {"longest": 4} if ":" in name else {"longest": 4, "vectorization_mode": mode}
        gymnasium.register("Rewriting-v0", entry_point=Rewriting, disable_env_checker=True)
        try:
            with envs.make(name, 3, **options) as env:
                assert_same_transitions(in_vector(env, 1, 40), partial(Rewriting, 4), 1, env.action)
        finally:
            del gymnasium.registry["Rewriting-v0"]

    @pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "FrozenLake-v1"])
    def test_registered_environments(self, name):
        env = envs.make(name, 2, vectorization_mode="sync", max_episode_steps=12)

        def single():
            made = gymnasium.make(name, max_episode_steps=12)
            return gymnasium.wrappers.FlattenObservation(made) if name == "FrozenLake-v1" else made

        def to_gymnasium(a):
            return np.clip(a, -2, 2) if name == "Pendulum-v1" else a

        assert_same_transitions(in_vector(env, 5, 50), single, 5, env.action, to_gymnasium=to_gymnasium)

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_dictionaries_are_flattened_as_gymnasium_does(self, mode):
        env = GymnasiumVector(SyncVectorEnv([DictWalk] * 3, autoreset_mode=mode))
        assert env.observation.shape == (5,)
        assert_same_transitions(
            in_vector(env, 2, 50), lambda: gymnasium.wrappers.FlattenObservation(DictWalk()), 2, env.action
        )

    def test_cartpoles_own_vector_class(self):
        """Its environments share one random stream, so each step is compared from the state it began in."""
        env = envs.make("CartPole-v1", 4, max_episode_steps=9)
        assert env.may_skip
        single = gymnasium.make("CartPole-v1").unwrapped
        obs, _, _ = env.reset(0)
        ended, ends, skips = torch.zeros(4, dtype=torch.bool), 0, 0
        lengths = torch.zeros(4)
        for _ in range(60):
            states = env.vector.state.T.copy()
            action = policy(obs.numpy(), env.action)
            step = env.step(torch.from_numpy(action))
            assert torch.equal(~step.valid, ended), "the step after an end, and no other"
            lengths += step.valid
            for i in range(4):
                if not step.valid[i]:
                    assert (step.reward[i], bool(step.begins[i])) == (0, True)
                    assert (step.obs[i].abs() <= 0.05).all()
                    continue
                single.reset()
                single.state = tuple(states[i])
                want, reward, terminated, _, _ = single.step(int(action[i]))
                np.testing.assert_allclose(step.next_obs[i], want, rtol=1e-6, atol=1e-7)
                assert (float(step.reward[i]), bool(step.terminated[i])) == (reward, terminated)
            assert torch.equal(step.truncated, (lengths == 9) & step.valid)
            ended = step.terminated | step.truncated
            ends, skips = ends + int(ended.sum()), skips + int((~step.valid).sum())
            lengths.masked_fill_(ended, 0)
            obs = step.obs
        assert ends >= 20 and skips >= 20


class TestTrueFinalObservation:
    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_at_truncation(self, mode):
        vector = SyncVectorEnv([partial(gymnasium.make, "Pendulum-v1", max_episode_steps=3)] * 2, autoreset_mode=mode)
        env = GymnasiumVector(vector)
        env.reset(0)
        push = torch.full((2, 1), 2.0)
        before = [env.step(push) for _ in range(2)][-1]
        assert before.next_obs is before.obs
        last = env.step(push)
        assert last.truncated.all() and not last.terminated.any()
        single = gymnasium.make("Pendulum-v1").unwrapped
        for i in range(2):
            cos, sin, speed = before.obs[i].double().tolist()
            single.reset()
            single.state = np.array([np.arctan2(sin, cos), speed])
            np.testing.assert_allclose(last.next_obs[i], single.step(np.array([2.0]))[0], atol=1e-5)
        assert (last.obs - last.next_obs).abs().max() > 0.1


class TestSeeds:
    def test_same_seed_same_run(self):
        a, b = (envs.make("CartPole-v1", 3, vectorization_mode="sync") for _ in range(2))
        assert in_vector(a, 0, 60) == in_vector(b, 0, 60)
        assert in_vector(a, 0, 60) == in_vector(b, 0, 60), "a second reset forgets the first"
        assert in_vector(a, 1, 60) != in_vector(b, 0, 60)

    def test_environments_differ_and_runs_do_not_share_them(self):
        runs = [envs.make("Acrobot-v1", 8).reset(seed).obs for seed in (0, 1)]
        rows = torch.cat(runs)
        assert len(rows.unique(dim=0)) == 16

    def test_seeds_are_numpys(self):
        words = np.random.SeedSequence(7).generate_state(3)
        assert environment_seeds(7, 3) == [int(w) // 2 for w in words]


class OneStep(gymnasium.Env):
    """Takes note of the action it is given."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(0, 255, (2, 2), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.taken = action
        return self.observation_space.sample(), 0.0, False, False, {}


def vector_of(*args) -> GymnasiumVector:
    return GymnasiumVector(SyncVectorEnv([partial(OneStep, *args)] * 2, autoreset_mode=AutoresetMode.DISABLED))


class TestSpaces:
    @pytest.mark.parametrize(
        "space, action, given, taken",
        [
            (spaces.Discrete(3, start=-1), Discrete((3,)), [0, 2], [-1, 1]),
            (spaces.MultiDiscrete([3, 2]), Discrete((3, 2)), [[2, 1], [0, 0]], [[2, 1], [0, 0]]),
            (spaces.MultiDiscrete([3, 2], start=[5, -2]), Discrete((3, 2)), [[2, 1], [0, 0]], [[7, -1], [5, -2]]),
            (spaces.MultiDiscrete([4]), Discrete((4,)), [3, 0], [[3], [0]]),
            (spaces.MultiDiscrete([[2, 3]]), Discrete((2, 3)), [[1, 2], [0, 1]], [[[1, 2]], [[0, 1]]]),
            (spaces.MultiBinary(2), Discrete((2, 2)), [[1, 0], [1, 1]], [[1, 0], [1, 1]]),
            (spaces.MultiBinary(1), Discrete((2,)), [1, 0], [[1], [0]]),
            (
                spaces.Box(np.float32([[-1, 0]]), np.float32([[1, np.inf]])),
                Continuous(2, (-1.0, 0.0), (1.0, np.inf)),
                [[-5.0, 7.0], [0.5, -0.5]],
                [[[-1.0, 7.0]], [[0.5, 0.0]]],
            ),
        ],
        ids=str,
    )
    def test_actions(self, space, action, given, taken):
        env = vector_of(space)
        assert env.action == action
        env.reset(0)
        env.step(torch.tensor(given, dtype=action.dtype))
        for inner, want in zip(env.vector.envs, taken, strict=True):
            assert inner.action_space.contains(inner.taken), inner.taken
            assert np.asarray(inner.taken).tolist() == want

    def test_the_callers_action_is_not_shared(self):
        env = vector_of(spaces.MultiDiscrete([3, 3]))
        env.reset(0)
        action = torch.ones(2, 2, dtype=torch.int64)
        env.step(action)
        action.zero_()
        assert env.vector.envs[0].taken.tolist() == [1, 1]

    @pytest.mark.parametrize("space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Box(0, 3, (2,), np.int64)], ids=str)
    def test_other_action_spaces(self, space):
        with pytest.raises(ValueError, match=r"action space .* is not supported: Discrete"):
            vector_of(space)

    @pytest.mark.parametrize(
        "space, observation",
        [
            (spaces.Box(0, 255, (2, 3), np.uint8), Observation((2, 3), torch.uint8)),
            (spaces.Box(0, 1, (2,), np.float64), Observation((2,), torch.float64)),
            (spaces.Box(0, 1, (), np.float32), Observation((), torch.float32)),
            (spaces.Discrete(3), Observation((3,), torch.int64)),
            (spaces.MultiBinary(3), Observation((3,), torch.int8)),
            (spaces.MultiDiscrete([2, 3]), Observation((5,), torch.int64)),
            (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,))]), Observation((4,), torch.float32)),
            (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,), np.float64)]), Observation((4,), torch.float64)),
            (spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([2, 3])]), Observation((7,), torch.int64)),
            (spaces.Dict(a=spaces.Box(0, 255, (2,), np.uint8)), Observation((2,), torch.uint8)),
        ],
        ids=str,
    )
    def test_observations_keep_their_dtype(self, space, observation):
        env = vector_of(spaces.Discrete(2), space)
        assert env.observation == observation
        obs = env.reset(0).obs
        assert obs.shape == (2, *observation.shape) and obs.dtype == observation.dtype
        step = env.step(torch.zeros(2, dtype=torch.int64))
        assert step.obs.shape == obs.shape and step.obs.dtype == obs.dtype
        assert step.reward.dtype == torch.float32

    def test_bytes_among_floats_are_divided_as_the_network_would(self):
        space = spaces.Dict(
            goal=spaces.Discrete(2),
            image=spaces.Box(0, 255, (1, 2), np.uint8),
            inner=spaces.Tuple([spaces.Box(0, 9, (1,)), spaces.Box(0, 255, (0,), np.uint8)]),
        )
        flat, flatten = flattening(space)
        assert flat == spaces.Box(0, np.float32([1, 1, 1, 1, 9]), (5,), np.float32)
        obs = {"goal": 1, "image": np.uint8([[0, 51]]), "inner": (np.float32([7]), np.uint8([]))}
        assert flatten(obs).dtype == np.float32 and flatten(obs).tolist() == pytest.approx([0, 1, 0, 0.2, 7])
        assert layout(space) == (
            "goal: 0-1, one-hot",
            "image: 2-3, divided by 255",
            "inner.0: 4-4",
            "inner.1: nothing",
        )
        assert layout(spaces.Box(0, 1, (2,))) == ()

    def test_observations_of_no_fixed_size(self):
        with pytest.raises(ValueError, match="no fixed flat size"):
            vector_of(spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))

    @pytest.mark.gpu
    def test_on_a_gpu(self):
        host, there = (envs.make("CartPole-v1", 4, device, max_episode_steps=9) for device in ("cpu", "cuda"))
        a, b = host.reset(0), there.reset(0)
        for _ in range(40):
            assert torch.equal(a.obs, b.obs.cpu())
            action = torch.from_numpy(policy(a.obs.numpy(), host.action))
            a, b = host.step(action), there.step(action.cuda())
            assert all(x is y is None or torch.equal(x, y.cpu()) for x, y in zip(a, b, strict=True))
            assert all(y is None or y.is_cuda for y in b)


class TestMasks:
    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_masks_from_info(self, mode):
        env = GymnasiumVector(SyncVectorEnv([Walk] * 4, autoreset_mode=mode), action_mask="action_mask")
        assert env.action == Discrete((3,), masked=True)
        obs, mask, _ = env.reset(0)
        for _ in range(30):
            assert torch.equal(mask, torch.arange(3) != obs[:, 1:2] % 3)
            step = env.step(mask.int().argmax(1))
            obs, mask = step.obs, step.action_mask

    @pytest.mark.filterwarnings("ignore:.*Using the latest versioned environment")
    def test_taxi(self):
        env = envs.make("Taxi", 2, action_mask="action_mask")
        _, mask, _ = env.reset(0)
        for _ in range(5):
            assert mask.shape == (2, 6) and 0 < mask.sum() < 12
            mask = env.step(mask.int().argmax(1)).action_mask

    def test_errors(self):
        with pytest.raises(ValueError, match="no 'legal' to take"):
            GymnasiumVector(SyncVectorEnv([Walk]), action_mask="legal").reset(0)
        with pytest.raises(ValueError, match="discrete actions"):
            envs.make("Pendulum-v1", 1, action_mask="legal")


class TestFaults:
    @pytest.mark.parametrize(
        "fault, what",
        [
            ("raise", "raised OSError: the simulator has gone"),
            ("hang", "raised TimeoutError: it did not return within 2 s"),
            ("reward", "returned a NaN or infinite reward"),
        ],
    )
    @pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_the_environment_is_named(self, fault, what, vector):
        builds = [Walk, partial(Walk, faulty_at=4, fault=fault), Walk]
        with GymnasiumVector(vector(builds, autoreset_mode=AutoresetMode.DISABLED), name="walk", timeout=2) as env:
            env.reset(0)
            for _ in range(3):
                env.step(torch.zeros(3, dtype=torch.int64))
            with pytest.raises(EnvFault, match=f"walk: environment 1 {what}.* at step 4") as caught:
                env.step(torch.zeros(3, dtype=torch.int64))
            assert (caught.value.index, caught.value.step) == (1, 4)

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize("longest", [1, 9], ids=["final", "running"])
    @pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
    def test_observations_that_are_not_finite(self, mode, longest, value):
        builds = [Walk, Walk, partial(Walk, longest, faulty_at=1, fault=value)]
        env = GymnasiumVector(SyncVectorEnv(builds, autoreset_mode=mode))
        env.reset(0)
        with pytest.raises(EnvFault, match="environment 2 returned a NaN or infinite observation at step 1"):
            env.step(torch.zeros(3, dtype=torch.int64))

    @pytest.mark.filterwarnings("error")
    def test_large_numbers_are_finite(self):
        """3e38, and their sums and squares need not be."""
        env = GymnasiumVector(SyncVectorEnv([partial(Walk, 9, faulty_at=1, fault="3e38")]))
        env.reset(0)
        assert env.step(torch.zeros(1, dtype=torch.int64)).next_obs.max() > 1e38

    def test_the_check_can_be_left_out(self):
        vector = SyncVectorEnv([partial(Walk, 9, faulty_at=1, fault="inf")])
        env = GymnasiumVector(vector, check_finite=False)
        env.reset(0)
        assert env.step(torch.zeros(1, dtype=torch.int64)).next_obs.isinf().any()

    @pytest.mark.parametrize(
        "place, value, words",
        [
            (1, np.ones((2, 1)), r"reward must be real numbers of shape \(2,\); got float64 of shape \(2, 1\)"),
            (1, 1.0, r"reward must be .* got float64 of shape \(\)"),
            (1, np.full(2, 1j), r"reward must be real numbers .* got complex128"),
            (1, [None, 1.0], "reward must be real numbers .* got object"),
            (2, np.zeros((2, 1), bool), r"terminated must be .* got bool of shape \(2, 1\)"),
            (2, np.array([np.nan, 0]), r"terminated must be true or false, or 1 or 0; got \[nan +0"),
            (3, False, r"truncated must be .* got bool of shape \(\)"),
        ],
    )
    def test_rewards_and_ends_of_another_shape_or_kind(self, place, value, words):
        class Odd(VectorWrapper):
            def step(self, actions):
                found = list(self.env.step(actions))
                found[place] = value
                return tuple(found)

        env = GymnasiumVector(Odd(SyncVectorEnv([Walk] * 2)))
        env.reset(0)
        with pytest.raises(EnvFault, match=words):
            env.step(torch.zeros(2, dtype=torch.int64))

    def test_a_fault_in_reset(self):
        class Broken(Walk):
            def reset(self, *, seed=None, options=None):
                raise OSError("no licence")

        with pytest.raises(EnvFault, match="environment 0 raised OSError: no licence at reset"):
            GymnasiumVector(SyncVectorEnv([Broken] * 2)).reset(0)

    def test_a_single_environment_is_no_vector(self):
        with pytest.raises(TypeError, match="got a Walk: put single environments"):
            GymnasiumVector(Walk())

    def test_unknown_autoreset_mode(self):
        vector = SyncVectorEnv([Walk])
        silent = Plain(vector)
        silent.env = type("Silent", (gymnasium.vector.VectorEnv,), {"num_envs": 1})()
        with pytest.raises(ValueError, match="give autoreset_mode"):
            GymnasiumVector(silent)
