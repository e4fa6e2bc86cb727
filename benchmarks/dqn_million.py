"""A million updates of DQN on CartPole, and what memory does meanwhile: `python -m benchmarks.dqn_million`.

Eleven lines of JSON: the first after the graphs are captured, the last at the end. Memory that grows is an error.
"""

import argparse
import json
import resource
import time

import torch

from sharpwave.algos.dqn import DQN, DQNConfig

PER_EPOCH = 64 * 16 * 4  # environments, steps of each, updates for each


def main() -> None:
    """Train; exit with 1 where the device's memory is not at the end what it was at the first line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    epochs = args.updates // PER_EPOCH + 2
    agent = DQN(
        DQNConfig(
            env="sharpwave/CartPole", device=args.device, num_envs=64, epoch_steps=16, updates_per_step=4.0,
            total_steps=epochs * 64 * 16, buffer_size=200_000, batch_size=256, reward_scale=0.1, lr=3e-4,
            lr_schedule="linear", target_interval=1, tau=0.005, epsilon_fraction=0.1,
        )
    )  # fmt: skip
    begin, lines = time.perf_counter(), []
    marks = [max(PER_EPOCH, args.updates * k // 10) for k in range(11)]
    while marks and agent.epoch < agent.num_epochs:
        agent.train_epoch()
        if agent.updates >= marks[0]:
            marks = [mark for mark in marks if mark > agent.updates]
            lines.append(line(agent, time.perf_counter() - begin))
            print(json.dumps(lines[-1]), flush=True)
    if any(last["allocated"] != lines[0]["allocated"] for last in lines[-1:]):
        raise SystemExit("memory grew")


def line(agent: DQN, seconds: float) -> dict:
    """Where training stands."""
    metrics, cuda = agent.metrics(), agent.device.type == "cuda"
    names = ("episode/return", "loss/td", "fault/skipped_updates", "replay/stale", "replay/bad_td_errors")
    return {
        "updates": agent.updates,
        "seconds": round(seconds, 1),
        "allocated": torch.cuda.memory_allocated() if cuda else 0,
        "reserved": torch.cuda.memory_reserved() if cuda else 0,
        "host_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    } | {name: round(metrics[name], 4) for name in names}


if __name__ == "__main__":
    main()
