"""Starting and stopping: what runs may end, what comes is sent away, and the exit code is 0."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kilter import cli
from kilter.serve.server.config import ServerConfig
from kilter.serve.server.lifecycle import bind, listen
from tests.models import tiny
from tests.serve.server.conftest import PATIENCE, StartServer, http_client, wait_for
from tests.serve.server.test_limits import paused
from tests.serve.tiny_tokenizer import save_byte_tokenizer

URL = "/v1/completions"


def test_a_drain_lets_what_runs_end_and_sends_the_rest_away(start_server: StartServer) -> None:
    server = start_server(drain_timeout=PATIENCE)
    body = {"prompt": "x", "max_tokens": 5}
    with server.client() as client, server.client() as other, ThreadPoolExecutor(2) as pool:
        assert other.post(URL, json=body).status_code == 200  # a connection that stays open
        with paused(server):
            whole = pool.submit(client.post, URL, json=body)
            wait_for(lambda: server.context.admission.unfinished == 1)
            stream = pool.submit(client.post, URL, json={**body, "stream": True})
            wait_for(lambda: server.context.admission.unfinished == 2)
            server.server.stop()
            wait_for(lambda: server.context.draining)
            refused = [other.post(URL, json=body), server.post(URL, body)]
            assert other.get("/health").status_code == 503
            assert other.get("/health/live").status_code == 200
        for response in refused:
            assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
            assert response.headers["connection"] == "close" and response.headers["retry-after"]
        assert whole.result().status_code == 200
        assert stream.result().text.endswith("data: [DONE]\n\n")
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_a_drain_has_an_end(start_server: StartServer) -> None:
    server = start_server(drain_timeout=0.1)
    body = {"prompt": "x", "max_tokens": 5}
    with server.client() as client, ThreadPoolExecutor(2) as pool, paused(server):
        whole = pool.submit(client.post, URL, json=body)
        stream = pool.submit(client.post, URL, json={**body, "stream": True})
        wait_for(lambda: server.context.admission.unfinished == 2)
        server.server.stop()
        assert whole.result().status_code == 503
        assert '"code":"unavailable"' in stream.result().text
        assert "[DONE]" not in stream.result().text
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "a-model"
    tiny.make("llama-plain", path)
    save_byte_tokenizer(path, 131)
    return path


class Process:
    """`kilter serve` as a process of its own, ready."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kilter", "serve", str(folder), "--port", "0", "--threads", "1",
             *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.said)
        if found is None:
            self.process.kill()
            raise AssertionError(self.process.communicate())
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = http_client(base_url=self.url)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err


@pytest.fixture
def process(folder: Path) -> Iterator[Process]:
    process = Process(folder, "--admin")
    with process.client:
        yield process
    process.process.kill()
    process.process.communicate()


def test_a_port_that_another_takes_while_the_model_is_loaded() -> None:
    """Two may bind an address of which nobody listens yet."""
    first = bind(ServerConfig("a", port=0))
    with first, bind(ServerConfig("a", port=first.getsockname()[1])) as second:
        listen(first)
        with pytest.raises(OSError, match="Another program began to listen at"):
            listen(second)


def test_the_command_serves_until_it_is_told_to_stop(process: Process, folder: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert process.said == (f"a-model is served at {process.url}/v1; the page is "
                            f"{process.url}/\n")
    assert process.client.get("/v1/models").json()["data"][0]["id"] == "a-model"
    answer = process.client.post(URL, json={"prompt": "abc", "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    # Its port is taken: known before a model is loaded, so any will do.
    assert cli.main(["serve", "no-such-model", "--port", str(process.port)]) == 2
    assert f"Another program listens on 127.0.0.1:{process.port}" in capsys.readouterr().err
    process.process.send_signal(signal.SIGTERM)
    assert process.end() == (0, "")


def test_a_second_signal_ends_at_once(process: Process) -> None:
    """After the first alone it would wait 30 seconds for a request that gets nowhere."""
    client = process.client
    assert client.post("/admin/pause", json={}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(client.post, URL, json={"prompt": "abc"})
        wait_for(lambda: client.get("/health").json()["waiting"] == 1)
        process.process.send_signal(signal.SIGINT)
        wait_for(lambda: client.get("/health").status_code == 503)
        process.process.send_signal(signal.SIGINT)
        assert lost.result().status_code == 503
    assert process.end() == (0, "")


@pytest.mark.parametrize(("options", "words"), [
    (["--port", "99999"], "port is 99999 but must be from 0 to 65535"),
    (["--max-queue", "-1", "--request-timeout", "0"],
     "max_queue is -1 but must be from 0 to 100000; request_timeout is 0 seconds"),
    (["--api-key", ""], "the API key must be printable ASCII characters"),
    (["--host", "::1%nowhere"], "cannot listen on ::1%nowhere:8000"),  # no name server is asked
    (["--kv-tokens", "-5", "--port", "0"], "kv_tokens is -5"),
    (["--served-name", "", "--port", "0"], "a served name is empty"),
])
def test_bad_options_are_said_in_sentences(folder: Path, options: list[str], words: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(folder), *options]) == 2
    assert words in capsys.readouterr().err
