"""Prometheus metrics: what requests waited for, and what the engine does.

A request is measured by its `Track`; the engine's own numbers are read when they are scraped.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kilter.serve.engine import Delta
from kilter.serve.server.errors import error_responses
from kilter.serve.stats import EngineStats

if TYPE_CHECKING:
    from kilter.serve.server.context import Context

# Upper bounds, seconds. A small model's step takes some milliseconds; a long prompt in a long queue
# minutes.
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_BETWEEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_RECENT = 256  # requests whose times are kept for a look at the present

_GAUGES = {
    "running": "Answers that run",
    "waiting": "Answers that wait to run, or to run again",
    "max_running": "Answers that may run together",
    "pages_total": "Pages of the KV cache",
    "pages_free": "Pages that hold nothing",
    "pages_cached": "Pages that only the prefix cache counts on",
    "pages_held": "Pages that running answers count on",
    "last_step_seconds": "Duration of the last step, seconds",
    "last_step_tokens": "Tokens that the last step computed",
    "weights_version": "How often the weights were replaced",
}
_COUNTERS = {
    "preemptions": "Running answers that had to give their pages back",
    "steps": "Steps that computed something",
    "failed_steps": "Steps that failed, with the answers in them",
    "computed_tokens": "Tokens that steps computed",
    "prompt_tokens": "Prompt tokens of answers that have begun",
    "cached_prompt_tokens": "Prompt tokens that were found in the prefix cache",
    "completion_tokens": "Tokens that were chosen",
}


class Metrics:
    """All metrics of one server, in a registry of their own.

    recent: of the last requests that have ended, seconds to the first token and mean seconds per
        token after it; None where there was none.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent: deque[tuple[float | None, float | None]] = deque(maxlen=_RECENT)
        self._stats: Callable[[], EngineStats] | None = None
        self._pids: tuple[int, ...] = ()
        self.requests = Counter(
            "kilter_requests", "Requests that have ended, by endpoint and how",
            ["endpoint", "outcome"], registry=self.registry)
        self._rejected = Counter(
            "kilter_rejected", "Requests that never reached the engine, by reason", ["reason"],
            registry=self.registry)
        self.first = Histogram(
            "kilter_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token", ["endpoint"],
            buckets=_FIRST, registry=self.registry)
        self.mean = Histogram(
            "kilter_time_per_output_token_seconds",
            "Mean time between an answer's tokens after the first, one value per answer",
            ["endpoint"], buckets=_BETWEEN, registry=self.registry)
        self.between = Histogram(
            "kilter_inter_token_seconds", "Time between two deltas of an answer", ["endpoint"],
            buckets=_BETWEEN, registry=self.registry)
        self.whole = Histogram(
            "kilter_e2e_seconds", "From a request's arrival at the engine to its end",
            ["endpoint"], buckets=_WHOLE, registry=self.registry)
        self._prompt = Histogram(
            "kilter_request_prompt_tokens", "Prompt tokens of a request", ["endpoint"],
            buckets=[4 ** i for i in range(1, 10)], registry=self.registry)
        self.registry.register(_EngineCollector(lambda: self._stats and self._stats(),
                                                lambda: self._pids))

    def track(self, endpoint: str, prompt_tokens: int) -> Track:
        """Begins to measure a request that is handed to the engine now.

        endpoint: a short fixed name such as "chat", "completions" or "embeddings".
        """
        self._prompt.labels(endpoint).observe(prompt_tokens)
        return Track(self, endpoint)

    def rejected(self, reason: str) -> None:
        """Counts a request that never reached the engine: "queue_full", "invalid", …"""
        self._rejected.labels(reason).inc()

    def bind(self, stats: Callable[[], EngineStats], pids: tuple[int, ...] = ()) -> None:
        """Where the engine's numbers are read at every scrape, and its processes by rank."""
        self._stats, self._pids = stats, pids

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Track:
    """The times of one request and of each of its answers. For one event loop."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._between = metrics.between.labels(endpoint)
        self._begin = time.monotonic()
        self._first: float | None = None  # seconds to the first token
        self._answers: dict[int, _Times] = {}
        self._open = True

    def delta(self, delta: Delta) -> None:
        """Takes what the engine says of an answer. Its time is that of the step that made it, so a
        client that reads slowly, or all at the end, makes no difference."""
        if not delta.choices:
            return
        times = self._answers.get(delta.index)
        if times is not None:
            self._between.observe(delta.time - times.last)
            times.last = delta.time
            times.tokens += len(delta.choices)
            return
        self._answers[delta.index] = _Times(delta.time, len(delta.choices))
        if self._first is None:
            self._first = max(delta.time - self._begin, 0.0)
            self._metrics.first.labels(self._endpoint).observe(self._first)

    def done(self, outcome: str) -> None:
        """The request has ended, with "stop", "length", "abort", "error" or "timeout". Only the
        first call counts."""
        if not self._open:
            return
        self._open = False
        metrics, endpoint = self._metrics, self._endpoint
        metrics.requests.labels(endpoint, outcome).inc()
        metrics.whole.labels(endpoint).observe(time.monotonic() - self._begin)
        means = [(times.last - times.first) / (times.tokens - 1)
                 for times in self._answers.values() if times.tokens > 1]
        for mean in means:
            metrics.mean.labels(endpoint).observe(mean)
        metrics.recent.append((self._first, sum(means) / len(means) if means else None))


class _Times:
    """When an answer's first and last tokens came (`time.monotonic`), and how many there are."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, first: float, tokens: int) -> None:
        self.first = self.last = first
        self.tokens = tokens


class _EngineCollector(Collector):
    """The engine's numbers, read when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats | None],
                 pids: Callable[[], tuple[int, ...]]) -> None:
        self._stats, self._pids = stats, pids

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kilter_{name}", text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kilter_{name}", text, getattr(stats, name))
        yield SummaryMetricFamily("kilter_step_seconds", "Duration of steps, seconds",
                                  stats.steps, stats.step_seconds)
        memory = GaugeMetricFamily("kilter_resident_bytes", "Memory of the machine that each of "
                                   "the engine's processes holds", labels=["rank"])
        for rank, pid in enumerate(self._pids()):
            if (size := _resident(pid)) is not None:
                memory.add_metric([str(rank)], size)
        yield memory


def _resident(pid: int) -> int | None:
    """Bytes, where the system tells and the process is there."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def routes(context: Context) -> APIRouter:
    """GET /metrics."""
    router = APIRouter(tags=["Operation"])

    @router.get("/metrics", summary="Metrics in Prometheus' text format",
                response_class=PlainTextResponse, responses=error_responses(401))
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
