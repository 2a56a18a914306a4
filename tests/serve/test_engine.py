"""The engine against a plain one, under anything that may happen: the same tokens, text and
log-probabilities to the bit, every request ends, and no page is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kilter.serve.engine import Engine, EngineConfig
from kilter.serve.grammar import GrammarCompiler
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.request import Status
from tests.serve.tiny_engine import (
    CONTEXT,
    EOT,
    PIECES,
    VOCAB,
    Result,
    check_result,
    drain,
    make_engine,
    serve,
    tokenizer,
    weights,
)

PREFIXES = [[3, 4, 5, 6, 7, 8, 9, 10] * 3, [3, 4, 5, 6, 20, 21, 22, 23] * 3, [17] * 24]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), (EOT,))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 60]))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    grammar = draw(st.sampled_from([None] * 7 + ["[ab]{1,4}", "(ab)+c", "x{3}"]))
    return SamplingParams(
        max_tokens=max_tokens, n=n, seed=draw(st.integers(0, 3)),
        best_of=draw(st.sampled_from([None, None, None, n + 1])),
        temperature=draw(st.sampled_from([0.0, 0.8, 3.0])),
        top_k=draw(st.sampled_from([0, 5])), top_p=draw(st.sampled_from([1.0, 0.7])),
        stop=draw(st.lists(st.sampled_from(["a", "ab", "abb", "é", "-", "bc", "\ufffd"]),
                           max_size=3)),
        stop_token_ids=draw(st.lists(st.sampled_from([17, 18, EOT]), max_size=1)),
        include_stop=draw(st.booleans()),
        min_tokens=draw(st.integers(0, min(max_tokens, 6))), ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1),
                                        st.sampled_from([-100.0, 1.0, 100.0]), max_size=2)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        grammar=None if grammar is None else GrammarSpec("regex", grammar))


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from(PREFIXES))[:draw(st.integers(0, 24))]
    return prefix + draw(st.lists(st.integers(3, VOCAB - 1), min_size=not prefix, max_size=4))


@dataclass
class Sent:
    prompt: list[int]
    params: SamplingParams
    results: dict[int, Result] = field(default_factory=dict)
    aborted: bool = False
    mixed: set[int] = field(default_factory=set)  # answers upon keys and values of two versions

    def answers(self) -> int:
        return self.params.best_of or self.params.n


class EngineMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 3, 16, 64]), spare=st.integers(0, 40),
                prefill=st.sampled_from([1, 5, 64]), mixed=st.sampled_from([1, 4, 64]),
                policy=st.sampled_from(["fcfs", "prefix", "priority"]),
                running=st.sampled_from([1, 3, 50]), eager=st.booleans())
    def start(self, page_size: int, spare: int, prefill: int, mixed: int, policy: str,
              running: int, eager: bool) -> None:
        self.engine = make_engine(CONTEXT + spare, page_size, prefill_tokens=prefill,
                                  mixed_tokens=mixed, policy=policy, max_running=running)
        if eager:
            crowded(self.engine)
        self.sent: dict[int, Sent] = {}

    @rule(prompt=prompts(), params=sampling_params(), priority=st.integers(-1, 2),
          salt=st.sampled_from([None, None, "other"]), copies=st.sampled_from([1, 1, 2]))
    def submit(self, prompt: list[int], params: SamplingParams, priority: int, salt: Any,
               copies: int) -> None:
        for _ in range(copies):
            number = self.engine.submit(prompt, params, priority=priority, salt=salt)
            assert number not in self.sent
            self.sent[number] = Sent(list(prompt), params)

    @rule(count=st.sampled_from([1, 1, 2, 5]))
    def step(self, count: int) -> None:
        for _ in range(count):
            for delta in self.engine.step():
                sent = self.sent[delta.request]
                if sent.aborted:
                    assert not delta.choices and not delta.text
                    assert delta.finish_reason in ("abort", "length")
                sent.results.setdefault(delta.index, Result()).take(delta)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sent)))
        self.engine.abort(number)
        self.sent[number].aborted = True
        assert number not in {a.number for a in self.engine._answers.values()}

    @rule()
    def flush_cache(self) -> None:
        self.engine.flush_cache()

    @precondition(lambda self: self.engine.weights_version < 3)
    @rule(mode=st.sampled_from(["restart", "restart", "continue", "abort"]))
    def update_weights(self, mode: Any) -> None:
        for answer in self.engine._answers.values():
            sent = self.sent[answer.number]
            if mode == "continue" and answer.request.status is Status.RUNNING:
                sent.mixed.add(answer.index)
        version = self.engine.weights_version + 1
        assert self.engine.update_weights(weights(version), storage="fp32",
                                          in_flight=mode) == version

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.busy:
                break
            self.step(1)
        assert not self.engine.busy, "a request does not end"
        assert self.engine.tree.pages.num_held == 0
        self.engine.flush_cache()
        assert self.engine.tree.pages.num_free == self.engine.tree.pages.num_pages
        for sent in self.sent.values():
            assert sorted(sent.results) == list(range(sent.answers()))
            for index, result in sent.results.items():
                assert result.finish_reason is not None
                if index not in sent.mixed and result.finish_reason != "abort":
                    params = sent.params
                    if sent.answers() > params.n and params.logprobs is None:
                        params = SamplingParams(**{**vars(params), "logprobs": 0})
                    check_result(result, sent.prompt, params, index, compiler=compiler())


EngineMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 5, 17]


def test_nothing_is_queued_for_a_bad_request() -> None:
    engine = make_engine(64)
    bad: list[tuple[Any, SamplingParams, str]] = [
        ([], GREEDY, "empty"),
        ([3, VOCAB], GREEDY, f"token id {VOCAB}, outside"),
        ([-1], GREEDY, "token id -1, outside"),
        (["a"], GREEDY, "must be a list of token ids"),
        ([3.0], GREEDY, "must be a list of token ids"),
        ([3] * CONTEXT, GREEDY, "leaves no room"),
        ([3], SamplingParams(logit_bias={VOCAB: 1}), "outside the vocabulary"),
        ([3], SamplingParams(grammar=GrammarSpec("regex", "(")), "regular expression"),
    ]
    for prompt, params, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, params)
    assert not engine.busy
    check_result(serve(engine, PROMPT, GREEDY), PROMPT, GREEDY)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"page_size is 65 .*; kv_tokens is 0 .*; max_context is"):
        EngineConfig(kv_tokens=0, page_size=65, max_context=0)


def test_abort_between_submit_and_the_first_step() -> None:
    engine = make_engine()
    number = engine.submit(PROMPT, GREEDY)
    engine.abort(number)
    engine.abort(number)
    engine.abort(12345)
    result = drain(engine)[number, 0]
    assert result.finish_reason == "abort" and not result.tokens
    assert engine.tree.pages.num_free == engine.tree.pages.num_pages


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failing_step_ends_its_requests_alone_and_loses_no_news(
        monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    """Failing in the model, and after it between the answers of a step."""
    engine = make_engine(max_running=2, page_size=1)
    for where in ("run", "_advance"):
        first, second, waiting = (engine.submit([i, *PROMPT], GREEDY) for i in (3, 4, 5))
        gone = engine.submit(PROMPT, GREEDY)
        for _ in range(3):
            assert all(delta.finish_reason is None for delta in engine.step())
        engine.abort(gone)
        real = engine.executor.run if where == "run" else engine._advance
        calls = []

        def fail(*args: Any, calls: list[int] = calls, real: Any = real, where: str = where) -> Any:
            calls.append(1)
            if len(calls) == 1 and where == "_advance":
                return real(*args)  # the first answer of the step goes well
            raise kind("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor if where == "run" else engine, where, fail)
            with pytest.raises(kind, match="the device is gone"):
                engine.step()
        results: dict[int, list[Any]] = {}
        while engine.busy:
            for delta in engine.step():
                results.setdefault(delta.request, []).append(delta)
        assert [d.finish_reason for d in results[gone]] == ["abort"]
        for number in (first, second):
            assert [d.finish_reason for d in results[number]][-1] == "error"
            assert results[number][-1].error == "The step this request was in failed."
        # What was chosen before the failure is reported.
        assert len([c for d in results[first] for c in d.choices]) == (where == "_advance")
        assert len([c for d in results[waiting] for c in d.choices]) == GREEDY.max_tokens
        engine.check_integrity()
        assert engine.tree.pages.num_held == 0
        check_result(serve(engine, PROMPT, GREEDY), PROMPT, GREEDY)


def test_a_failed_recording_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit(PROMPT, GREEDY)
    engine.step()
    real = type(engine.model).forward

    def half(*args: Any) -> Any:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "forward", half)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    drain(engine)
    check_result(serve(engine, PROMPT, GREEDY), PROMPT, GREEDY)


def test_a_sampling_error_ends_one_answer_alone() -> None:
    """Broken logits for one request, and a grammar that cannot be followed any further."""
    engine = make_engine()
    healthy = engine.submit(PROMPT, GREEDY)
    broken = engine.submit(PROMPT[1:], GREEDY)
    lost = engine.submit(PROMPT[2:], GREEDY)
    engine.step()
    engine.step()

    class Lost:
        def mask(self, logits_V: Any) -> None:
            pass

        def accept(self, token: int) -> None:
            raise ValueError("the parser gave up")

    class Nothing(Lost):
        def mask(self, logits_V: Any) -> None:
            raise ValueError("no token fits")

    for answer in engine._answers.values():
        if answer.number == broken:
            answer.state.grammar = Nothing()
        if answer.number == lost:
            answer.state.grammar = Lost()
    results = drain(engine)
    assert results[broken, 0].finish_reason == "error" == results[lost, 0].finish_reason
    assert results[broken, 0].error == "no token fits" and not results[broken, 0].tokens
    assert results[lost, 0].error == "the parser gave up" and len(results[lost, 0].tokens) == 1
    assert len(results[healthy, 0].tokens) == 10 and results[healthy, 0].finish_reason == "length"


def crowded(engine: Engine) -> Engine:
    """Admits whoever comes, so that preemption is common."""
    engine.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("prompt_logprobs", [0, 3])
def test_prompt_logprobs_survive_chunks_preemption_and_a_warm_cache(
        chunk: int, prompt_logprobs: int) -> None:
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=0,
                            prompt_logprobs=prompt_logprobs)
    engine = crowded(make_engine(32, 1, prefill_tokens=chunk, mixed_tokens=chunk))
    for _ in range(3):
        before = engine.scheduler.preemptions
        numbers = [engine.submit([3 + i, *PROMPT], params) for i in range(4)]
        results = drain(engine)
        for i, number in enumerate(numbers):
            check_result(results[number, 0], [3 + i, *PROMPT], params, context=32)
            assert results[number, 0].cached == 0
        assert engine.scheduler.preemptions > before


@pytest.mark.parametrize("mode", ["restart", "continue", "abort"])
def test_weights_change_under_a_preempted_answer_and_a_half_scored_prompt(mode: Any) -> None:
    """Neither is running when (or is half way through its prompt as) the weights change."""
    engine = crowded(make_engine(24, 1, prefill_tokens=5, mixed_tokens=5))
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
    prompt = PROMPT[:6]
    first, second = engine.submit(prompt, params), engine.submit(prompt[::-1], params)
    results: dict[int, Result] = {first: Result(), second: Result()}
    while not engine.scheduler.preemptions:
        for delta in engine.step():
            results[delta.request].take(delta)
    assert engine.scheduler.waiting and results[second].tokens
    engine.update_weights(weights(1), storage="fp32", in_flight=mode)
    for _ in range(100):
        for delta in engine.step() if engine.busy else ():
            results[delta.request].take(delta)
    if mode == "abort":
        assert [r.finish_reason for r in results.values()] == ["abort", "abort"]
    else:
        check_result(results[second], prompt[::-1], params)
        assert set(results[second].versions) == {0, 1}

    scored = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=1)
    number = engine.submit(PROMPT, scored)
    engine.step()
    engine.update_weights(weights(2), storage="fp32", in_flight=mode)
    result = drain(engine)[number, 0]
    if mode == "abort":
        assert result.finish_reason == "abort" and result.prompt is None
    elif mode == "restart":
        check_result(result, PROMPT, scored)


def test_tokens_after_a_weight_update_belong_to_the_new_weights_or_to_the_old_cache() -> None:
    """`continue` goes on upon the old keys and values, so it differs from `restart`, and nothing
    of it is shared with others."""
    results = {}
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    for mode in ("restart", "continue"):
        engine = make_engine(page_size=1)
        engine.submit(PROMPT, params)
        result = Result()
        for _ in range(4):
            for delta in engine.step():
                result.take(delta)
        engine.update_weights(weights(1), storage="fp32", in_flight=mode)  # type: ignore[arg-type]
        while engine.busy:
            for delta in engine.step():
                result.take(delta)
        assert result.versions == [0] * 4 + [1] * 8
        results[mode] = [c.logprob for c in result.choices]
        assert (engine.tree.num_pages == 0) == (mode == "continue")
        number = engine.submit(PROMPT, params)
        again = drain(engine)[number, 0]
        assert again.cached == (len(PROMPT) - 1 if mode == "restart" else 0)
        again.versions = [1] * 12
        check_result(again, PROMPT, params)
    assert results["restart"] != results["continue"]
    assert results["restart"][:4] == results["continue"][:4]


def test_a_grammar_that_is_complete_ends_the_answer() -> None:
    engine = make_engine()
    for ignore_eos in (False, True):
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=ignore_eos,
                                grammar=GrammarSpec("regex", "x{3}"), seed=0)
        result = serve(engine, PROMPT, params)
        assert result.text == "xxx" and result.finish_reason == "stop"
        check_result(result, PROMPT, params, compiler=compiler())


def test_an_answer_without_tokens_has_no_text() -> None:
    """Though the prompt ends inside a character."""
    engine = make_engine()
    prompt = [3, PIECES.index("Ã")]
    for params in (SamplingParams(max_tokens=0, prompt_logprobs=0), SamplingParams(max_tokens=0)):
        result = serve(engine, prompt, params)
        assert (result.text, result.tokens, result.finish_reason) == ("", [], "length")
