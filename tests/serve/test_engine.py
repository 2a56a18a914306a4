"""The engine against a plain one, under anything that may happen: the same tokens, text and
log-probabilities to the bit, every request ends, and no page is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kilter.serve.engine import Engine, EngineConfig
from kilter.serve.grammar import GrammarCompiler
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.request import Status
from kilter.serve.sampler import SamplingError
from tests.serve.tiny_engine import (
    CONTEXT,
    EOS,
    EOT,
    VOCAB,
    Result,
    check_result,
    drain,
    make_engine,
    rows_of,
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
                running=st.sampled_from([1, 3, 50]))
    def start(self, page_size: int, spare: int, prefill: int, mixed: int, policy: str,
              running: int) -> None:
        self.engine = make_engine(CONTEXT + spare, page_size, prefill_tokens=prefill,
                                  mixed_tokens=mixed, policy=policy, max_running=running)
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
    max_examples=30, stateful_step_count=25, deadline=None,
    suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase
