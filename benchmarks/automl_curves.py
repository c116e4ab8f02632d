"""Draw the curves of search quality and of scheduling at scale from the JSON files in ``results``.

python -m benchmarks.automl_curves
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from math import log2
from typing import Any, Final

import numpy as np

from benchmarks.automl_figures import RESULTS

WIDTH: Final = 720
HEIGHT: Final = 360
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 30, 50
COLOURS: Final = ("#1a5fb4", "#c64600", "#26a269", "#77767b", "#813d9c", "#000000")
Curve = tuple[str, Sequence[float], Sequence[float]]


def draw(title: str, x_title: str, curves: Sequence[Curve], x_ticks: dict[float, str], y_ticks: Sequence[float]) -> str:
    """Return an SVG of curves (name, x, y) with the given ticks."""
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    xs, (low, top) = list(x_ticks), (min(y_ticks), max(y_ticks))

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * wide, TOP + (top - y) / (top - low) * high

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for x, label in x_ticks.items():
        across, down = place(x, low)
        parts.append(f'<text x="{across:.1f}" y="{down + 18:.1f}" text-anchor="middle">{escape(label)}</text>')
    for y in y_ticks:
        _, down = place(xs[0], y)
        parts.append(f'<path d="M{LEFT} {down:.1f}h{wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_title)}</text>')
    for number, (name, reached_at, values) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(reached_at, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label_y = TOP + 16 + 20 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 14}" y="{label_y}" fill="{colour}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def search_quality(figures: dict[str, Any]) -> str:
    """Draw the held-out error of the best network so far (mean over seeds) over operations spent."""
    budget = figures["budget_operations"]
    shares = np.linspace(0.1, 1.0, 91)
    names = {
        "bayesian": "Gaussian process",
        "evolution": "evolution",
        "random": "random morphs",
        "none": "seed trained longer (end)",
        "scaled": "three times the filters (end)",
        "final": "with a last training",
    }
    curves: list[Curve] = []
    for method, name in names.items():
        rows = [row["curve"] for row in figures["runs"] if row["method"] == method]
        if method in ("none", "scaled"):  # a single trial has one held-out error, at its end
            curves.append((name, [0.1, 1.0], [float(np.mean([row[-1][1] for row in rows]))] * 2))
            continue
        reached = [
            float(np.mean([[error for spent, error in row if spent <= share * budget][-1] for row in rows]))
            for share in shares
        ]
        curves.append((name, [float(share) for share in shares], reached))
    ticks = {share / 10: f"{share * 10}%" for share in range(1, 11)}
    heights = [error for _, _, errors in curves for error in errors]
    top = np.ceil(max(heights) / 0.05) * 0.05
    title = "Held-out error of the best network so far, mean over seeds"
    return draw(title, "share of the operations spent", curves, ticks, [*np.arange(0.1, top + 0.001, 0.05)])


def scheduling(figures: dict[str, Any]) -> str:
    """Draw the score relative to the ideal score over the number of workers."""
    rows = figures["sizes"]
    workers = [log2(row["workers"]) for row in rows]
    curves: list[Curve] = [
        ("score against ideal (%)", workers, [100 * row["score_of_ideal"] for row in rows]),
        ("searched proposals (%)", workers, [100 - 100 * row["hurried_share"] for row in rows]),
    ]
    ticks = {log2(row["workers"]): f"{row['workers']:,}" for row in rows}
    title = "Scheduling in simulation, with the real scheduler"
    return draw(title, "workers", curves, ticks, [0, 20, 40, 60, 80, 100])


def main() -> None:
    """Draw both charts."""
    for name, drawn in (("automl_search_quality", search_quality), ("automl_scheduling", scheduling)):
        figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        (RESULTS / f"{name}.svg").write_text(drawn(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
