"""Draws the held-out rewards of runs of `kilter rl` over their steps, as an SVG.

    python examples/plot_rewards.py rewards.svg "seed 0=runs/a" "seed 1=runs/b"

Each curve is a name and a run's folder (or metrics.jsonl). A thin line of the same colour is the
reward of the answers that were learned from, which are sampled anew in each step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

COLOURS = ("#2a6fdb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a200", "#5c636a")
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 44  # margins

_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.grid { stroke: #8b949e; stroke-opacity: .3 }
.line { fill: none; stroke-width: 2.2 }
.thin { fill: none; stroke-width: 1; stroke-opacity: .45 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""


def read_rewards(path: Path) -> tuple[Points, Points]:
    """(held-out, sampled): steps and rewards of a run.

    Raises:
        OSError: if it has no metrics.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    held_out, sampled = ([(line["step"], line["reward"]) for line in lines if line["kind"] == kind]
                         for kind in ("eval", "step"))
    return held_out, sampled


def draw(curves: Mapping[str, tuple[Points, Points]], title: str = "Held-out reward") -> str:
    """The SVG.

    Raises:
        ValueError: if there is no held-out reward.
    """
    if not any(held_out for held_out, _ in curves.values()):
        raise ValueError("These runs have no held-out rewards; set eval.prompts in their jobs.")
    points = [point for both in curves.values() for line in both for point in line]
    last = max(step for step, _ in points) or 1.0
    low = min(0.0, min(reward for _, reward in points))
    high = max(1.0, max(reward for _, reward in points))

    def at(step: float, reward: float) -> tuple[float, float]:
        return (LEFT + step / last * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - (reward - low) / (high - low) * (HEIGHT - TOP - BOTTOM))

    def path(line: Points) -> str:
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line))

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           f'width="{WIDTH}" height="{HEIGHT}" role="img">', f"<title>{escape(title)}</title>",
           _STYLE]
    for i in range(6):
        reward = low + (high - low) * i / 5
        _, y = at(0, reward)
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
                   f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{reward:.1f}</text>')
    for step in range(0, int(last) + 1, max(1, int(last) // 8)):
        x, _ = at(step, low)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}'
                   "</text>")
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    for i, (name, (held_out, sampled)) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        if sampled:
            out.append(f'<path class="thin" stroke="{colour}" d="{path(sampled)}"/>')
        if not held_out:
            continue
        out.append(f'<path class="line" stroke="{colour}" d="{path(held_out)}"/>')
        for step, reward in held_out:
            x, y = at(step, reward)
            told = escape(f"{name}, step {step:g}: {reward:.3f}")
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}">'
                       f"<title>{told}</title></circle>")
        key = TOP + 14 + 18 * i
        out.append(f'<path class="line" stroke="{colour}" d="M{LEFT + 12} {key - 4}h22"/>'
                   f'<text x="{LEFT + 40}" y="{key}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the .svg file to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="curves")
    given = parser.parse_args(arguments)
    curves = {}
    for run in given.runs:
        name, separator, folder = run.partition("=")
        if not separator:
            name = folder = run
        curves[name] = Path(folder)
    try:
        drawing = draw({name: read_rewards(folder) for name, folder in curves.items()})
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    given.out.write_text(drawing, encoding="utf-8")
    print(f"{given.out}: {len(curves)} curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
