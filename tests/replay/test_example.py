"""The single-file example runs, and learns something."""

import importlib.util
from pathlib import Path

import torch


def test_the_example_runs(capsys):
    path = Path(__file__).parents[2] / "examples" / "dqn_per.py"
    spec = importlib.util.spec_from_file_location("dqn_per", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    try:
        last = module.main(module.Args(total_steps=8_000, buffer_size=3_000, steps_an_update=8))
    finally:
        torch.set_num_threads(threads)
    assert last > 40, "a random policy gets 22"
    assert "return of the last 50 episodes" in capsys.readouterr().out
