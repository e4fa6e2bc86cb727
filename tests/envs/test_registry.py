"""From names to environments, and what is said when there is none."""

import re
import sys

import gymnasium
import pytest
import torch

from sharpwave import envs
from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.envs import registry
from sharpwave.envs.registry import steps_on_device
from tests.envs.toys import MaskedSteps, Walk


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(sys, "path", list(sys.path))


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["sharpwave/CartPole", "sharpwave/CueRecall", "CartPole-v1", "Pendulum-v1"])
def test_names_make_what_they_say(name):
    env = envs.make(name, 3)
    assert (env.name, env.num_envs, env.device) == (name, 3, torch.device("cpu"))
    assert name in envs.names()
    assert env.reset(0).obs.shape == (3, *env.observation.shape)


def test_options_reach_the_environment():
    assert envs.make("sharpwave/CueRecall", 2, k=7, delay=1).action.nvec == (7,)
    env = envs.make("CartPole-v1", 2, max_episode_steps=1)
    env.reset(0)
    assert env.step(torch.zeros(2, dtype=torch.int64)).truncated.all()


@pytest.mark.parametrize(
    "name, near",
    [
        ("CartPol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("sharpwave/Cartpole", "sharpwave/CartPole"),
        ("sharpwave/CueRecal", "sharpwave/CueRecall"),
    ],
)
def test_unknown_names_get_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"unknown environment '{re.escape(name)}': did you mean") as error:
        envs.make(name, 1)
    assert f"'{near}'" in one_line(error) and "sharpwave.envs.names()" in one_line(error)


@pytest.mark.parametrize("name", ["Zzyzx/Qqqq-v1", "a b", "", "zzz"])
def test_unknown_names_far_from_all(name):
    with pytest.raises(ValueError, match="unknown environment"):
        envs.make(name, 1)


@pytest.mark.parametrize("name", ["sharpwave/CartPole", "CartPole-v1", "Pendulum-v1", "tests.envs.toys:Walk"])
def test_options_that_do_not_exist(name):
    with pytest.raises(ValueError, match=r"does not take these options: .*gravitas") as error:
        envs.make(name, 1, gravitas=1)
    one_line(error)


@pytest.mark.parametrize("name", ["sharpwave/CartPole", "CartPole-v1"])
def test_no_environments(name):
    with pytest.raises(ValueError, match="num_envs must be at least 1; got 0"):
        envs.make(name, 0)


def test_what_an_environment_needs_is_named():
    def needs_more(**_options):
        raise gymnasium.error.DependencyNotInstalled('box3d is missing, run `pip install "box3d"`')

    gymnasium.register("Needy-v0", entry_point=needs_more)
    try:
        with pytest.raises(ImportError, match="Needy-v0: box3d is missing, run"):
            envs.make("Needy-v0", 1)
    finally:
        del gymnasium.registry["Needy-v0"]


@pytest.mark.parametrize(
    "name, there",
    {
        "sharpwave/CartPole": True,
        "gymnax/CartPole-v1": True,
        "craftax/Craftax-Symbolic-v1": True,
        "sharpwave.envs:CartPole": True,
        "CartPole-v1": False,
        "ALE/Pong-v5": False,
        "envpool/Pong-v5": False,
        "tests.envs.toys:Walk": False,
    }.items(),
)
def test_what_steps_where(name, there):
    assert steps_on_device(name) is there
    config = PPOConfig(env=name, device="cuda", total_steps=2**20)
    assert config.resolved(cuda=True).num_envs == (4096 if there else 64)


class TestYourOwn:
    def test_registered(self):
        envs.register("mine/Masked", MaskedSteps)
        assert isinstance(envs.make("mine/Masked", 2), MaskedSteps)
        assert "mine/Masked" in envs.names()
        with pytest.raises(ValueError, match="unknown environment 'mine/Maskd': did you mean 'mine/Masked'"):
            envs.make("mine/Maskd", 2)
        with pytest.raises(ValueError, match="'mine/Masked' is taken"):
            envs.register("mine/Masked", MaskedSteps)
        with pytest.raises(TypeError, match="factory must be"):
            envs.register("mine/Other", "MaskedSteps")

    def test_a_vector_environment_by_module(self):
        assert isinstance(envs.make("tests.envs.toys:MaskedSteps", 2), MaskedSteps)

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_options_of_the_vector(self, mode):
        """They are ours with a class of one's own, too; what it does not take is still refused."""
        with envs.make("tests.envs.toys:Walk", 2, vectorization_mode=mode, timeout=30, longest=1) as env:
            env.reset(0)
            step = env.step(torch.zeros(2, dtype=torch.int64))
            assert (step.terminated | step.truncated).all()
            assert type(env.vector).__name__ == {"sync": "SyncVectorEnv", "async": "AsyncVectorEnv"}[mode]
        with pytest.raises(ValueError, match="vectorization_mode must be sync or async; got 'vector'"):
            envs.make("tests.envs.toys:Walk", 2, vectorization_mode="vector")

    def test_a_class_that_names_such_an_option_is_given_it(self):
        env = envs.make("tests.envs.toys:Reach", 2, timeout=5)
        env.reset(0)
        assert env.step(torch.zeros(2, 1)).truncated.all()

    def test_a_function_that_makes_one_environment(self):
        env = envs.make("tests.envs.toys:rescaled", 2, high=10.0)
        env.reset(0)
        assert env.step(torch.tensor([[-1.0], [0.5]])).reward.tolist() == [0, 7.5]
        with pytest.raises(ValueError, match="does not take these options"):
            envs.make("tests.envs.toys:rescaled", 2, low=0)
        envs.register("mine/Positional", lambda a=1, b=2: Walk())
        with pytest.raises(TypeError, match="takes its options by keyword alone"):
            envs.make("mine/Positional", 2)

    def test_a_gymnasium_environment_by_module(self):
        env = envs.make("tests.envs.toys:Walk", 2, longest=1)
        assert env.name == "tests.envs.toys:Walk"
        env.reset(0)
        for _ in range(3):
            step = env.step(torch.zeros(2, dtype=torch.int64))
            assert (step.terminated | step.truncated).all()

    def test_a_function_that_makes_a_gymnasium_vector(self):
        envs.register("mine/Vector", lambda num_envs, device: gymnasium.vector.SyncVectorEnv([Walk] * num_envs))
        assert envs.make("mine/Vector", 2).reset(0).obs.shape == (2, 3)
        envs.register("mine/Nothing", lambda num_envs, device: 3)
        with pytest.raises(TypeError, match="made a int; a sharpwave or Gymnasium VectorEnv"):
            envs.make("mine/Nothing", 2)

    def test_a_module_in_the_working_directory(self, tmp_path, monkeypatch):
        (tmp_path / "local_walk.py").write_text("from tests.envs.toys import Walk\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
        assert envs.make("local_walk:Walk", 1).reset(0).obs.shape == (1, 3)
        with pytest.raises(ValueError, match="'local_walk' has no attribute 'Run'"):
            envs.make("local_walk:Run", 1)
        del sys.modules["local_walk"]

    def test_a_module_that_does_not_exist(self):
        before = list(sys.path)
        with pytest.raises(ValueError, match="no module 'no_such_module' here or installed") as error:
            envs.make("no_such_module:Env", 1)
        one_line(error)
        assert sys.path == before

    def test_a_module_that_registers_with_gymnasium(self):
        assert envs.make("gymnasium.envs:CartPole-v1", 2).reset(0).obs.shape == (2, 4)
