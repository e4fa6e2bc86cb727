"""Draws docs/replay.svg: how often items are drawn, by their priority and alpha. python -m benchmarks.replay_picture

The counts are those of real draws from a PrioritizedReplay.
"""

from pathlib import Path

import torch

from sharpwave import PrioritizedReplay

ITEMS, DRAWS = 40, 200_000
ALPHAS = ((0.0, "#9aa0a6"), (0.6, "#1f77b4"), (1.0, "#d62728"))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 340, 60, 60, 40


def shares(alpha: float, td_error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of the draws and importance weight of each item."""
    buffer = PrioritizedReplay(ITEMS, alpha=alpha, beta=0.4, weight_norm="buffer", seed=0)
    buffer.add(item=torch.arange(ITEMS))
    buffer.update_priorities(torch.arange(ITEMS), td_error)
    batch = buffer.sample(DRAWS)
    weights = torch.zeros(ITEMS).index_copy_(0, batch.item, batch.weights)
    return torch.bincount(batch.item, minlength=ITEMS) / DRAWS, weights


def main() -> None:
    td_error = torch.linspace(0.05, 2.0, ITEMS)
    plot, base = WIDTH - LEFT - 20, HEIGHT - BOTTOM
    step = plot / ITEMS
    curves = [(alpha, color, *shares(alpha, td_error)) for alpha, color in ALPHAS]
    scale = (base - TOP) / max(float(c[2].max()) for c in curves)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - 20}" y2="{base}" stroke="#444"/>',
        f'<line x1="{LEFT}" y1="{base}" x2="{LEFT}" y2="{TOP}" stroke="#444"/>',
        f'<text x="{LEFT + plot / 2}" y="{HEIGHT - 14}" text-anchor="middle">items, by TD error: 0.05 to 2</text>',
        f'<text x="{LEFT}" y="{TOP - 16}">share of {DRAWS:,} draws from {ITEMS} items</text>',
    ]
    for percent in range(1, 6):
        y = base - percent / 100 * scale
        if y > TOP:
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
            lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="#ddd"/>')
    for row, (alpha, color, share, weights) in enumerate(curves):
        points = " ".join(f"{LEFT + (i + 0.5) * step:.1f},{base - float(s) * scale:.1f}" for i, s in enumerate(share))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        y = TOP + 14 + 20 * row
        text = f"alpha = {alpha:g}: weights {float(weights.min()):.2f} to {float(weights.max()):.2f}"
        lines.append(
            f'<line x1="{LEFT + 20}" y1="{y - 4}" x2="{LEFT + 44}" y2="{y - 4}" stroke="{color}" stroke-width="3"/>'
        )
        lines.append(f'<text x="{LEFT + 52}" y="{y}">{text}</text>')
    (Path(__file__).parents[1] / "docs" / "replay.svg").write_text("\n".join([*lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
