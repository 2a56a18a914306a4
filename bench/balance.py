"""`python -m bench.balance`: how even the attention work of context-parallel ranks is.

Work is pairs (row, row it sees), counted from the mask. What is told is the largest of the ranks
over their mean, minus one: the share of attention's time that the others wait. Nothing is timed.
Writes bench/results/balance.json and prints the table of docs/long-context.md.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from kilter.parallel.context.balance import imbalance, place, work_of_ranks
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.plan import PLACEMENTS

RANKS = (4, 8, 16)
PACKS = 8  # of each random kind; the worst is told


def lognormal(tokens: int, seed: int, median: float = 400.0, sigma: float = 1.2) -> list[int]:
    """Boundaries of documents whose lengths are log-normal, the last cut to fit."""
    rng, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < tokens:
        length = max(1, int(rng.lognormal(np.log(median), sigma)))
        bounds.append(min(tokens, bounds[-1] + length))
    return bounds


def images(bounds: list[int], seed: int) -> Mask:
    """Images of 256, 576 or 1024 rows in every document that has room, some text between them."""
    rng, spans = np.random.default_rng(seed), []
    for start, end in itertools.pairwise(bounds):
        at = start + int(rng.integers(0, 64))
        while at + 256 <= end:
            stop = min(end, at + int(rng.choice([256, 576, 1024])))
            spans.append((at, stop))
            at = stop + int(rng.integers(16, 512))
    return Mask.with_spans(bounds, spans)


def packs() -> dict[str, list[Mask]]:
    """By name, masks of that kind."""
    seeds, tokens = range(PACKS), 32768
    return {
        "one document, 8K": [Mask.causal([0, 8192])],
        "one document, 128K": [Mask.causal([0, 131072])],
        "log-normal documents, 32K": [Mask.causal(lognormal(tokens, s)) for s in seeds],
        "the same, window 1024": [Mask.causal(lognormal(tokens, s), 1024) for s in seeds],
        "with images, 32K": [images(lognormal(tokens, s, 2000.0), s) for s in seeds],
    }


def main() -> None:
    rows = []
    for name, masks in packs().items():
        for ranks in RANKS:
            row: dict[str, str | int | float] = {"pack": name, "ranks": ranks}
            for kind in PLACEMENTS:
                found = [place(kind, mask, ranks) for mask in masks]
                row[kind] = max(imbalance(work_of_ranks(mask, placement))
                                for mask, placement in zip(masks, found, strict=True))
                row[f"{kind} rows"] = max(imbalance(p.sizes) for p in found)
            rows.append(row)
    out = Path(__file__).parent / "results" / "balance.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(f"| pack | ranks | {' | '.join(PLACEMENTS)} |\n|---|---|{'---|' * len(PLACEMENTS)}")
    for row in rows:
        cells = [f"{100 * float(row[kind]):.2f} %" for kind in PLACEMENTS]
        print(f"| {row['pack']} | {row['ranks']} | {' | '.join(cells)} |")
    most = max(float(row[f"{kind} rows"]) for row in rows for kind in PLACEMENTS)
    print(f"\nRows: {100 * most:.2f} % at most.")


if __name__ == "__main__":
    main()
