"""Where settings come from, in which order, and what is refused."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from sharpwave.run import config as configs
from sharpwave.run import presets
from sharpwave.run.config import RunConfig
from sharpwave.run.errors import UserError
from tests.run.stub import StubConfig, fields


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setitem(configs.ALGORITHMS, "stub", ("tests.run.stub:StubConfig", "tests.run.stub:Stub"))
    monkeypatch.setitem(presets.PRESETS, ("stub", "Known"), {"rate": 2.0, "epochs": 20, "env_kwargs": {"a": 1, "b": 2}})


def test_file_over_preset(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('env = "Known"\nrate = 3\nenv_kwargs = {b = 5}\n')
    settings, env = configs.layers("stub", file, None)
    assert env == "Known"
    assert settings == {"env": "Known", "rate": 3.0, "epochs": 20, "env_kwargs": {"a": 1, "b": 5}}


def test_the_command_lines_environment_decides_the_preset(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('env = "Known"\n')
    assert configs.layers("stub", file, "Other") == ({"env": "Other"}, "Other")
    assert configs.layers("stub", None, None) == ({}, None)


def test_presets_of_a_family():
    pong = presets.preset("dqn", "ALE/Pong-v5")
    assert pong["frame_stack"] == 4 and presets.preset("dqn", "ALE/Breakout-v5") is pong
    assert presets.preset("ppo", "ALE/Pong-v5") == presets.preset("dqn", "ALE") == {}
    assert presets.preset("dqn", "CartPole-v1")["tau"] == 0.01


@pytest.mark.parametrize("there", [False, True])
def test_on_a_gpu_its_own_preset_comes_on_top(tmp_path, monkeypatch, there):
    monkeypatch.setitem(presets.ON_GPU, ("stub", "Known"), {"rate": 8.0})
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    file = tmp_path / "c.toml"
    file.write_text('device = "cpu"\n')
    for device, rate in {"cuda": 8.0, "cuda:1": 8.0, "cpu": 2.0, "auto": 8.0 if there else 2.0, None: None}.items():
        settings, _ = configs.layers("stub", None, "Known", device)
        expected = (8.0 if there else 2.0) if rate is None else rate
        assert settings == {"env": "Known", "rate": expected, "epochs": 20, "env_kwargs": {"a": 1, "b": 2}}
    assert configs.layers("stub", file, "Known")[0]["rate"] == 2.0
    assert configs.layers("stub", file, "Known", "cuda")[0]["rate"] == 8.0


@pytest.mark.parametrize("on_gpu", [False, True])
def test_presets_name_real_settings(on_gpu):
    for algorithm, env in [*presets.PRESETS, *presets.ON_GPU]:
        cls, found = configs.config_class(algorithm), presets.preset(algorithm, env, on_gpu)
        config = configs.check(cls(env=env, **configs.coerce_all(cls, found, "preset")))
        if algorithm == "ppo":
            assert config.num_envs is not None, "a GPU has a default of its own"


def test_json_round_trip(tmp_path):
    config = StubConfig(env="E", env_kwargs={"x": [1, {"y": None}]}, rate=0.1 + 0.2, sizes=(), note=None)
    file = tmp_path / "config.json"
    file.write_text(configs.to_json(config))
    assert configs.build("stub", configs.read_file(file), "file") == config


@pytest.mark.parametrize(
    "toml, name, value",
    [
        ("rate = 1", "rate", 1.0),
        ("epochs = 1e3", "epochs", 1000),
        ("sizes = [1, 2]", "sizes", (1, 2)),
        ('note = "x"', "note", "x"),
        ("log-interval = 3", "log_interval", 3),
    ],
)
def test_values_take_the_fields_type(toml, name, value):
    got = getattr(configs.build("stub", {"env": "E", **tomllib.loads(toml)}, "f"), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "toml, words",
    [
        ("rtae = 1", "c.toml: unknown setting 'rtae': did you mean 'rate'?"),
        ("zzz = 1", "c.toml: unknown setting 'zzz'"),
        ('rate = "fast"', 'c.toml: rate must be a number; got "fast"'),
        ("rate = true", "c.toml: rate must be a number; got true"),
        ("epochs = 1.5", "c.toml: epochs must be an integer; got 1.5"),
        ("epochs = inf", "c.toml: epochs must be an integer; got Infinity"),
        ("env = 3", "c.toml: env must be a string; got 3"),
        ('sizes = ["a"]', 'c.toml: sizes must be a list of integers; got ["a"]'),
        ("sizes = 3", "c.toml: sizes must be a list of integers; got 3"),
        ("env_kwargs = 3", "c.toml: env_kwargs must be a table of values by name; got 3"),
        ("note = 1979-05-27", 'c.toml: note must be a string or nothing; got "1979-05-27"'),
        ("rate = ", "c.toml is not valid"),
    ],
)
def test_a_bad_file_is_named(tmp_path, toml, words):
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(UserError) as error:
        configs.layers("stub", file, None)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the config file .*No such file"):
        configs.layers("stub", tmp_path / "none.toml", None)


def test_a_list_is_not_a_config(tmp_path):
    file = tmp_path / "c.json"
    file.write_text("[1]")
    with pytest.raises(UserError, match="must hold settings by name; it holds a list"):
        configs.layers("stub", file, None)


@pytest.mark.parametrize("name, text", [("c.json", "[" * 100_000), ("c.toml", "x = " + "[" * 100_000)])
def test_a_file_nested_too_deeply(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"the config file .*{name} is not valid: "):
        configs.layers("stub", tmp_path / name, None)


def test_unknown_algorithm():
    with pytest.raises(UserError, match="unknown algorithm 'x': choose ppo or dqn or stub"):
        configs.trainer_class("x")


def test_check_turns_value_errors_into_user_errors():
    with pytest.raises(UserError, match=r"^epochs must be >= 1; got 0$"):
        configs.check(StubConfig(env="E", epochs=0))


@pytest.mark.parametrize("name", ["log_interval", "checkpoint_interval", "keep_checkpoints", "threads"])
def test_run_config_ranges(name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be at least 1; got 0"):
        replace(RunConfig(), **{name: 0}).validate()


def test_eval_episodes_range():
    RunConfig(eval_episodes=0).validate()
    with pytest.raises(ValueError, match="--eval-episodes must be at least 0; got -1"):
        RunConfig(eval_episodes=-1).validate()


def test_merge():
    merged = configs.merge({"a": 1, "d": {"x": 1, "y": 1}}, {"d": {"y": 2}}, {"a": 3})
    assert merged == {"a": 3, "d": {"x": 1, "y": 2}}


def test_settings_need_no_torch():
    code = "import sys; from sharpwave.run import config; config.config_class('ppo'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fields_are_json():
    assert json.loads(configs.to_json(StubConfig(env="E"))) == json.loads(json.dumps(fields(StubConfig(env="E"))))
