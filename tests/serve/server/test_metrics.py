"""/metrics: what Prometheus reads is what happened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kilter.serve.engine import Delta
from kilter.serve.sampler import Choice
from kilter.serve.server import metrics as module
from kilter.serve.server.metrics import Metrics
from tests.serve.server.conftest import Running, StartServer, make_engine


def samples(text: str) -> dict[str, float]:
    """Every sample: name{labels} -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(server: Running) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def test_counts_are_those_of_the_responses(start_server: StartServer) -> None:
    server = start_server(make_engine())
    with server.client() as client:
        usages = []
        for n, text in ((1, "a" * 40), (2, "a" * 40), (1, "b" * 7)):
            usages.append(client.post("/v1/completions", json={
                "prompt": text, "max_tokens": 5, "n": n, "ignore_eos": True}).json()["usage"])
        client.post("/v1/embeddings", json={"input": "abc"})
        assert client.post("/v1/completions", json={"prompt": 7}).status_code == 400
    found = scrape(server)
    assert found["kilter_completion_tokens_total"] == sum(u["completion_tokens"] for u in usages)
    assert found["kilter_prompt_tokens_total"] == 40 + 2 * 40 + 7 + 3  # of every answer
    stats = server.context.engine.stats
    assert found["kilter_cached_prompt_tokens_total"] == stats.cached_prompt_tokens >= 2 * 39
    assert found["kilter_requests_total{endpoint=completions,outcome=length}"] == 3
    assert found["kilter_requests_total{endpoint=embeddings,outcome=stop}"] == 1
    for name, count in (("time_to_first_token", 3), ("time_per_output_token", 4), ("e2e", 3),
                        ("inter_token", 4 * 4)):
        assert found[f"kilter_{name}_seconds_count{{endpoint=completions}}"] == count
    assert found["kilter_steps_total"] == found["kilter_step_seconds_count"] == stats.steps
    assert found["kilter_running"] == found["kilter_waiting"] == found["kilter_pages_held"] == 0
    assert found["kilter_pages_total"] == stats.pages_total
    assert sum(found[f"kilter_pages_{state}"] for state in ("free", "cached", "held")) == (
        stats.pages_total)


def test_times_are_the_engines_however_late_a_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    # The module's clock alone: every event loop of this process goes by the real one.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics()
    track = metrics.track("chat", 5)
    now = 900.0  # everything is read at the end
    for time, index in ((100.5, 0), (100.75, 1), (101.0, 0), (101.5, 0), (102.75, 1)):
        track.delta(Delta(0, index, (Choice(1),), time=time))
    track.delta(Delta(0, 0, finish_reason="stop", time=500.0))  # no token: nobody waited for one
    track.done("stop")
    track.done("abort")  # it had ended
    found = samples(metrics.render().decode())
    assert found["kilter_time_to_first_token_seconds_sum{endpoint=chat}"] == 0.5
    assert found["kilter_time_to_first_token_seconds_count{endpoint=chat}"] == 1
    assert found["kilter_inter_token_seconds_sum{endpoint=chat}"] == 0.5 + 0.5 + 2.0
    assert found["kilter_time_per_output_token_seconds_sum{endpoint=chat}"] == 0.5 + 2.0
    assert found["kilter_e2e_seconds_sum{endpoint=chat}"] == 800.0
    assert found["kilter_requests_total{endpoint=chat,outcome=stop}"] == 1
    assert "kilter_requests_total{endpoint=chat,outcome=abort}" not in found
    assert list(metrics.recent) == [(0.5, 1.25)]


def test_a_request_without_tokens_has_no_token_times() -> None:
    metrics = Metrics()
    metrics.track("chat", 1).done("abort")
    metrics.rejected("queue_full")
    found = samples(metrics.render().decode())
    assert not any("time_to_first" in name for name in found if name.endswith("_count"))
    assert found["kilter_rejected_total{reason=queue_full}"] == 1
    assert list(metrics.recent) == [(None, None)]
