"""What docs/environments.md shows is run, and does what it says."""

import re
from pathlib import Path

import pytest
import torch

from sharpwave.envs import registry

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def shown(monkeypatch):
    others = {name: factory for name, factory in registry._factories.items() if not name.startswith("mine/")}
    monkeypatch.setattr(registry, "_factories", others)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return [exec_block(block) for block in blocks]


def exec_block(code: str) -> dict:
    names = {"__name__": "docs"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_first_example_steps(shown):
    first = shown[0]
    assert first["step"].next_obs.shape == (8, 4)
    with pytest.raises(RuntimeError, match="closed"):
        first["env"].step(first["action"])


def test_parts_lie_where_the_comment_says(shown):
    env = shown[1]["env"]
    assert f"# {env.layout}\n" in PAGE.read_text()
    assert env.reset(0).obs.dtype == torch.float32


def test_groups_step_by_turns(shown):
    assert shown[2]["steps"] == 100 * 8


def test_the_environment_shown_works(shown):
    env = shown[-1]["env"]
    assert env.reset(0).obs.argmax(1).unique().tolist() == [0]
    right = torch.ones(64, dtype=torch.int64)
    env.step(1 - right)
    for place in (1, 2, 3):
        step = env.step(right)
        assert step.obs.argmax(1).unique().tolist() == [place] and not step.reward.any()
    state = env.state_dict()
    step = env.step(right)
    assert step.reward.all() and step.terminated.all() and not step.truncated.any()
    assert step.next_obs.argmax(1).unique().tolist() == [4]
    assert step.obs.argmax(1).unique().tolist() == [0]
    assert env.load_state_dict(state).continued
    assert env.step(right).terminated.all()
