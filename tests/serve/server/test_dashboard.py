"""The Grafana dashboard asks for nothing that /metrics does not give."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kilter.serve.answer import Delta
from kilter.serve.sampler import Choice
from kilter.serve.server.metrics import Metrics
from kilter.serve.stats import EngineStats

DASHBOARD = Path(__file__).parents[3] / "docs/dashboards/kilter-grafana.json"


def exposed() -> dict[str, set[str]]:
    """Sample names of /metrics after one request of each kind, with their labels."""
    metrics = Metrics()
    metrics.bind(EngineStats)
    track = metrics.track("chat", 3)
    for _ in range(2):
        track.delta(Delta(0, 0, (Choice(1),)))
    track.done("stop")
    metrics.rejected("queue_full")
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def strings(value: Any) -> list[str]:
    """Every string of a JSON value that may be a query."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in strings(item)]


def test_every_metric_and_label_of_the_dashboard_is_exposed() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    labels = exposed()
    asked = [text for text in strings(dashboard) if re.search(r"\bkilter_", text)]
    assert len(asked) > 20
    for query in asked:
        names = re.findall(r"\bkilter_\w+", query)
        assert names and set(names) <= labels.keys(), query
        for by in re.findall(r"by \(([^)]*)\)", query):
            wanted = {label.strip() for label in by.split(",")}
            assert all(wanted <= labels[name] for name in names), query


def test_every_panel_has_a_place_of_its_own_and_a_description() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
