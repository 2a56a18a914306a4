"""The offline API: many requests in one call equal each alone, bit for bit; the rest of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kilter.serve.llm import LLM, Answer
from kilter.serve.params import BeamParams, SamplingParams
from tests.models import tiny
from tests.serve.tiny_tokenizer import save_byte_tokenizer

VOCAB = 131
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny.make("llama-plain", path)
    save_byte_tokenizer(path, VOCAB)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('only users and assistants talk here') }}{% endif %}"
        "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if shout %}!{% endif %}")
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, context=CONTEXT, kv_tokens=160, page_size=3, max_running=5)


def clean(llm: LLM) -> bool:
    """The engine is idle and holds nothing."""
    llm.engine.check_integrity()
    pages = llm.engine.tree.pages
    return not llm.engine.busy and not llm.engine.step() and pages.num_held == 0


def mixed(count: int) -> tuple[list[str | list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths with shared beginnings, and settings of every kind."""
    rng = random.Random(4)
    prompts: list[str | list[int]] = []
    settings = []
    for i in range(count):
        tail = "".join(rng.choice("abcde ") for _ in range(rng.randrange(1, 20)))
        text = rng.choice(["", "the common beginning ", "the common start "]) + tail
        prompts.append(text if i % 3 else [rng.randrange(VOCAB) for _ in range(1 + i % 30)])
        settings.append(SamplingParams(
            max_tokens=rng.choice([0, 1, 5, 20, 100]), seed=i, temperature=rng.choice([0, 0.5, 2]),
            top_k=rng.choice([0, 20]), top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]), stop=rng.choice([(), ("a",), ("bc", "\ufffd")]),
            logprobs=rng.choice([None, 0, 3]), prompt_logprobs=rng.choice([None, None, 1]),
            repetition_penalty=rng.choice([1.0, 1.2]), presence_penalty=rng.choice([0.0, 1.0]),
            logit_bias=rng.choice([{}, {5: -100.0, 6: 3.0}]), ignore_eos=rng.random() < 0.5,
            n=rng.choice([1, 1, 2]), best_of=rng.choice([None, None, 3])))
    return prompts, settings


def without_cache_hits(answers: list[Answer]) -> list[Answer]:
    return [replace(answer, cached_tokens=0) for answer in answers]


def test_many_at_once_equal_one_by_one(folder: Path, llm: LLM) -> None:
    prompts, settings = mixed(40)
    together = llm.generate(prompts, settings)
    assert clean(llm)
    alone = LLM(folder, context=CONTEXT, page_size=16)
    for i, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
        alone.engine.flush_cache()
        assert without_cache_hits([together[i]]) == alone.generate(prompt, params)
        assert len(together[i].completions) == params.n
    again = llm.generate(prompts, settings)  # upon a warm cache
    assert without_cache_hits(again) == without_cache_hits(together)
    assert sum(answer.cached_tokens for answer in again) > 0


def test_greedy_tokens_and_scores_equal_transformers(llm: LLM, oracle: Any) -> None:
    prompts = [[5, 6, 7], [9] * 20, list(range(10, 40))]
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True, logprobs=0)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)[0].tolist()
        assert prompt + answer.token_ids == expected and answer.prompt_ids == prompt
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([expected])).logits[0].log_softmax(-1)
        chosen = [float(logprobs[i, t]) for i, t in enumerate(expected[1:])]
        assert answer.logprobs == pytest.approx(chosen[len(prompt) - 1:], abs=1e-4)
        assert llm.score([expected])[0] == pytest.approx(chosen, abs=1e-4)
        # The same number whether it was chosen or is scored.
        assert llm.score([expected])[0][len(prompt) - 1:] == answer.logprobs
    assert llm.score("a") == [[]]
    assert len(llm.score([list(range(CONTEXT))])[0]) == CONTEXT - 1


@pytest.mark.parametrize("width,penalty,early", [
    (1, 1.0, False), (3, 1.0, False), (4, 0.0, True), (3, 2.0, "never"), (2, -0.5, False)])
def test_beam_search_equals_transformers(llm: LLM, oracle: Any, width: int, penalty: float,
                                         early: Any) -> None:
    prompt = [7, 8, 9, 10]
    ends = [2, *range(40, 90)]  # often among the likeliest, so that more than `width` are needed
    params = BeamParams(width, 9, penalty, early, stop_token_ids=tuple(ends))
    completions = llm.beam_search([prompt], params)[0].completions
    assert clean(llm)
    expected = oracle.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=9,
        length_penalty=penalty, early_stopping=early, do_sample=False,
        eos_token_id=ends, pad_token_id=130).tolist()
    assert len(completions) == width
    for completion, sequence in zip(completions, expected, strict=True):
        answer = sequence[len(prompt):]
        assert completion.token_ids == answer[:len(completion.token_ids)]
        assert set(answer[len(completion.token_ids):]) <= {130}
        ended = completion.token_ids[-1] in ends
        assert completion.finish_reason == ("stop" if ended else "length")
        text = completion.token_ids[:-1] if ended else completion.token_ids
        assert completion.text == llm.tokenizer.decode(text)


