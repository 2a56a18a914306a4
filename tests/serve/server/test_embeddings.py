"""/v1/embeddings over HTTP: the engine's own vectors, in either encoding, whatever the company."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.server.conftest import NAME, PATIENCE, StartServer, ids_of, make_engine


def vectors_of(texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    """What an engine of the same weights gives, one text after the other."""
    engine = make_engine()
    vectors = []
    for ids in texts:
        engine.submit_embedding(ids, **options)
        while engine.busy:
            vectors += [d.embedding for d in engine.step() if d.embedding is not None]
    return vectors


def post(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/embeddings", json=body)


def read(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
            if isinstance(item["embedding"], str)
            else np.array(item["embedding"], dtype=np.float32) for item in data]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_every_form_of_input_and_encoding_gives_the_engines_vectors(client: httpx.Client) -> None:
    texts = ["one", "two, longer", "ü"]
    ids = [ids_of(text) for text in texts]
    expected = vectors_of(ids)
    for given, want in ((texts, expected), (ids, expected), (texts[1], expected[1:2]),
                        (ids[1], expected[1:2])):
        for encoding in ("float", "base64", None):
            answer = post(client, input=given, encoding_format=encoding, model=NAME, user="u")
            same(read(answer), want)
            body = answer.json()
            assert body["object"] == "list" and body["model"] == NAME
            tokens = sum(map(len, ids if len(want) == 3 else ids[1:2]))
            assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_pooling_and_length_are_as_asked_for(client: httpx.Client) -> None:
    for pooling in ("mean", "last", None):
        for normalize in (True, False, None):
            found = read(post(client, input="some text", pooling=pooling, normalize=normalize))
            want = vectors_of([ids_of("some text")], pooling=pooling or "mean",
                              normalize=normalize is not False)
            assert np.array_equal(found[0], want[0])
            assert (abs(np.linalg.norm(found[0]) - 1) < 1e-6) == (normalize is not False)


def test_dimensions_are_the_models_or_refused_by_name(client: httpx.Client) -> None:
    assert read(post(client, input="a", dimensions=32))[0].shape == (32,)
    for dimensions in (16, 64):
        error = post(client, input="a", dimensions=dimensions)
        assert error.status_code == 400 and error.json()["error"]["param"] == "dimensions"
        assert "32 dimensions" in error.json()["error"]["message"]
        assert "Matryoshka" in error.json()["error"]["message"]


@pytest.mark.parametrize(("body", "param", "status"), [
    ({"input": ""}, "input", 400), ({"input": []}, "input", 400), ({}, "input", 400),
    ({"input": ["a", ""]}, "input", 400), ({"input": [300]}, "input", 400),
    ({"input": "a" * 1025}, "input", 400), ({"input": ["a"] * 2049}, "input", 400),
    ({"input": "a", "pooling": "max"}, "pooling", 400), ({"input": "a", "n": 1}, "n", 400),
    ({"input": "a", "priority": 1}, "priority", 400), ({"input": "a", "model": "b"}, "model", 404),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", 400),
])
def test_what_cannot_be_served_is_named(client: httpx.Client, body: dict[str, Any], param: str,
                                        status: int) -> None:
    answer = post(client, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert read(post(client, input="a" * 1024))[0].shape == (32,)  # as long as the context


def test_many_inputs_take_turns_and_neighbours_change_nothing(start_server: StartServer) -> None:
    """More inputs than may run or wait, beside answers: the same bits."""
    server = start_server(make_engine(max_running=3, mixed_tokens=7), max_queue=2)
    texts = [f"text number {i} " * (1 + i % 5) for i in range(20)]
    expected = vectors_of([ids_of(text) for text in texts])
    with server.client() as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/v1/completions", json={
            "prompt": "b", "max_tokens": 40, "ignore_eos": True})
        found = read(post(client, input=texts))
        assert answer.result().status_code == 200
    same(found, expected)


def test_a_long_wait_ends(start_server: StartServer) -> None:
    server = start_server(request_timeout=0.05)
    server.context.engine.pause()
    with server.client() as client:
        answer = post(client, input=["a", "b"])
    assert answer.status_code == 408 and answer.json()["error"]["type"] == "timeout_error"
    server.context.engine.resume()
    server.configure(request_timeout=PATIENCE)
    with server.client() as client:
        assert len(read(post(client, input="a"))) == 1
