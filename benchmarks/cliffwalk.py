"""Draws docs/cliffwalk.svg: updates that the blind cliffwalk takes, by how much the replay holds.

    python -m benchmarks.cliffwalk

The example with which Schaul et al. 2016 motivate prioritized replay (arXiv 1511.05952, section 3.1): of two actions in
each of n states one goes on and the other ends the episode; only the last state's right action is rewarded. The memory
holds the transitions of all 2^n action sequences, so that one in 2^(n+1) - 2 is rewarded. A table is learnt from one
drawn transition at a time until its mean squared error is below 1e-3.
"""

import json
import math
import statistics
from pathlib import Path

import torch

from benchmarks._timing import RESULTS, machine
from sharpwave import PrioritizedReplay

RATE, TOLERANCE, LIMIT = 0.25, 1e-3, 2_000_000
SIZES, SEEDS = range(2, 13), range(7)
KINDS = (
    ("uniform", 0.0, "#9aa0a6"),
    ("prioritized, alpha 0.6", 0.6, "#1f77b4"),
    ("prioritized, alpha 1", 1.0, "#d62728"),
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 400, 70, 56, 30, 20


def transitions(n: int) -> dict[str, torch.Tensor]:
    """State, action, reward and terminated of every step of all 2^n action sequences, (2^(n+1) - 2,) each.

    The right action of state s is s mod 2.
    """
    state = torch.cat([torch.full((2 ** (n - s),), s) for s in range(n)])
    right = torch.cat([torch.arange(2 ** (n - s)) % 2 == 0 for s in range(n)])
    action = torch.where(right, state % 2, 1 - state % 2)
    last = state == n - 1
    return dict(state=state, action=action, reward=(right & last).float(), terminated=~right | last)


def updates_needed(n: int, alpha: float, seed: int) -> int:
    """Updates until the table's mean squared error is below TOLERANCE; LIMIT where it never is."""
    data = transitions(n)
    gamma = 1 - 1 / n
    buffer = PrioritizedReplay(len(data["state"]), alpha=alpha, beta=0.0, eps=1e-4, seed=seed)
    buffer.add(data)
    state, action, reward, terminated = (x.tolist() for x in data.values())
    truth = [[gamma ** (n - 1 - s) if a == s % 2 else 0.0 for a in (0, 1)] for s in range(n)]
    q = (torch.randn(n + 1, 2, generator=torch.Generator().manual_seed(seed)) * 0.1).tolist()
    error = sum((q[s][a] - truth[s][a]) ** 2 for s in range(n) for a in (0, 1))
    batch = buffer.sample(1)
    td_error = torch.zeros(1)
    for count in range(1, LIMIT):
        buffer.sample(1, out=batch)
        i = int(batch.indices)
        s, a = state[i], action[i]
        td = reward[i] + (0.0 if terminated[i] else gamma * max(q[s + 1])) - q[s][a]
        error -= (q[s][a] - truth[s][a]) ** 2
        q[s][a] += RATE * td
        error += (q[s][a] - truth[s][a]) ** 2
        td_error.fill_(td)
        buffer.update_priorities(batch.indices, td_error, batch.generations)
        if error < TOLERANCE * 2 * n:
            return count
    return LIMIT


def draw(rows: list[dict]) -> str:
    """The picture, both axes logarithmic: medians over seeds as lines, single runs as dots."""
    x_most = math.log10(max(row["transitions"] for row in rows)) + 0.1
    y_most = math.log10(max(max(row["updates"]) for row in rows)) + 0.2
    x_least, y_least = 0.6, 0.5

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - x_least) / (x_most - x_least) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - y_least) / (y_most - y_least) * (HEIGHT - BOTTOM - TOP)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">transitions in the replay, of '
        "which one is rewarded</text>",
        f'<text x="{LEFT}" y="{TOP - 12}">updates until the values are right</text>',
    ]
    for power in range(1, 7):
        if power < y_most:
            at = y(10**power)
            lines.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
        if power < x_most:
            at = x(10**power)
            lines.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
            lines.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10**power:,}</text>')
    for k, (name, _, color) in enumerate(KINDS):
        mine = [row for row in rows if row["kind"] == name]
        points = " ".join(f"{x(r['transitions']):.1f},{y(statistics.median(r['updates'])):.1f}" for r in mine)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        lines += [
            f'<circle cx="{x(r["transitions"]):.1f}" cy="{y(u):.1f}" r="2" fill="{color}" opacity="0.5"/>'
            for r in mine
            for u in r["updates"]
        ]
        at = TOP + 18 + 20 * k
        lines.append(
            f'<line x1="{LEFT + 16}" y1="{at - 4}" x2="{LEFT + 40}" y2="{at - 4}" stroke="{color}" stroke-width="3"/>'
        )
        lines.append(f'<text x="{LEFT + 48}" y="{at}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for n in SIZES:
        for name, alpha, _ in KINDS:
            updates = [updates_needed(n, alpha, seed) for seed in SEEDS]
            rows.append({"kind": name, "states": n, "transitions": 2 ** (n + 1) - 2, "updates": updates})
            print(name, n, statistics.median(updates), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cliffwalk.json").write_text(json.dumps({"machine": machine("cpu"), "rows": rows}, indent=1) + "\n")
    (Path(__file__).parents[1] / "docs" / "cliffwalk.svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
