"""/v1/completions: what comes over HTTP is what the engine gives, in OpenAI's form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kilter.serve.engine import Delta, Engine
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.sampler import Choice, best_answers
from kilter.serve.server import completions
from tests.serve.server.conftest import CONTEXT, Running, byte_tokenizer, ids_of, make_engine
from tests.serve.server.test_server_cases import ask as ask_engine
from tests.serve.tiny_engine import Result, drain

URL = "/v1/completions"


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post(URL, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def alone(prompt: str | list[int], params: SamplingParams) -> list[Result]:
    """The answers that an engine of its own gives."""
    engine = make_engine()
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    number = engine.submit(ids, params)
    results = drain(engine)
    return [results[number, i] for i in range(params.best_of or params.n)]


@pytest.mark.parametrize("body", [
    {"temperature": 0},
    {"seed": 5, "n": 3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"seed": 7, "logit_bias": {"70": 8.0, "71": 8}, "stop": ["CC", "D"], "max_tokens": 40},
    {"seed": 7, "logit_bias": {"70": 8.0, "71": 8}, "stop": "DC", "max_tokens": 40,
     "include_stop_str_in_output": True},
    {"seed": 8, "logit_bias": {"1": 6.0}, "min_tokens": 4, "max_tokens": 30},
    {"seed": 8, "logit_bias": {"1": 6.0, "0": 9.0}, "ignore_eos": True, "stop_token_ids": [70],
     "skip_special_tokens": False, "max_tokens": 30},
    {"seed": -3, "max_tokens": None},
])
def test_every_setting_reaches_the_engine(client: httpx.Client, body: dict[str, Any]) -> None:
    body = {"max_tokens": 12, **body}
    got = ask(client, prompt="some text", return_token_ids=True, **body)
    given = dict(body)
    given["max_tokens"] = body["max_tokens"] or 16
    given["seed"] = body.get("seed", 0) % 2**64
    given["logit_bias"] = {int(k): v for k, v in body.get("logit_bias", {}).items()}
    if "include_stop_str_in_output" in given:
        given["include_stop"] = given.pop("include_stop_str_in_output")
    expected = alone("some text", SamplingParams(**given))
    assert [c["text"] for c in got["choices"]] == [r.text for r in expected]
    assert [c["token_ids"] for c in got["choices"]] == [r.tokens for r in expected]
    assert [c["finish_reason"] for c in got["choices"]] == [r.finish_reason for r in expected]
    tokens = sum(len(r.tokens) for r in expected)
    usage = got["usage"]
    assert usage["prompt_tokens"] == 9 and usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == 9 + tokens and got["object"] == "text_completion"


def test_top_p_0_is_the_likeliest_token_and_top_k_minus_1_all(client: httpx.Client) -> None:
    greedy = ask(client, prompt="x", temperature=0)["choices"][0]["text"]
    assert ask(client, prompt="x", top_p=0)["choices"][0]["text"] == greedy
    assert (ask(client, prompt="x", seed=1, top_k=-1)["choices"]
            == ask(client, prompt="x", seed=1)["choices"])


def test_prompts_of_every_form_and_several_at_a_time(client: httpx.Client) -> None:
    """Choices come by prompt, then by answer."""
    one = ask(client, prompt="ab", seed=1)["choices"][0]["text"]
    assert ask(client, prompt=ids_of("ab"), seed=1)["choices"][0]["text"] == one
    several = ask(client, prompt=["ab", "xyz"], seed=1, n=2)
    expected = [alone(prompt, SamplingParams(max_tokens=16, seed=1, n=2))
                for prompt in ("ab", "xyz")]
    assert [(c["index"], c["text"]) for c in several["choices"]] == [
        (2 * i + j, result.text) for i, results in enumerate(expected)
        for j, result in enumerate(results)]
    assert several["usage"]["prompt_tokens"] == 5
    ids = ask(client, prompt=[ids_of("ab"), ids_of("xyz")], seed=1, n=2)
    assert ids["choices"] == several["choices"]


def test_log_probabilities_are_the_engines(client: httpx.Client) -> None:
    got = ask(client, prompt="some text", max_tokens=8, temperature=0, logprobs=3, echo=True)
    result, = alone("some text", SamplingParams(max_tokens=8, temperature=0, logprobs=3,
                                                prompt_logprobs=3))
    assert result.prompt is not None
    choice = got["choices"][0]
    logprobs = choice["logprobs"]
    everything = [*result.prompt, *result.choices]
    assert logprobs["token_logprobs"] == [None, *(c.logprob for c in everything)]
    assert logprobs["top_logprobs"][0] is None
    tokenizer = byte_tokenizer()

    def written(token: int) -> str:
        data = tokenizer.token_bytes(token)
        return data.decode() if data.isascii() else f"bytes:\\x{data[0]:02x}"

    assert logprobs["tokens"] == [written(t) for t in ids_of("some text") + result.tokens]
    for top, choice_ in zip(logprobs["top_logprobs"][1:], everything, strict=True):
        assert top == {written(t): value for t, value in
                       (*choice_.top, (choice_.token_id, choice_.logprob))}
    assert choice["text"] == "some text" + result.text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and token not in ("<|im_end|>",):
            assert choice["text"][offset:].startswith(token)


def test_lm_evals_request_scores_a_continuation(client: httpx.Client) -> None:
    """Token ids with echo, logprobs=1 and one token of answer, or none."""
    ids = ids_of("a text to be scored")
    for tokens in (0, 1):
        got = ask(client, prompt=[ids, ids[:5]], max_tokens=tokens, echo=True, logprobs=1,
                  temperature=0, seed=1234)
        for choice, prompt in zip(got["choices"], (ids, ids[:5]), strict=True):
            assert len(choice["logprobs"]["tokens"]) == len(prompt) + tokens
            result, = alone(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
            assert result.prompt is not None
            assert choice["logprobs"]["token_logprobs"][1:len(prompt)] == [
                c.logprob for c in result.prompt]
            assert choice["finish_reason"] == "length"
        assert got["usage"]["completion_tokens"] == 2 * tokens


@pytest.mark.parametrize("body", [
    {"prompt": "héllo €", "n": 2, "seed": 3},
    {"prompt": ["ab", "cd"], "n": 2, "seed": 3, "echo": True},
    {"prompt": ["ab", "x", "cde"], "n": 3, "seed": 3, "echo": True, "logprobs": 2},
    {"prompt": "ab", "seed": 4, "logprobs": 0, "stop": ["CDCD"], "logit_bias": {"70": 9, "71": 9},
     "max_tokens": 60},
    {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "xyz", "max_tokens": 0, "echo": True},
])
def test_a_stream_joined_is_the_whole_answer(client: httpx.Client, body: dict[str, Any]) -> None:
    check_stream(client, body)


def test_answers_wait_for_the_scores_of_the_echoed_prompt(server: Running) -> None:
    """They come with the first answer's first delta, and a neighbour may be faster."""
    exchange = completions.prepare(server.context, {
        "prompt": "ab", "n": 2, "echo": True, "logprobs": 0, "stream": True})
    letter = ids_of("z")[0]
    delta = Delta(0, 1, (Choice(letter, -1.0),), "z")
    assert exchange.chunk(0, delta) == b""
    scores = (Choice(ids_of("b")[0], -2.0),)
    events = exchange.chunk(0, replace(delta, index=0, prompt=scores)).split(b"\n\n")
    said = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[:-1]]
    assert sorted(choice["index"] for choice in said) == [0, 1]
    for choice in said:
        assert choice["text"] == "abz"
        assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": ["ab", "cde"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2})])
