"""The server's half of the cases that users of other servers reported; numbers as in that list."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from kilter.serve.engine import Engine, EngineConfig
from kilter.serve.load import load_engine
from kilter.serve.sampler import Choice
from kilter.serve.server.config import ServerConfig
from kilter.tokens import Tokenizer
from tests.models import tiny
from tests.serve import tiny_engine
from tests.serve.server.conftest import (
    EOS as END,
)
from tests.serve.server.conftest import (
    NAME,
    PATIENCE,
    Running,
    StartServer,
    byte_tokenizer,
    http_client,
    make_model,
    wait_for,
)
from tests.serve.test_cases import _SPELL, spellings
from tests.serve.tiny_engine import CONTEXT, EOS, EOT, VOCAB, frozen_model, rows_of
from tests.serve.tiny_tokenizer import save_byte_tokenizer

T = TypeVar("T")
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A vocabulary in which a text can be cut in many ways; no chat template."""
    running = Running(tiny_engine.make_engine(1024), ServerConfig(NAME, port=0))
    yield running
    running.close()


def ask(server: Running, function: Callable[[Engine], T]) -> T:
    """Runs a function in the engine's thread, between two steps."""
    return server.context.engine._post(function).result(PATIENCE)


def wait_idle(server: Running) -> None:
    """Until no request is under way and every page is free or cached."""
    wait_for(lambda: server.context.admission.unfinished == 0
             and ask(server, lambda e: not e.busy and e.tree.pages.num_held == 0))
    ask(server, Engine.check_integrity)


@cache
def http() -> httpx.Client:
    """One for all."""
    return http_client()


