"""EnvPool: seeds, names and options; its transitions are in test_adapters. Most need the extra `envpool`."""

import sys

import pytest
import torch

from sharpwave import envs


def test_without_envpool(monkeypatch):
    monkeypatch.delitem(sys.modules, "sharpwave.envs.envpool", raising=False)
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"pip install 'sharpwave\[envpool\]'"):
        envs.make("envpool/CartPole-v1", 2)


class TestInstalled:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("envpool")

    def test_the_same_seed_gives_the_same_episodes(self):
        a, b = (envs.make("envpool/CartPole-v1", 4, num_threads=1) for _ in range(2))
        assert torch.equal(a.reset(1).obs, b.reset(1).obs)
        assert not torch.equal(a.reset(1).obs, b.reset(2).obs)
        assert torch.equal(a.reset(1).obs, b.reset(1).obs), "reset forgets what went before"
        assert not a.exact_resume and not a.load_state_dict(a.state_dict()).continued

    def test_names_and_options(self):
        with pytest.raises(ValueError, match=r"'envpool/CartPol': did you mean .*'envpool/CartPole-v1'"):
            envs.make("envpool/CartPol", 2)
        with pytest.raises(ValueError, match=r"cannot be made with options {'speed': 1}"):
            envs.make("envpool/CartPole-v1", 2, speed=1)
