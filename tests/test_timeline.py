"""Drawings of timelines: well-formed, nothing left out, nothing that is not there."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import pipelines
from kilter.parallel.pipeline.generators import NAMES
from kilter.parallel.pipeline.simulate import FORMULAS
from kilter.report.timeline import _PALETTE, Span, _shade, perfetto, svg

NS = "{http://www.w3.org/2000/svg}"
SPANS = [Span(0, 0, 2, "0", "F"), Span(1, 2, 4, "0", "F"), Span(1, 4, 8, "0", "B", 1),
         Span(0, 8, 12, "<&\">", "B")]

spans = st.lists(st.builds(
    lambda track, start, time, label, kind, depth: Span(track, start, start + time, label, kind,
                                                        depth),
    st.integers(0, 9), st.floats(0, 1e6), st.floats(0, 1e6),
    st.text(st.characters(codec="utf-8", exclude_categories=("C",))), st.sampled_from("FBIWxyz&<"),
    st.integers(0, 4)), min_size=1, max_size=12)


def boxes(text: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(text).iter(f"{NS}rect")
            if rect.get("class") == "box"]


def test_a_box_per_span_where_it_belongs() -> None:
    drawn = svg(SPANS, ["first"], title="a & b", unit="s", width=700)
    found = boxes(drawn)
    assert len(found) == len(SPANS)
    left, right = float(found[0].attrib["x"]), 700 - 14
    unit = (right - left) / 12
    for span, box in zip(SPANS, found, strict=True):
        assert float(box.attrib["x"]) == pytest.approx(left + unit * span.start, abs=0.02)
        assert float(box.attrib["width"]) == pytest.approx(unit * (span.end - span.start), abs=0.02)
        assert (box.attrib["y"] == found[0].attrib["y"]) == (span.track == 0)
    texts = [text.text for text in ElementTree.fromstring(drawn).iter(f"{NS}text")]
    assert {"first", "rank 1", "F", "B", "<&\">", "time in s", "0", "12"} <= set(texts)
    assert "B <&\">, first, 8 to 12 s" in [t.text for t in found[-1].iter(f"{NS}title")]
    assert len({box.attrib["fill"] for box in found}) == 3  # F, B, and B of depth 1
    assert "prefers-color-scheme: dark" in drawn


def test_labels_that_do_not_fit_are_left_out() -> None:
    many = [Span(0, i, i + 1, "12345", "F") for i in range(300)]
    root = ElementTree.fromstring(svg(many, width=600))
    assert not [text for text in root.iter(f"{NS}text") if (text.get("class") or "")[:2] == "on"]


def test_the_legend_has_only_what_occurs() -> None:
    kinds = {"W": "weights", "B": "backward", "F": "forward"}
    root = ElementTree.fromstring(svg(SPANS, kinds=kinds))
    texts = [text.text for text in root.iter(f"{NS}text")]
    assert texts[-2:] == ["backward", "forward"]
    assert len([r for r in root.iter(f"{NS}rect") if r.get("class") == "box key"]) == 3


def test_colours_agree_between_drawings_with_the_same_kinds() -> None:
    kinds = {"F": "forward", "B": "backward", "W": "weights"}
    both, one = [Span(0, 0, 1, "", "B"), Span(0, 1, 2, "", "W")], [Span(0, 0, 1, "", "W")]
    fills = [box.attrib["fill"] for some in (both, one) for box in boxes(svg(some, kinds=kinds))]
    assert fills[1] == fills[2] != fills[0]


def test_text_reads_on_every_box() -> None:
    """WCAG's contrast ratio of at least 4.5, from its own definition."""
    def luminance(colour: str) -> float:
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for colour in _PALETTE:
        for depth in range(5):
            fill, ink = _shade(colour, depth, 4)
            text = luminance({"dark": "#000000", "light": "#ffffff"}[ink])
            low, high = sorted((luminance(fill), text))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (colour, depth)


@given(spans, st.lists(st.text("ab<&>\"' ", max_size=5), max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_spans_make_good_files(some: list[Span], tracks: list[str]) -> None:
    assert len(boxes(svg(some, tracks, title="<t>", unit="<u>"))) == len(some)
    events = json.loads(json.dumps(perfetto(some, tracks)))["traceEvents"]
    assert [(e["tid"], e["ts"], e["cat"]) for e in events if e["ph"] == "X"] == [
        (span.track, span.start, span.kind) for span in some]


def test_perfetto_has_names_and_microseconds() -> None:
    trace = perfetto(SPANS, ["first"], title="mine", microseconds=1000)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = [e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")]
    assert names == ["mine", "first", "rank 1"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("F 0", 0, 2000), ("F 0", 2000, 2000), ("B 0", 4000, 4000), ('B <&">', 8000, 4000)]


def test_what_cannot_be_drawn() -> None:
    for make in (svg, perfetto):
        with pytest.raises(ValueError, match="nothing to draw"):
            make([])
        with pytest.raises(ValueError, match="a span ends after it starts"):
            make([Span(0, 2, 1, "", "F")])


@pytest.mark.parametrize("name", NAMES)
def test_documented_drawings_and_traces_are_what_the_code_says(name: str) -> None:
    """A box per computing action, with its micro-batch; made anew by bench.pipelines --write."""
    actions = [action for rank in pipelines.run(name, *pipelines.DRAWN).ranks for action in rank
               if action.action.kind.computes]
    drawn = (pipelines.DOCS / "images" / f"pipeline-{name}.svg").read_text()
    assert drawn == pipelines.drawing(name)
    assert len(boxes(drawn)) == len(actions)
    trace = (pipelines.DOCS / "traces" / f"pipeline-{name}.json").read_text()
    assert trace == pipelines.trace(name)
    events = json.loads(trace)["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(actions)


def test_documented_table_is_what_the_code_says() -> None:
    page = (pipelines.DOCS / "pipelines.md").read_text()
    assert pipelines.section() in page
    for name, formula in FORMULAS.items():
        assert any(line.startswith(f"| `{name}` | {formula.text}") and
                   formula.holds.replace("always", "all") in line for line in page.splitlines())