def post(server: Running, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return http().post(server.base_url + path, json=body)


def complete(server: Running, **body: Any) -> dict[str, Any]:
    response = post(server, body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Running, *messages: Any, **body: Any) -> dict[str, Any]:
    response = post(server, {"messages": list(messages), **body}, PATHS[1])
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Running, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """A stream's chunks; asserts that it ends as it must."""
    with http().stream("POST", server.base_url + path, json={**body, "stream": True}) as got:
        assert got.status_code == 200, got.read()
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    return error


def healthy(server: Running) -> None:
    assert complete(server, prompt="ab", max_tokens=1)["usage"]["completion_tokens"] == 1


@contextlib.contextmanager
def forced(tokens: list[int]) -> Iterator[None]:
    """Every answer consists of these tokens."""
    def choose(logits_SV: Any, states: Any, ops: Any) -> list[Choice]:
        return [Choice(tokens[state.generated]) for state in states]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kilter.serve.engine.choose", choose)
        yield


def test_1_a_stop_string_never_leaks(small: Running) -> None:
    for before, stop in (("xc", "cabba"), ("cab", "abb"), ("xcabc", "cabb")):
        for tokens in spellings(before + stop + "x-"):
            asked: dict[str, Any] = {"prompt": "x", "stop": [stop], "max_tokens": len(tokens)}
            with forced(tokens):
                chunks = events(small, **asked)
                whole = complete(small, **asked)["choices"][0]
            assert whole["text"] == before and whole["finish_reason"] == "stop"
            assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == before


def test_2_only_what_may_become_a_stop_is_held_back(small: Running) -> None:
    tokens = [_SPELL[c] for c in "x-xcabxcab"]
    with forced(tokens):
        chunks = events(small, prompt="x", stop=["cabb" + "-" * 50], max_tokens=len(tokens))
    texts = [c["text"] for chunk in chunks for c in chunk["choices"]]
    if texts[-1] == "":  # what says only that it is over
        texts.pop()
    assert texts == ["x", "-", "x", "cabx", "cab"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_6_a_prompt_is_scored_without_an_answer(small: Running) -> None:
    prompt = [3, 4, 5, 17, 20]
    answer = complete(small, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(prompt) and choice["text"] == "abcx-"
    rows = rows_of(frozen_model(), prompt).log_softmax(-1)
    own = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
    said = choice["logprobs"]["token_logprobs"]
    assert said[0] is None and said[1:] == pytest.approx(own, abs=1e-5)
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "x", "-"]
    assert all(len(top) >= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    healthy(small)


def test_7_empty_prompts(small: Running) -> None:
    for prompt in ("", [], [""], [[]], ["ab", ""]):
        assert "empty" in error_of(post(small, {"prompt": prompt}))["message"]
    healthy(small)


def test_8_prompts_around_the_context(small: Running) -> None:
    for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400),
                           (10 * CONTEXT, 400)):
        response = post(small, {"prompt": [3] * length, "max_tokens": 5, "ignore_eos": True})
        assert response.status_code == status
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == 1
            assert response.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert str(CONTEXT) in error_of(response)["message"]
    scored = {"prompt": [3] * CONTEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert post(small, scored).status_code == 200
    healthy(small)


def test_9_who_asks_too_much_hears_so_while_others_run(small: Running) -> None:
    with slow_steps(small) as release, ThreadPoolExecutor() as pool:
        running_one = pool.submit(complete, small, prompt="ab", max_tokens=4)
        for stream in (False, True):
            response = post(small, {"prompt": [3] * 1000, "stream": stream})
            assert "context" in error_of(response)["message"]
        assert not running_one.done()
        release()
        assert running_one.result()["usage"]["completion_tokens"] >= 1


@contextlib.contextmanager
def slow_steps(server: Running, after: int = 0) -> Iterator[Callable[[], None]]:
    """After so many steps none ends before the function given is called (or the block ends)."""
    gate = threading.Event()
    steps = count()
    executor = ask(server, lambda engine: engine.executor)
    real = executor.run

    def run(work: Any) -> Any:
        assert next(steps) < after or gate.wait(PATIENCE)
        return real(work)

    executor.run = run
    try:
        yield gate.set
    finally:
        gate.set()
        executor.run = real


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_15_who_disconnects_is_not_computed_for(server: Running, path: str, stream: bool) -> None:
    asked = {"max_tokens": 900, "ignore_eos": True, "n": 2, "stream": stream, **(
        {"prompt": "ab"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "a"}]})}
    body = json.dumps(asked).encode()
    done = ask(server, lambda e: e.stats().completion_tokens)
    with slow_steps(server, after=5):
        with socket.create_connection(server.listener.getsockname()) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n"
                               f"Content-Type: application/json\r\n"
                               f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: server.context.engine.stats.running == 2)
        wait_for(lambda: server.context.admission.unfinished == 0)  # it is known to be gone
    wait_idle(server)
    # Nothing after the step that it left in.
    assert ask(server, lambda e: e.stats().completion_tokens) - done <= 2 * (5 + 1)
    healthy(server)


def test_16_a_seed_decides_whatever_else_runs(server: Running) -> None:
    seeded: dict[str, Any] = {"prompt": "abc", "max_tokens": 20, "temperature": 1, "seed": 5}
    alone = complete(server, **seeded)["choices"][0]["text"]
    others = [{"prompt": "abc", "max_tokens": 20, "temperature": 1, "n": 3},
              {**seeded, "seed": 6}, {**seeded, "prompt": "abcd"}, {**seeded, "temperature": 0}]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda body: complete(server, **body), [*others, seeded, *others]))
    assert answers[len(others)]["choices"][0]["text"] == alone
    four = [[c["text"] for c in complete(server, **{**seeded, "n": 4})["choices"]]
            for _ in range(2)]
    assert four[0] == four[1] and len(set(four[0])) == 4 and four[0][0] == alone