def test_beams_end_at_the_context(llm: LLM) -> None:
    params = BeamParams(2, 500, ignore_eos=True)
    completions = llm.beam_search([[5] * (CONTEXT - 3)], params)[0].completions
    assert [len(c.token_ids) for c in completions] == [3, 3]
    with pytest.raises(ValueError, match="leaves no room"):
        llm.beam_search([[5] * CONTEXT], params)


def test_the_forms_of_prompts_and_settings(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    ids = llm.tokenizer.encode("abc")
    for prompts in ("abc", ["abc"], ids, tuple(ids), [ids], np.array(ids), [np.array(ids)]):
        answers = llm.generate(prompts, params)  # type: ignore[arg-type]
        assert [a.prompt_ids for a in answers] == [ids]
    assert llm.generate([], params) == []
    assert len(llm.generate(["a", [5]], [params, replace(params, max_tokens=1)])[1].token_ids) == 1
    assert llm.generate("abc")[0].finish_reason in ("stop", "length")


def test_progress_counts_answers(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    params = [SamplingParams(max_tokens=m, n=2, ignore_eos=True) for m in (1, 5, 0)]
    llm.generate(["a", "b", "c"], params, progress=lambda *counts: seen.append(counts))
    assert {total for _, total in seen} == {6} and seen[-1] == (6, 6)
    assert seen == sorted(seen) and len({done for done, _ in seen}) > 1


def test_an_interrupted_call_leaves_a_clean_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = llm.generate("abc", params)[0].token_ids

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 9, params, progress=interrupt)
    assert clean(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"] * 9, params)
    assert clean(llm)
    assert llm.generate("abc", params)[0].token_ids == expected


def test_one_bad_request_and_nothing_is_computed(llm: LLM) -> None:
    good = SamplingParams(max_tokens=3)
    for prompts, params, message in [
        (["a", "", "b"], good, "Prompt 1 cannot be served. The prompt is empty"),
        ([[3], [VOCAB]], good, "Prompt 1 cannot be served. .* outside the vocabulary"),
        ([[5] * CONTEXT], good, "Prompt 0 cannot be served. .* no room for an answer"),
        (["a", "b"], [good], "2 prompts but 1 sampling settings"),
        (["a"], replace(good, stop_token_ids=(VOCAB,)), "stop_token_ids has token ids outside"),
        ([[0.5]], good, "must be a text or a sequence of token ids"),
        ([""], good, "empty"), ([[]], good, "empty"),
    ]:
        steps = llm.engine.scheduler.steps
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
        assert llm.engine.scheduler.steps == steps and clean(llm)
    assert len(llm.generate("a", replace(good, ignore_eos=True))[0].token_ids) == 3


def test_n_answers_are_distinct_and_best_of_chooses_among_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=3, n=4, temperature=1.5)
    four = llm.generate("abc", params)[0].completions
    assert len({tuple(c.token_ids) for c in four}) == 4
    assert all(not c.logprobs for c in four)
    assert [c.token_ids for c in llm.generate("abc", replace(params, n=2))[0].completions] == [
        c.token_ids for c in four[:2]]
    scored = llm.generate("abc", replace(params, logprobs=0))[0].completions
    best = sorted(scored, key=lambda c: -sum(c.logprobs) / len(c.logprobs))[:2]
    answer = llm.generate("abc", replace(params, n=2, best_of=4))[0]
    assert [c.token_ids for c in answer.completions] == [c.token_ids for c in best]
    assert all(not c.logprobs and len(c.choices) == len(c.token_ids) for c in answer.completions)
    kept = llm.generate("abc", replace(params, n=2, best_of=4, logprobs=1))[0].completions
    assert [c.logprobs for c in kept] == [c.logprobs for c in best]
    assert answer.text == answer.completions[0].text


def test_chat_is_its_template_and_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    expected = llm.generate("u:hi;a:yes;", params)
    assert llm.chat(chat, params)[0].prompt_ids == expected[0].prompt_ids
    assert llm.chat(chat, params)[0].token_ids == expected[0].token_ids
    both = llm.chat([chat, chat[:1]], params, shout=True)
    assert [llm.tokenizer.decode(a.prompt_ids) for a in both] == ["u:hi;a:yes;!", "u:hi;!"]
    with pytest.raises(ValueError, match="only users and assistants talk here"):
        llm.chat([{"role": "system", "content": "x"}], params)


def test_settings_that_do_not_go_together(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"context of 300 .* from 2 to this model's 256"):
        LLM(folder, context=300)
    with pytest.raises(ValueError, match="page_size is 100"):
        LLM(folder, page_size=100)
    with pytest.raises(ValueError, match="policy is 'best'"):
        LLM(folder, policy="best")  # type: ignore[arg-type]
