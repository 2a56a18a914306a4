"""Pipeline schedules side by side: bubbles simulated and in closed form, memory, exchange.

    python -m bench.pipelines [--write]

Nothing is measured: schedules are data, and a simulation with F = I = W (a backward is twice a
forward) and free exchange times them. One unit is the forward of one micro-batch through a rank's
part of the model, so with v stages per rank each costs 1/v and the rows compare. With --write the
drawings (docs/images), the Perfetto traces (docs/traces) and the table of docs/pipelines.md are
made anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from bench.page import DOCS, write, write_section
from kilter.parallel.pipeline.check import activations_in_flight, check
from kilter.parallel.pipeline.generators import NAMES, make_schedule
from kilter.parallel.pipeline.simulate import FORMULAS, Costs, Timeline, simulate
from kilter.report.text import table
from kilter.report.timeline import Span, perfetto, svg

SIZES = ((4, 8), (8, 16), (8, 64))  # ranks, micro-batches
DRAWN = (4, 8)
KINDS = {"F": "forward", "B": "backward", "I": "backward of the input",
         "W": "backward of the weights"}
HEADER = ("schedule", "v", "idle", "closed form", "of total", "of ideal", "of span",
          "held, by rank", "sent, most")


def run(name: str, ranks: int, micro_batches: int) -> Timeline:
    """A sound schedule in time, in units of a rank's forward."""
    schedule = make_schedule(name, ranks, micro_batches)
    check(schedule)
    cost = ranks / schedule.num_stages
    return simulate(schedule, Costs(forward=cost, input=cost, weight=cost))


def row(timeline: Timeline) -> list[str]:
    schedule = timeline.schedule
    v = schedule.num_stages // schedule.ranks
    closed = FORMULAS[schedule.name].idle(schedule.ranks, schedule.micro_batches, *[1 / v] * 3)
    held = [peak / v for peak in activations_in_flight(schedule)]
    some = f"{held[0]:g}" if len(set(held)) == 1 else " ".join(f"{peak:g}" for peak in held)
    sent = max(sum(action.kind.sends for action in actions) for actions in schedule.actions)
    return [schedule.name, str(v), f"{timeline.makespan - timeline.ideal:g}", f"{closed:g}",
            *(f"{100 * share:.1f} %" for share in (
                timeline.bubble_of_total, timeline.bubble_of_ideal, timeline.bubble_of_span)),
            some, f"{sent / schedule.micro_batches:g}"]


def page_table(rows: Iterable[list[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section() -> str:
    """What docs/pipelines.md says between its markers."""
    parts = []
    for ranks, micro_batches in SIZES:
        rows = [row(run(name, ranks, micro_batches)) for name in NAMES]
        parts.append(f"p = {ranks} ranks, m = {micro_batches} micro-batches, ideal time "
                     f"{3 * micro_batches}:\n\n{page_table(rows)}")
    return "\n\n".join(parts)


def spans(timeline: Timeline) -> list[Span]:
    """What ranks compute, for drawing: the label is the micro-batch, the depth which of the
    rank's stages it is."""
    schedule = timeline.schedule
    return [Span(rank, timed.start, timed.end, str(timed.action.micro_batch),
                 timed.action.kind.value, schedule.stages_of(rank).index(timed.action.stage))
            for rank, actions in enumerate(timeline.ranks) for timed in actions
            if timed.action.kind.computes]


def drawing(name: str) -> str:
    ranks, micro_batches = DRAWN
    title = f"The schedule {name} with {ranks} ranks and {micro_batches} micro-batches"
    return svg(spans(run(name, *DRAWN)), title=title, unit="forwards of a rank", kinds=KINDS)


def trace(name: str) -> str:
    """For Perfetto, with a unit of one millisecond."""
    made = perfetto(spans(run(name, *DRAWN)), title=name, microseconds=1000)
    return json.dumps(made, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make docs' drawings and table anew")
    args = parser.parse_args()
    for ranks, micro_batches in SIZES:
        print(f"p = {ranks}, m = {micro_batches}")
        print(table([row(run(name, ranks, micro_batches)) for name in NAMES], HEADER), end="\n\n")
    if args.write:
        for name in NAMES:
            write(DOCS / "images" / f"pipeline-{name}.svg", drawing(name))
            write(DOCS / "traces" / f"pipeline-{name}.json", trace(name))
        write_section("pipelines", section(), DOCS / "pipelines.md")


if __name__ == "__main__":
    main()