def test_17_biases_outside_the_vocabulary(small: Running) -> None:
    for token in (-1, VOCAB, VOCAB + 10**6):
        error = error_of(post(small, {"prompt": "ab", "logit_bias": {str(token): 1}}))
        assert "logit_bias" in (error["param"] or "") + error["message"]
        assert str(token) in error["message"]
    for value in (100, 1e9):
        answer = complete(small, prompt="ab", max_tokens=5, logit_bias={"17": value}, logprobs=0)
        assert answer["choices"][0]["text"] == "xxxxx"
        banned = complete(small, prompt="ab", max_tokens=20, temperature=2, ignore_eos=True,
                          logit_bias={str(t): -value for t in range(VOCAB) if t != 17})
        assert banned["choices"][0]["text"] == "x" * 20
    healthy(small)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BROKEN_SCHEMAS: list[Any] = [
    7, "object", [], {"type": 7}, {"type": "objekt"}, {"type": ["string", 5]},
    {"$ref": "#/$defs/missing"}, {"$ref": "http://example.com/schema.json"}, {"$ref": 7},
    {"properties": 7}, {"properties": []}, {"properties": {"a": 7}}, {"required": "a"},
    {"required": [7]}, {"items": 7}, {"enum": 5}, {"enum": []}, {"anyOf": 7}, {"anyOf": []},
    {"allOf": "x"}, {"oneOf": {}}, {"minLength": "x"}, {"type": "string", "minLength": -1},
    {"type": "string", "minLength": 5, "maxLength": 2}, {"type": "string", "pattern": "(["},
    {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": r"(a)\1"},
    {"type": "integer", "minimum": 5, "maximum": 2}, {"type": "integer", "minimum": "x"},
    {"type": "string", "format": "no-such-format"}, {"not": {}}, {"if": {}, "then": {}}, False,
    {"type": "array", "minItems": 3, "maxItems": 1}, {"multipleOf": 0, "type": "integer"},
    {"patternProperties": {"([": {}}}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    _deep(95)]


def test_18_broken_schemas_hurt_nobody_else(server: Running) -> None:
    formats = [{"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
               for schema in BROKEN_SCHEMAS]
    assert len(formats) >= 30
    user = {"role": "user", "content": "a"}
    expected = chat(server, user, max_tokens=40, seed=3, ignore_eos=True)["choices"]
    with ThreadPoolExecutor(6) as pool:
        beside = pool.submit(chat, server, user, max_tokens=40, seed=3, ignore_eos=True)
        refused = list(pool.map(lambda f: post(server, {"messages": [user], "max_tokens": 10,
                                                        "response_format": f}, PATHS[1]), formats))
        assert beside.result()["choices"] == expected
    accepted = [schema for schema, response in zip(BROKEN_SCHEMAS, refused, strict=True)
                if response.status_code == 200]
    assert accepted == []
    for response in refused:
        assert error_of(response)["type"] == "invalid_request_error"
    for schema in ({"type": "boolean"}, {"enum": ["a", "b"]}):
        answer = chat(server, user, max_tokens=30, response_format={
            "type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
        assert json.loads(answer["choices"][0]["message"]["content"]) in (True, False, "a", "b")


STRICT_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ raise_exception('system comes first') }}{% endif %}
{%- if tools %}{{ raise_exception('no tools here') }}{% endif %}
{%- for m in messages %}{{ m.role + ':' + m.content + ';' + (m.think.deep if m.think else '') }}
{%- endfor %}"""


def with_template(template: str) -> Engine:
    tokenizer = Tokenizer(byte_tokenizer()._backend, {"eos_token": "<|im_end|>"},
                          templates={"default": template})
    return Engine(make_model(), tokenizer, EngineConfig(2048))


def test_19_a_template_that_refuses_is_the_clients_error(start_server: StartServer) -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    tool = {"type": "function", "function": {"name": "f"}}
    server = start_server(with_template(STRICT_TEMPLATE), tool_format="hermes")
    assert chat(server, system, user, max_tokens=1)["usage"]["prompt_tokens"] == 16
    for body, words in (({"messages": [user]}, "system comes first"),
                        ({"messages": [user, system]}, "system comes first"),
                        ({"messages": [system], "tools": [tool]}, "no tools here")):
        for stream in (False, True):
            error = error_of(post(server, {**body, "stream": stream}, PATHS[1]))
            assert words in error["message"] and error["param"] == "messages"
    healthy(server)


@pytest.mark.parametrize("template", [
    "{{ messages[0].nothing.deeper }}", "{{ messages[0].content + 7 }}", "{{ 1 // 0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages[99].role }}"])
def test_19_a_template_that_fails_is_told_of(start_server: StartServer, template: str) -> None:
    server = start_server(with_template(template))
    for _ in range(2):
        error = error_of(post(server, {"messages": [{"role": "user", "content": "u"}]}, PATHS[1]))
        assert "template" in error["message"]
    healthy(server)


def test_19_every_order_of_roles_and_every_form_of_content(server: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"},
             {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
             {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "assistant", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c", "content": "r"},
             {"role": "user", "content": [{"type": "text", "text": "u"}]},
             {"role": "user", "content": ""}]
    for first in turns:
        for second in turns:
            response = post(server, {"messages": [first, second], "max_tokens": 1}, PATHS[1])
            if second["role"] in ("system", "developer"):
                assert "must come first" in error_of(response)["message"]
            else:
                assert response.status_code == 200, response.text
    error_of(post(server, {"messages": [{"role": "user", "content": None}]}, PATHS[1]))


@pytest.mark.parametrize("path", PATHS)
def test_20_usage_is_exact_and_the_end_has_its_reason(server: Running, path: str) -> None:
    text = "shared beginning of several prompts " * 3
    kind = "chat.completion" if path == PATHS[1] else "text_completion"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if (
        path == PATHS[1]) else {"prompt": text}
    tokenizer = byte_tokenizer()
    length = len(tokenizer.encode(text) if path == PATHS[0]
                 else tokenizer.encode_chat(prompt["messages"]))
    ask(server, Engine.flush_cache)
    cold = post(server, {**prompt, "max_tokens": 7, "ignore_eos": True}, path).json()
    assert cold["object"] == kind and cold["choices"][0]["finish_reason"] == "length"
    assert cold["usage"]["prompt_tokens"] == length
    assert cold["usage"]["completion_tokens"] == 7 and cold["usage"]["total_tokens"] == length + 7
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chunks = events(server, path, **prompt, max_tokens=7, ignore_eos=True,
                    stream_options={"include_usage": True})
    assert {c["object"] for c in chunks} == {kind + ".chunk" if path == PATHS[1] else kind}
    assert chunks[-1]["choices"] == [] and all(c["choices"] for c in chunks[:-1])
    assert all(c["usage"] is None for c in chunks[:-1])
    warm = chunks[-1]["usage"]
    assert warm == {**cold["usage"], "prompt_tokens_details": {
        **cold["usage"]["prompt_tokens_details"], "cached_tokens": length - 1}}
    stopped = post(server, {**prompt, "max_tokens": 7, "logit_bias": {str(END): 100}}, path).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 1
    with forced(tokenizer.encode("ab")):
        ended = post(server, {**prompt, "max_tokens": 2, "stop": "b"}, path).json()
    assert ended["choices"][0]["finish_reason"] == "stop"


def test_21_all_end_tokens_count_and_can_be_told_not_to(small: Running) -> None:
    for end in (EOS, EOT):  # the tokenizer's own and one of the generation config
        bias = {str(end): 100.0}

        def ask(bias: dict[str, float] = bias, **body: Any) -> tuple[str, int]:
            answer = complete(small, prompt="ab", max_tokens=6, logit_bias=bias, **body)
            return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

        assert ask() == ("stop", 1)
        assert ask(ignore_eos=True) == ("length", 6)
        assert ask(min_tokens=4) == ("stop", 5)
        assert ask(ignore_eos=True, stop_token_ids=[end]) == ("stop", 1)
        assert ask(ignore_eos=True, stop_token_ids=[end], min_tokens=3) == ("stop", 4)


# ---- 23: health ----

def health(server: Running) -> int:
    return http().get(server.base_url + "/health").status_code


def test_23_health_answers_while_a_prompt_is_tokenised(server: Running,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: here until the test has seen enough."""
    gate, inside = threading.Event(), threading.Event()

    def encode(text: str, *args: Any, **kwargs: Any) -> list[int]:
        inside.set()
        assert gate.wait(PATIENCE)
        return [5] * len(text)

    monkeypatch.setattr(server.context.tokenizer, "encode", encode)
    with ThreadPoolExecutor() as pool:
        try:
            asked = [pool.submit(post, server, {"prompt": "a" * 2**20}) for _ in range(4)]
            assert inside.wait(PATIENCE)
            assert [health(server) for _ in range(5)] == [200] * 5
            assert not any(one.done() for one in asked)
        finally:
            gate.set()
        for one in asked:
            error_of(one.result())
    monkeypatch.undo()
    healthy(server)


def test_23_health_answers_in_a_long_step_and_tells_a_stuck_engine(
        start_server: StartServer) -> None:
    server = start_server(stall_timeout=PATIENCE)
    with slow_steps(server) as release, ThreadPoolExecutor() as pool:
        asked = pool.submit(complete, server, prompt="a" * 900, max_tokens=3)
        wait_for(lambda: server.context.engine.stalled_seconds > 0.02)
        assert health(server) == 200 and not asked.done()
        server.configure(stall_timeout=0.02)
        assert health(server) == 503 and not asked.done()
        release()
        asked.result()
    wait_for(lambda: health(server) == 200)  # once the engine's thread is at rest
    healthy(server)


# ---- 24: new weights ----

@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one model."""
    folders = [tmp_path_factory.mktemp("weights") / str(i) for i in range(3)]
    for seed, folder in enumerate(folders):
        tiny.make("llama-plain", folder, seed)
        save_byte_tokenizer(folder, 131)
    return folders


PROMPT: dict[str, Any] = {"prompt": "abcdefghijklmnopqrstuvwxyz" * 4, "max_tokens": 12,
                          "temperature": 0, "ignore_eos": True, "logprobs": 2}


def test_24_new_weights_never_meet_old_keys_and_values(start_server: StartServer,
                                                       checkpoints: list[Path]) -> None:
    server = start_server(load_engine(checkpoints[0]), admin=True)
    fingerprints = []
    for version, folder in enumerate(checkpoints):
        if version:
            answer = post(server, {"path": str(folder)}, "/admin/update_weights")
            assert answer.json() == {"weights_version": version}
        cold = complete(start_server(load_engine(folder)), **PROMPT)
        for warm in (False, True):
            answer = complete(server, **PROMPT)
            assert answer["choices"] == cold["choices"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (answer["usage"]["prompt_tokens"] - 1 if warm else 0)
        fingerprints.append(answer["system_fingerprint"])
    assert len(set(fingerprints)) == len(checkpoints)


@pytest.mark.parametrize("in_flight", ["restart", "continue", "abort"])
def test_24_running_answers_say_which_weights_chose_their_tokens(
        start_server: StartServer, checkpoints: list[Path], in_flight: str) -> None:
    server = start_server(load_engine(checkpoints[0]), admin=True)
    asked = {**PROMPT, "max_tokens": 40, "stream": True, "return_token_ids": True}
    update = {"path": str(checkpoints[1]), "in_flight": in_flight}
    with slow_steps(server, after=8) as release, ThreadPoolExecutor() as pool, http().stream(
            "POST", server.base_url + "/v1/completions", json=asked) as got:
        lines = got.iter_lines()
        first = next(lines)
        pausing = pool.submit(post, server, {}, "/admin/pause")
        wait_for(lambda: server.context.engine.paused)
        release()
        for request in (pausing.result(), post(server, update, "/admin/update_weights"),
                        post(server, {}, "/admin/resume")):
            assert request.status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
    versions = [chunk["system_fingerprint"] for chunk in chunks]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason == ("abort" if in_flight == "abort" else "length")
    assert versions == sorted(versions) and len(set(versions)) == 2
    old, new = ([token for chunk in chunks if chunk["system_fingerprint"] == version
                 for token in chunk["choices"][0]["token_ids"]] for version in
                (versions[0], versions[-1]))
    assert len(old) + len(new) == (40 if reason == "length" else len(old))
    if in_flight == "restart":  # as if the new weights had read all that came before
        prompt = ask(server, lambda e: e.tokenizer.encode(PROMPT["prompt"]))
        cold = complete(start_server(load_engine(checkpoints[1])), **{
            **PROMPT, "prompt": prompt + old, "max_tokens": len(new), "return_token_ids": True})
        assert cold["choices"][0]["token_ids"] == new


def test_24_nobody_else_may(server: Running, checkpoints: list[Path]) -> None:
    for path in ("/admin/update_weights", "/admin/flush_cache", "/admin/pause"):
        error_of(post(server, {"path": str(checkpoints[1])}, path), 404)
