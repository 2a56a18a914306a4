"""Pictures of who does what when: spans on tracks, as SVG, as a Perfetto trace.

A track is a rank, a stream or a thread. The drawings read on light and on dark pages: boxes bring
their own background, and what stands beside them follows the reader's colour scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Kinds in their order are blue, green, yellow, red, violet, grey: (at depth 0, at the deepest).
_PALETTE = (("#a9c9f5", "#2a5fb4"), ("#a5dcb0", "#1f7138"), ("#f5e08c", "#866800"),
            ("#f5b8ad", "#b03c28"), ("#d3b8ee", "#7345a8"), ("#c9cdd3", "#565d66"))
_ROW, _GAP, _TOP, _LEGEND, _AXIS = 26, 6, 8, 30, 34
_LETTER = 6.2  # width of a letter of a label, and of those beside the boxes 7

_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.on { font-size: 10.5px; text-anchor: middle }
.dark { fill: #000000 } .light { fill: #ffffff }
.mid { text-anchor: middle } .end { text-anchor: end }
.track { fill: #8b949e; fill-opacity: .16 }
.tick { stroke: #8b949e; stroke-width: 1 }
.box { stroke: #24292f; stroke-opacity: .45; stroke-width: .7 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""


@dataclass(frozen=True)
class Span:
    """Something that a track does from ``start`` to ``end``, in the timeline's unit.

    Spans of one kind share a colour; the greater the depth, the darker (a rank's first stage has
    depth 0, its second 1).
    """

    track: int
    start: float
    end: float
    label: str
    kind: str
    depth: int = 0


def svg(spans: Sequence[Span], tracks: Sequence[str] = (), title: str = "",
        unit: str = "", width: int = 1100, kinds: Mapping[str, str] | None = None) -> str:
    """A drawing, one row per track, with a legend and an axis of time.

    Args:
        tracks: their names; without, ``rank 0`` and so on.
        title: read aloud by screen readers and shown by nobody.
        unit: stands at the axis.
        width: of the picture in pixels; labels that do not fit in their boxes are left out.
        kinds: what the legend calls each kind, in its order. A kind's colour is that of its place
            here, so drawings with the same ``kinds`` agree; those not named follow as they come.

    Raises:
        ValueError: if there are no spans, or one ends before it starts.
    """
    names = _names(spans, tracks)
    legend = _legend(spans, kinds)
    order = dict.fromkeys([*(kinds or ()), *legend])
    colours = {kind: _PALETTE[i % len(_PALETTE)] for i, kind in enumerate(order)}
    left = 12 + 7 * max(map(len, names))
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    scale = (width - left - 14) / ((end - start) or 1.0)
    deepest = max(span.depth for span in spans)
    bottom = _TOP + len(names) * (_ROW + _GAP)
    height = bottom + _AXIS + _LEGEND
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           f'width="{width}" height="{height}" role="img">', f"<title>{escape(title)}</title>",
           _STYLE]
    for track, name in enumerate(names):
        y = _TOP + track * (_ROW + _GAP)
        out.append(f'<text class="end" x="{left - 6}" y="{y + _ROW / 2 + 4:g}">{escape(name)}'
                   f'</text><rect class="track" x="{left}" y="{y}" '
                   f'width="{_px((end - start) * scale)}" height="{_ROW}"/>')
    for span in spans:
        x, y = left + (span.start - start) * scale, _TOP + span.track * (_ROW + _GAP)
        wide = (span.end - span.start) * scale
        fill, ink = _shade(colours[span.kind], span.depth, deepest)
        told = (f"{legend[span.kind]} {span.label}, {names[span.track]}, {span.start:g} to "
                f"{span.end:g} {unit}".strip())
        out.append(f'<rect class="box" x="{_px(x)}" y="{y}" width="{_px(wide)}" height="{_ROW}" '
                   f'fill="{fill}"><title>{escape(told)}</title></rect>')
        if span.label and len(span.label) * _LETTER <= wide:
            out.append(f'<text class="on {ink}" x="{_px(x + wide / 2)}" y="{y + _ROW / 2 + 3.8:g}">'
                       f"{escape(span.label)}</text>")
    for tick in _ticks(start, end):
        x = left + (tick - start) * scale
        out.append(f'<path class="tick" d="M{_px(x)} {bottom - 2}v6"/>'
                   f'<text class="mid" x="{_px(x)}" y="{bottom + 18}">{tick:g}</text>')
    x, y = left, bottom + _AXIS
    if unit:
        out.append(f'<text class="end" x="{width - 14}" y="{y + 14}">time in {escape(unit)}</text>')
    for kind, name in legend.items():
        depths = sorted({span.depth for span in spans if span.kind == kind})
        for depth in depths:
            fill, _ = _shade(colours[kind], depth, deepest)
            out.append(f'<rect class="box key" x="{x}" y="{y + 2}" width="16" height="14" '
                       f'fill="{fill}"/>')
            x += 18
        out.append(f'<text x="{x + 4}" y="{y + 14}">{escape(name)}</text>')
        x += 22 + 7 * len(name)
    return "\n".join([*out, "</svg>"]) + "\n"


def perfetto(spans: Sequence[Span], tracks: Sequence[str] = (), title: str = "",
             microseconds: float = 1.0) -> dict[str, object]:
    """A trace in Chrome's JSON format, which ui.perfetto.dev opens: dump it with `json`.

    Args:
        microseconds: in one unit of the spans' times.

    Raises:
        ValueError: as `svg`.
    """
    names = _names(spans, tracks)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}}]
    for track, name in enumerate(names):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": track,
                       "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": track,
                       "args": {"sort_index": track}})
    events += [{"ph": "X", "name": f"{span.kind} {span.label}".strip(), "cat": span.kind,
                "pid": 0, "tid": span.track, "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds, "args": {"depth": span.depth}}
               for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(spans: Sequence[Span], tracks: Sequence[str]) -> list[str]:
    if not spans:
        raise ValueError("There is nothing to draw: a timeline needs at least one span.")
    for span in spans:
        if span.end < span.start or span.track < 0:
            raise ValueError(f"{span} cannot be drawn: tracks count from 0 and a span ends after "
                             "it starts.")
    count = max(len(tracks), 1 + max(span.track for span in spans))
    return [*tracks, *(f"rank {track}" for track in range(len(tracks), count))]


def _legend(spans: Iterable[Span], kinds: Mapping[str, str] | None) -> dict[str, str]:
    """Kind -> its name in the legend, of the kinds that occur."""
    found = dict.fromkeys(span.kind for span in spans)
    named = {kind: name for kind, name in (kinds or {}).items() if kind in found}
    return named | {kind: kind for kind in found if kind not in named}


def _shade(colour: tuple[str, str], depth: int, deepest: int) -> tuple[str, str]:
    """A box's colour, and the class of the text that reads on it."""
    part = depth / deepest if deepest else 0.0
    light, deep = ([int(end[i:i + 2], 16) for i in (1, 3, 5)] for end in colour)
    rgb = [round(a + part * (b - a)) for a, b in zip(light, deep, strict=True)]
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Black and white contrast equally with a luminance of 0.18 (WCAG's contrast ratio).
    return "#" + "".join(f"{c:02x}" for c in rgb), "dark" if luminance > 0.18 else "light"


def _ticks(start: float, end: float) -> list[float]:
    """Between 5 and 15 round numbers from start to end."""
    if end <= start:
        return [start]
    rough = (end - start) / 12
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(start / step)
    return [round(i * step, 9) for i in range(first, math.floor(end / step + 1e-9) + 1)]


def _px(value: float) -> str:
    return f"{round(value, 2):g}"
