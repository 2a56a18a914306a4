"""The endpoints for a trainer: new weights, flush, pause; absent unless asked for."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from kilter.serve.engine import Engine
from kilter.serve.llm import LLM
from kilter.serve.params import SamplingParams
from tests.models import tiny
from tests.serve.server.conftest import PATIENCE, Running, StartServer, wait_for
from tests.serve.tiny_tokenizer import save_byte_tokenizer

PROMPT = list(range(5, 45))


def make_folder(path: Path, name: str = "llama-plain", scale: float = 1.0) -> Path:
    """A tiny model's folder; ``scale`` makes other weights of it."""
    path.mkdir()
    model = tiny.make(name, path)
    if scale != 1.0:
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        model.save_pretrained(path)
    save_byte_tokenizer(path, 131)
    return path


def load(path: Path) -> Engine:
    return LLM(path, context=128, kv_tokens=512).engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("weights")
    return make_folder(base / "old"), make_folder(base / "new", scale=1.5)


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={
        "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(path: Path) -> dict[str, Any]:
    """The same answer from an engine that never had other weights."""
    engine = load(path)
    engine.submit(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True,
                                         logprobs=1))
    choices = []
    while engine.busy:
        choices += [c for delta in engine.step() for c in delta.choices]
    return {"logprobs": [c.logprob for c in choices], "tokens": [c.token_id for c in choices]}


