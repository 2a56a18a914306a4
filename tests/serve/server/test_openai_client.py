"""The unmodified `openai` package against a running server: what it sends is what we honour."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from kilter.serve.llm import LLM
from kilter.serve.params import SamplingParams
from kilter.serve.server.config import ServerConfig
from tests.serve.server.conftest import (
    EOS,
    NAME,
    PATIENCE,
    Running,
    StartServer,
    ids_of,
    make_engine,
    wait_for,
)
from tests.serve.server.test_server_cases import forced, slow_steps, wait_idle

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"},
                       {"role": "user", "content": "ab?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Bonn", "Paris"]}},
                       "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {
        "name": "dice", "parameters": {"type": "object", "properties": {"sides": {
            "type": "integer", "minimum": 1, "maximum": 9}}, "required": ["sides"],
            "additionalProperties": False}}}]


class Verdict(BaseModel):
    color: Literal["red", "blue"]
    sure: bool
    marks: list[Literal[1, 2]]


def connect(server: Running, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", **{"api_key": "none", "max_retries": 0,
                                                  "timeout": PATIENCE, **options})


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: Running) -> str:
    return server.config.served_name


# ---- models ----

def test_the_models_there_are(client: OpenAI, model: str) -> None:
    (only,) = client.models.list().data
    assert only.id == model and only.object == "model" and only.owned_by
    assert client.models.retrieve(model) == only
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found" and "gpt-4" in caught.value.message


# ---- chat ----

def test_a_chat_completion(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=7,
                                            temperature=0)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.model == model and answer.created > 1_700_000_000
    (choice,) = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    again = client.chat.completions.create(model=model, messages=MESSAGES,
                                           max_completion_tokens=7, temperature=0)
    assert again.choices == answer.choices and again.id != answer.id
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1.5, "seed": 4, "n": 3},
    {"temperature": 0.7, "top_p": 0.5, "seed": 5, "frequency_penalty": 1.0},
    {"temperature": 1, "seed": 6, "presence_penalty": -1.0, "stop": ["a", "b", "e"]},
    {"temperature": 1, "seed": 7, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1, "seed": 8, "logit_bias": {"5": 100}, "stop": "zz"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI, model: str,
                                                    settings: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24, **settings}
    whole: ChatCompletion = client.chat.completions.create(**asked)
    chunks: list[ChatCompletionChunk] = list(client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}))
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {
        "chat.completion.chunk"}
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].choices == []
    assert whole.usage is not None and chunks[-1].usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, count) == getattr(whole.usage, count)
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert all(c.delta.role is None for c in own[1:])
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert all(c.finish_reason is None for c in own[:-1])
        tokens = [t for c in own if c.logprobs for t in c.logprobs.content or []]
        assert tokens == ((choice.logprobs and choice.logprobs.content) or [])
    assert len({c.message.content for c in whole.choices}) == settings.get("n", 1)


def test_a_stream_without_options_has_no_usage(client: OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=3,
                                                 stream=True))
    assert all(c.usage is None and c.choices for c in chunks)


def test_n_answers_are_distinct_and_reproducible(client: OpenAI, model: str) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, n=4,
                                                seed=11, temperature=1)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.completion_tokens <= 48
        return [c.message.content for c in answer.choices]

    first = ask()
    assert len(set(first)) == 4 and ask() == first
    assert client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, seed=11, temperature=1
    ).choices[0].message.content == first[0]


def test_logprobs_say_what_the_tokens_are(client: OpenAI, model: str) -> None:
    choice = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=10, temperature=0, logprobs=True,
        top_logprobs=4, logit_bias={"1": -100}).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 10
    assert b"".join(bytes(t.bytes or []) for t in tokens).decode(
        errors="replace") == choice.message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 4
        likely = [t.logprob for t in token.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert sum(map(math.exp, likely)) <= 1 + 1e-6
        assert token.token in {t.token for t in token.top_logprobs}
    alone = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2,
                                           temperature=0, logprobs=True).choices[0]
    assert alone.logprobs is not None and alone.logprobs.content is not None
    assert alone.logprobs.content[0].top_logprobs == []


def test_stop_texts_are_left_out(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 30,
                             "temperature": 1, "seed": 21}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text
    for stop in ([text[9:12]], text[4:6], [text[20:22], text[5:9], "no such text"]):
        first = min(i for s in ([stop] if isinstance(stop, str) else stop)
                    if (i := text.find(s)) >= 0)
        ended = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert ended.message.content == text[:first] and ended.finish_reason == "stop"


def test_parts_and_null_content(client: OpenAI, model: str) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                     {"type": "text", "text": "b?"}]}]
    text: list[Any] = [{"role": "user", "content": "ab?"}]
    answers = [client.chat.completions.create(model=model, messages=m, max_tokens=5, temperature=0)
               for m in (parts, text)]
    assert answers[0].choices == answers[1].choices


# ---- structured output ----

def test_a_pydantic_model_comes_back(client: OpenAI, model: str) -> None:
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=Verdict, seed=seed, max_tokens=200
        ).choices[0]
        assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Verdict)


def test_a_pydantic_model_streams(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, response_format=Verdict,
                                        seed=1, max_tokens=200) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Verdict)


# ---- tools ----

def check_call(call: Any, name: str | None = None) -> None:
    assert call.type == "function" and call.id and name in (None, call.function.name)
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments in ({"city": "Bonn"}, {"city": "Paris"})
    else:
        assert set(arguments) == {"sides"} and 1 <= arguments["sides"] <= 9


CHOICES: list[tuple[Any, str | None]] = [
    ("required", None),
    ({"type": "function", "function": {"name": "dice"}}, "dice"),
    ({"type": "function", "function": {"name": "weather"}}, "weather")]


@pytest.mark.parametrize(("choice", "name"), CHOICES)
def test_calls_that_must_be_made(client: OpenAI, model: str, choice: Any, name: str | None) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": TOOLS,
                             "tool_choice": choice, "seed": 5, "temperature": 1,
                             "max_tokens": 200, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None and whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    check_call(call, name)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.tool_calls is not None
    (other,) = streamed.message.tool_calls
    assert (other.function.name, other.function.arguments) == (
        call.function.name, call.function.arguments)


def test_a_conversation_with_a_tool_goes_on(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=9,
        max_tokens=200, parallel_tool_calls=False).choices[0].message
    assert first.tool_calls is not None
    messages = [*MESSAGES, first.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS,
                                            tool_choice="none", max_tokens=5)
    assert answer.choices[0].message.tool_calls is None and answer.usage is not None


@pytest.mark.parametrize("before", ["", "Let me see. "])
def test_calls_that_the_model_makes_of_itself(server: Running, client: OpenAI, model: str,
                                              before: str) -> None:
    said = before + "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("dice", '{"sides": 3}'), ("weather", '{"city": "Bonn"}')))
    with forced([*ids_of(said), EOS]):
        whole = client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS,
                                               max_tokens=300).choices[0]
        with client.chat.completions.stream(model=model, messages=MESSAGES, tools=TOOLS,
                                            max_tokens=300) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        assert (choice.message.content or "").strip() == before.strip()
        for call in choice.message.tool_calls:
            check_call(call)
        assert [call.function.name for call in choice.message.tool_calls] == ["dice", "weather"]


def test_tools_are_shown_to_the_model(client: OpenAI, model: str) -> None:
    with_tools, without = (client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=1, **extra) for extra in ({"tools": TOOLS}, {}))
    assert with_tools.usage is not None and without.usage is not None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 50


# ---- completions ----

@pytest.mark.parametrize("settings", [
    {"temperature": 0}, {"temperature": 1, "seed": 3, "n": 3}, {"echo": True, "temperature": 0},
    {"temperature": 1, "seed": 4, "logprobs": 2, "stop": ["e", "o"]},
    {"echo": True, "logprobs": 1, "temperature": 1, "seed": 5},
    {"prompt": ["ab", "cd"], "n": 2, "seed": 6}], ids=str)
def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAI, model: str,
                                                          settings: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "ab", "max_tokens": 20, **settings}
    whole = client.completions.create(**asked)
    assert whole.id.startswith("cmpl-") and whole.object == "text_completion"
    chunks = list(client.completions.create(**asked, stream=True,
                                            stream_options={"include_usage": True}))
    assert {c.object for c in chunks} == {"text_completion"} and chunks[-1].choices == []
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
    assert [c.index for c in whole.choices] == list(range(len(prompts) * asked.get("n", 1)))
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        if asked.get("echo"):
            assert choice.text.startswith("ab")
        if "logprobs" in asked:
            assert choice.logprobs is not None
            for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for c in own if c.logprobs for x in getattr(c.logprobs, part) or []] == (
                    getattr(choice.logprobs, part))


def test_scoring_a_text_gives_what_choosing_it_gave(client: OpenAI, model: str) -> None:
    """The log-probabilities of an echoed prompt are, bit for bit, those of its tokens when they
    were chosen."""
    prompt = [70, 71, 72, 73]
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    made = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=1,
                                     seed=2, logprobs=0, **ids).choices[0]
    assert made.model_extra is not None and made.logprobs is not None
    scored = client.completions.create(model=model, prompt=prompt + made.model_extra["token_ids"],
                                       max_tokens=0, echo=True, logprobs=0).choices[0]
    assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
    assert len(scored.logprobs.token_logprobs) == 12
    assert scored.logprobs.token_logprobs[4:] == made.logprobs.token_logprobs


def test_a_prompt_of_token_ids(client: OpenAI, model: str) -> None:
    together = client.completions.create(model=model, prompt=[[5, 6], [7, 8, 9]], max_tokens=6,
                                         temperature=0)
    alone = [client.completions.create(model=model, prompt=p, max_tokens=6, temperature=0)
             for p in ([5, 6], [7, 8, 9])]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage is not None and together.usage.prompt_tokens == 5


def test_best_of_gives_the_likeliest(client: OpenAI, model: str) -> None:
    best = client.completions.create(model=model, prompt="ab", max_tokens=6, seed=5, best_of=6, n=1,
                                     temperature=1, logprobs=0)
    assert len(best.choices) == 1
    every = client.completions.create(model=model, prompt="ab", max_tokens=6, seed=5, n=6,
                                      temperature=1, logprobs=0)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert best.choices[0].text == max(every.choices, key=mean).text


# ---- embeddings ----

def test_embeddings(client: OpenAI, model: str) -> None:
    texts = ["ab", "abc abc", "something else"]
    together = client.embeddings.create(model=model, input=texts)  # the client asks for base64
    assert together.object == "list" and [e.index for e in together.data] == [0, 1, 2]
    assert together.usage.prompt_tokens == together.usage.total_tokens > 0
    for text, embedding in zip(texts, together.data, strict=True):
        assert math.isclose(sum(x * x for x in embedding.embedding), 1, rel_tol=1e-4)
        alone = client.embeddings.create(model=model, input=text, encoding_format="float").data[0]
        assert alone.embedding == pytest.approx(embedding.embedding, rel=1e-6)
    assert together.data[0].embedding != together.data[1].embedding
    ids = client.embeddings.create(model=model, input=[[5, 6], [7]])
    assert len(ids.data) == 2 and ids.usage.prompt_tokens == 3


# ---- errors ----

def test_errors_are_the_exceptions_the_client_has_for_them(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=model, prompt="a", suffix="b")
    assert "suffix" in unknown.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.files.list()
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 10_000)
    assert "context" in long.value.message
    assert client.completions.create(model=model, prompt="a", max_tokens=1).choices


def test_a_missing_key_is_an_authentication_error(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    for key in ("none", "secre", "secrets"):
        with (connect(server, api_key=key) as client,
              pytest.raises(openai.AuthenticationError) as no):
            client.models.list()
        assert no.value.code == "invalid_api_key"
    with connect(server, api_key="secret") as client:
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices


def test_a_full_queue_is_a_rate_limit_and_a_long_wait_a_timeout(start_server: StartServer) -> None:
    full = start_server(make_engine(max_running=1), max_queue=0)
    slow = start_server(request_timeout=0.05)
    asked: dict[str, Any] = {"model": NAME, "prompt": "a", "max_tokens": 3}
    with connect(full) as client, slow_steps(full) as release, ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: client.completions.create(**asked))
        wait_for(lambda: full.context.admission.unfinished == 1)
        with pytest.raises(openai.RateLimitError) as many:
            client.completions.create(**asked)
        assert many.value.code == "rate_limit_exceeded"
        assert int(many.value.response.headers["retry-after"]) >= 1
        release()
        assert first.result().choices
        with pytest.raises(openai.BadRequestError):  # can never be served, so do not try again
            client.completions.create(**asked, n=2)
        with connect(full, max_retries=3) as patient:  # the client waits and asks again
            assert patient.completions.create(**asked).choices
    with connect(slow) as client, slow_steps(slow), pytest.raises(openai.APIStatusError) as late:
        client.completions.create(**asked)
    assert late.value.status_code == 408 and late.value.type == "timeout_error"


# ---- many at once ----

def test_a_hundred_streams_at_once_are_each_what_they_are_alone(server: Running) -> None:
    def asked(i: int) -> dict[str, Any]:
        return {"model": server.config.served_name, "prompt": "abcdefgh"[:i % 8 + 1] + str(i // 8),
                "max_tokens": i % 13 + 2, "temperature": 1, "seed": i}

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0,
                               timeout=PATIENCE) as client:
            async def one(i: int) -> str:
                text = ""
                async for chunk in await client.completions.create(**asked(i), stream=True):
                    text += "".join(c.text for c in chunk.choices)
                return text

            return await asyncio.gather(*(one(i) for i in range(100)))

    texts = asyncio.run(run())
    with connect(server) as client:
        for i in range(0, 100, 7):
            assert client.completions.create(**asked(i)).choices[0].text == texts[i]


def test_leaving_a_stream_frees_its_place(server: Running, client: OpenAI, model: str) -> None:
    for _ in range(5):
        stream = client.completions.create(model=model, prompt="ab", max_tokens=100, stream=True,
                                           extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    wait_idle(server)


# ---- a real model ----

class City(BaseModel):
    city: str
    country: str


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(smollm2, context=512, kv_tokens=2048)


CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def offline(llm: LLM) -> str:
    """Its answer without a server."""
    return llm.chat(CAPITAL, SamplingParams(max_tokens=24, temperature=0))[0].text


@pytest.fixture(scope="module")
def real(llm: LLM, offline: str) -> Iterator[OpenAI]:
    running = Running(llm.engine, ServerConfig("smollm2", port=0, tool_format="hermes"))
    with connect(running) as client:
        yield client
    running.close()


def test_a_real_model_says_what_it_says_without_a_server(llm: LLM, real: OpenAI, offline: str
                                                         ) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": CAPITAL, "temperature": 0,
                             "max_tokens": 24}
    whole = real.chat.completions.create(**asked, logprobs=True).choices[0]
    assert whole.message.content == offline and "Paris" in offline
    pieces = [c.delta.content or "" for chunk in real.chat.completions.create(**asked, stream=True)
              for c in chunk.choices]
    assert "".join(pieces) == whole.message.content and len(pieces) > 5
    prompt = llm.tokenizer.encode_chat(CAPITAL)
    raw = real.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=24)
    assert raw.choices[0].text == whole.message.content
    assert raw.usage is not None and raw.usage.prompt_tokens == len(prompt)


def test_a_real_model_fills_a_form_and_makes_a_call(real: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Paris is the capital of which country?"}]
    form = real.chat.completions.parse(model="smollm2", messages=messages, response_format=City,
                                       temperature=0, max_tokens=80).choices[0].message.parsed
    assert form is not None and form.city and form.country
    call = real.chat.completions.create(
        model="smollm2", messages=messages, tools=TOOLS, temperature=0, max_tokens=80,
        tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
    assert call.message.tool_calls is not None
    check_call(call.message.tool_calls[0], "weather")
