"""The engine's numbers and pictures against a recount."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kilter.serve.params import SamplingParams
from tests.serve.tiny_engine import drain, make_engine

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 5, 17, 20, 21, 4, 4, 6]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def test_counters_are_what_happened() -> None:
    engine = make_engine(256, 4, max_running=2, prefill_tokens=8)
    stats = engine.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.hit_rate) == (0, 0, 0, 0.0)
    assert stats.pages_total == stats.pages_free == 64 and stats.page_size == 4
    for first in (3, 4, 5):
        engine.submit([first, *PROMPT], PARAMS)
    tokens = chosen = 0
    seconds = 0.0
    while engine.busy:
        before = engine.stats()
        chosen += sum(len(delta.choices) for delta in engine.step())
        stats = engine.stats()
        tokens += stats.last_step_tokens
        seconds += stats.last_step_seconds
        assert stats.steps == before.steps + 1 and stats.completion_tokens == chosen
        assert stats.running <= 2 and stats.running + stats.waiting <= 3
        assert stats.pages_free + stats.pages_cached + stats.pages_held == 64
    assert stats.computed_tokens == tokens == 3 * (len(PROMPT) + 1 + 5)
    assert stats.step_seconds == pytest.approx(seconds)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (3 * 18, 0)
    assert stats.completion_tokens == 18 and stats.preemptions == 0
    engine.submit([3, *PROMPT], PARAMS)
    drain(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (4 * 18, 17)
    assert stats.hit_rate == 17 / 72


def test_a_preempted_prompt_counts_once_and_a_failed_step_is_counted(
        monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(32, 1, prefill_tokens=5, mixed_tokens=5)
    engine.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    for first in (3, 4):
        engine.submit([first, *PROMPT[:8]], SamplingParams(
            max_tokens=20, temperature=0, ignore_eos=True))
    drain(engine)
    stats = engine.stats()
    assert stats.preemptions and (stats.prompt_tokens, stats.cached_prompt_tokens) == (18, 0)
    engine.submit(PROMPT, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.stats().failed_steps == 1
    assert engine.stats().steps == stats.steps + 1


def test_an_integrity_error_loses_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    number = engine.submit(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))

    def broken() -> None:
        raise AssertionError("pages were lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "check_integrity", broken)
        with pytest.raises(AssertionError, match="pages were lost"):
            engine.step()
        assert [(d.request, d.finish_reason) for d in engine.step()] == [(number, "length")]
    assert not engine.busy


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_snapshot_is_a_recount(page_size: int) -> None:
    engine = make_engine(320, page_size, max_running=3, prefill_tokens=8, mixed_tokens=8)
    for i in range(4):
        engine.submit([*PROMPT[:9], 3 + i, *PROMPT], PARAMS)
    drain(engine)
    numbers = {engine.submit([*PROMPT, 3 + i], SamplingParams(
        max_tokens=9, n=1 + i % 2, temperature=0, ignore_eos=True)) for i in range(4)}
    numbers.add(engine.submit_embedding(PROMPT))
    pages = engine.tree.pages
    for _ in range(200):
        snapshot: Any = json.loads(json.dumps(engine.snapshot()))
        scheduler = engine.scheduler
        requests = [*scheduler.running, *scheduler.waiting]
        assert snapshot["requests_total"] == len(requests)
        for view, request in zip(snapshot["requests"], requests, strict=True):
            task = engine._answers[request]
            assert (view["id"], view["index"]) == (task.number, task.index)
            assert view["status"] == request.status.value
            assert [view[k] for k in ("prompt_tokens", "cached", "computed", "length",
                                      "max_length", "pages")] == [
                request.prompt_length, request.cached, request.computed, request.length,
                request.max_length, len(request.pages)]
        held = [sum(page in r.pages for r in scheduler.running) for page in range(pages.num_pages)]
        in_tree = {page for root in engine.tree._roots.values() for node in root.descend()
                   for page in node.pages}
        assert snapshot["pages"] == "".join(
            str(min(count, 9)) if count else "c" if page in in_tree else "0"
            for page, count in enumerate(held))
        assert sum(node["pages"] for node in snapshot["nodes"]) == snapshot["tree_pages"]
        assert sum(node["tokens"] for node in snapshot["nodes"]) == snapshot["tree_tokens"]
        ids = [node["id"] for node in snapshot["nodes"]]
        assert len(set(ids)) == len(ids)
        for place, node in enumerate(snapshot["nodes"]):
            assert node["parent"] is None or node["parent"] in ids[:place]
            assert 0 < node["tokens"] <= node["pages"] * page_size
        assert len(engine.snapshot(limit=2)["nodes"]) <= 2
        assert len(engine.snapshot(limit=2)["requests"]) <= 2
        if not engine.busy:
            break
        work: dict[tuple[int, int], int] = {}
        real = engine.executor.run

        def note(chunks: Any, work: dict[Any, int] = work, real: Any = real) -> Any:
            work.update({(engine._answers[c.request].number, engine._answers[c.request].index):
                         c.size for c in chunks})
            return real(chunks)

        engine.executor.run = note  # type: ignore[method-assign]
        engine.step()
        engine.executor.run = real  # type: ignore[method-assign]
        assert {(part["id"], part["index"]): part["tokens"]
                for part in engine.snapshot()["batch"]} == work
    assert not engine.busy and {part["id"] for part in snapshot["batch"]} <= numbers