def update(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/admin/update_weights", json=body)


def test_they_are_not_there_unless_asked_for(client: httpx.Client) -> None:
    for path in ("update_weights", "flush_cache", "pause", "resume"):
        assert client.post(f"/admin/{path}", json={}).status_code == 404
    assert client.get("/admin/stats").status_code == 404


def test_new_weights_answer_as_if_there_had_never_been_others(
        start_server: StartServer, folders: tuple[Path, Path]) -> None:
    old, new = folders
    server = start_server(load(old), admin=True)
    with server.client() as client:
        first = complete(client)
        again = complete(client)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert update(client, path=str(new)).json() == {"weights_version": 1}
        fresh = complete(client)
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"][0]["logprobs"]["token_logprobs"] == alone(old)["logprobs"]
    assert fresh["choices"][0]["logprobs"]["token_logprobs"] == alone(new)["logprobs"]
    assert first["choices"] != fresh["choices"]
    assert first["system_fingerprint"] != fresh["system_fingerprint"]


@pytest.mark.parametrize("mode", ["restart", "continue", "abort"])
def test_answers_that_have_begun_go_on_or_end_as_asked(
        start_server: StartServer, folders: tuple[Path, Path], mode: str) -> None:
    """The weights change in a pause, half way through an answer."""
    old, new = folders
    server = start_server(load(old), admin=True)
    with server.client() as client:
        got = {}

        def ask() -> None:
            with server.client() as other:
                got["answer"] = other.post("/v1/completions", json={
                    "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True})

        thread = threading.Thread(target=ask)
        pause_after_tokens(server, 3)
        thread.start()
        wait_for_pause(server)
        assert client.get("/health").json()["status"] == "paused"
        stats = client.get("/admin/stats").json()
        assert stats["paused"] and stats["running"] == 1
        assert update(client, path=str(new), in_flight=mode).json() == {"weights_version": 1}
        if mode == "abort":
            thread.join(PATIENCE)  # told in the pause already
            assert not thread.is_alive()
        else:
            assert thread.is_alive()
        assert client.post("/admin/resume", json={}).json() == {"paused": False}
        thread.join(PATIENCE)
        answer = got["answer"].json()
        if mode == "abort":
            assert answer["choices"][0]["finish_reason"] == "abort"
        else:
            assert answer["usage"]["completion_tokens"] == 60
        assert complete(client)["choices"][0]["logprobs"]["token_logprobs"] == alone(new)[
            "logprobs"]


def pause_after_tokens(server: Running, tokens: int) -> None:
    real = server.engine.step

    def step() -> Any:
        deltas = real()
        if server.engine.stats().completion_tokens >= tokens and not server.context.engine.paused:
            server.engine.step = real  # type: ignore[method-assign]
            server.context.engine.pause()
        return deltas

    server.engine.step = step  # type: ignore[method-assign]


def wait_for_pause(server: Running) -> None:
    wait_for(lambda: server.context.engine.paused)
    with server.client() as client:
        assert client.post("/admin/pause", json={}).json() == {"paused": True}


def test_a_pause_keeps_requests_and_takes_no_step(
        start_server: StartServer, folders: tuple[Path, Path]) -> None:
    server = start_server(load(folders[0]), admin=True)
    with server.client() as client:
        expected = complete(client)
        assert client.post("/admin/pause", json={}).json() == {"paused": True}
        steps = client.get("/admin/stats").json()["steps"]
        results: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: results.append(complete(client)))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: client.get("/admin/stats").json()["waiting"] == 3)
        stats = client.get("/admin/stats").json()
        assert stats["steps"] == steps and not results
        client.post("/admin/resume", json={})
        for thread in threads:
            thread.join(PATIENCE)
    assert [r["choices"] for r in results] == [expected["choices"]] * 3


def test_flush_makes_the_cache_cold(start_server: StartServer, folders: tuple[Path, Path]) -> None:
    server = start_server(load(folders[0]), admin=True)
    with server.client() as client:
        first = complete(client)
        assert client.post("/admin/flush_cache", json={}).json() == {"flushed": True}
        again = complete(client)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert first["choices"] == again["choices"]


def test_weights_that_do_not_fit_change_nothing(
        start_server: StartServer, folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = folders
    cut = tmp_path / "cut"
    shutil.copytree(new, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    pickled = tmp_path / "pickled"
    shutil.copytree(new, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    turned = tmp_path / "turned"
    shutil.copytree(new, turned)
    config = (turned / "config.json").read_text().replace("10000.0", "20000.0")
    (turned / "config.json").write_text(config)
    assert config != (new / "config.json").read_text()
    (tmp_path / "text.txt").write_text("hello")
    server = start_server(load(old), admin=True)
    expected = alone(old)["logprobs"]
    bad = [(str(tmp_path / "nowhere"), "does not exist"), (str(tmp_path), "holds no model"),
           (str(tmp_path / "text.txt"), "not a .gguf file"), (str(cut), ""), (str(pickled), ""),
           (str(make_folder(tmp_path / "qwen", "qwen3-plain")), "another model: its head_dim"),
           (str(turned), "another model: its layers"), ("a\0b", "null"), ("x" * 5000, ""),
           ("smollm2-135m", "does not exist")]
    with server.client() as client:
        for path, message in bad:
            answer = update(client, path=path)
            assert answer.status_code == 400, (path, answer.text)
            error = answer.json()["error"]
            assert error["param"] == "path"
            assert message in error["message"]
            assert complete(client)["choices"][0]["logprobs"]["token_logprobs"] == expected
        for body, param in (({}, "path"), ({"path": str(new), "in_flight": "wait"}, "in_flight"),
                            ({"path": str(new), "storage": "int2"}, "storage"),
                            ({"path": str(new), "x": 1}, "x"), ({"path": ""}, "path")):
            answer = update(client, **body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        for path in ("flush_cache", "pause", "resume", "update_weights"):
            # What a web page could send here without asking.
            assert client.post(f"/admin/{path}").status_code == 415
        assert client.get("/admin/stats").json()["weights_version"] == 0
        assert not client.get("/admin/stats").json()["paused"]


def test_a_stopped_engine_is_said_to_be(start_server: StartServer, folders: tuple[Path, Path]
                                        ) -> None:
    server = start_server(load(folders[0]), admin=True)
    server.context.engine.stop()
    with server.client() as client:
        assert update(client, path=str(folders[1])).status_code == 503
        assert client.post("/admin/flush_cache", json={}).status_code == 503
    with pytest.raises(RuntimeError, match="stopped"):
        asyncio.run(server.context.engine.call(lambda engine: None))