def test_the_usage_so_far_in_every_chunk(client: httpx.Client, path: str, body: dict[str, Any]
                                         ) -> None:
    body = {**body, "stream": True, "return_token_ids": True, "max_tokens": 6, "seed": 5,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = client.post(path, json=body).text.split("\n\n")[:-2]
    *news, last = (json.loads(event.removeprefix("data: ")) for event in events)
    shown = 0
    for chunk in news:
        usage = chunk["usage"]
        shown += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert shown <= usage["completion_tokens"] <= last["usage"]["completion_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["choices"] == [] and shown == last["usage"]["completion_tokens"]
    assert news[0]["usage"]["completion_tokens"] < shown
    assert news[-1]["usage"] == last["usage"]


def check_stream(client: httpx.Client, body: dict[str, Any]) -> None:
    body = {**body, "return_token_ids": True}
    whole = ask(client, **body)
    got = chunks(client, **body, stream_options={"include_usage": True})
    *news, last = got
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == whole["usage"][key]
    assert all(chunk["usage"] is None for chunk in news)
    assert len({(c["id"], c["created"], c["object"], c["model"]) for c in got}) == 1
    for choice in whole["choices"]:
        parts = [c for chunk in news for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [p["finish_reason"] for p in parts] == [
            *[None] * (len(parts) - 1), choice["finish_reason"]]
        assert all(p["text"] for p in parts[:-1]), "an empty delta"
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [v for p in parts for v in p["logprobs"][name]] == values


def test_best_of_gives_the_likeliest(client: httpx.Client) -> None:
    got = ask(client, prompt="ab", seed=9, n=2, best_of=6, max_tokens=5)
    made = alone("ab", SamplingParams(max_tokens=5, seed=9, n=6, logprobs=0))
    best = best_answers([sum(c.logprob or 0 for c in r.choices) for r in made],
                        [len(r.tokens) for r in made], 2)
    assert [c["text"] for c in got["choices"]] == [made[i].text for i in best]
    assert got["choices"][0]["logprobs"] is None
    assert got["usage"]["completion_tokens"] == sum(len(r.tokens) for r in made)


@pytest.mark.parametrize(("outputs", "valid"), [
    ({"regex": "[0-9]{3}-x"}, lambda t: re.fullmatch("[0-9]{3}-x", t)),
    ({"choice": ["yes", "no \"quoted\"", "née"]}, lambda t: t in ("yes", "no \"quoted\"", "née")),
    ({"grammar": 'root ::= "a" [bc]+ "d"'}, lambda t: re.fullmatch("a[bc]+d", t)),
    ({"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
               "additionalProperties": False}},
     lambda t: json.loads(t)["a"] in (True, False)),
])
def test_structured_outputs_hold(client: httpx.Client, outputs: dict[str, Any], valid: Any) -> None:
    got = ask(client, prompt="x", max_tokens=300, seed=2, temperature=0.7,
              structured_outputs=outputs)
    assert got["choices"][0]["finish_reason"] == "stop" and valid(got["choices"][0]["text"])


def test_a_grammar_is_the_same_as_the_engines(client: httpx.Client) -> None:
    got = ask(client, prompt="x", seed=2, max_tokens=30, structured_outputs={"regex": "[a-f]+"})
    result, = alone("x", SamplingParams(seed=2, max_tokens=30,
                                        grammar=GrammarSpec("regex", "[a-f]+")))
    assert got["choices"][0]["text"] == result.text


def test_prompt_logprobs_without_echo(client: httpx.Client) -> None:
    got = ask(client, prompt="abcd", max_tokens=2, prompt_logprobs=2, temperature=0)
    result, = alone("abcd", SamplingParams(max_tokens=2, prompt_logprobs=2, temperature=0))
    assert result.prompt is not None
    first, *rest = got["choices"][0]["prompt_logprobs"]
    assert first is None and [r["logprob"] for r in rest] == [c.logprob for c in result.prompt]
    assert [r["bytes"] for r in rest] == [[b] for b in b"bcd"]
    assert got["choices"][0]["text"] == result.text


def test_a_cached_prefix_is_reported_and_a_salt_keeps_it_apart(server: Running,
                                                               client: httpx.Client) -> None:
    prompt = "~~ a prefix that begins like nobody else's ~~" * 3
    ask_engine(server, Engine.flush_cache)
    cached = [ask(client, prompt=prompt, max_tokens=1, cache_salt=salt)["usage"][
        "prompt_tokens_details"]["cached_tokens"] for salt in (None, None, "other", "other")]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 100


def test_an_answer_ends_where_the_context_ends(client: httpx.Client) -> None:
    got = ask(client, prompt="z" * (CONTEXT - 3), max_tokens=500, ignore_eos=True, seed=1)
    assert got["usage"]["completion_tokens"] == 3
    assert got["choices"][0]["finish_reason"] == "length"
