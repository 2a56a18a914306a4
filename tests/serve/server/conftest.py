"""A real server in this process, on a tiny random model whose tokens are bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kilter.models.decoder import Decoder
from kilter.serve.engine import Engine, EngineConfig
from kilter.serve.exactness import random_model
from kilter.serve.scheduler import SchedulerConfig
from kilter.serve.server.app import build_context
from kilter.serve.server.config import ServerConfig
from kilter.serve.server.context import Context
from kilter.serve.server.lifecycle import Server, bind, url_of
from kilter.tokens import Tokenizer
from tests.serve.tiny_engine import spec

NAME = "tiny"
PATIENCE = 120.0  # seconds until something counts as hung; a busy machine stops anybody for some
CONTEXT = 1024
SPECIAL = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
EOS = 1
# The usual form of a chat, strict about its order, with tools written the hermes way.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools, called as <tool_call>{...}</tool_call>: ' }}
{%- for tool in tools %}{{ tool.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('the system message must come first') }}{% endif %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' + message.role) }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if shout is defined and shout %}{{ 'LOUD' }}{% endif %}"""


@cache
def byte_tokenizer() -> Tokenizer:
    """Token 3 + b is byte b."""
    alphabet = {b: c for b, c in zip(range(256), _byte_characters(), strict=True)}
    pieces = [*SPECIAL, *(alphabet[b] for b in range(256))]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
                     templates={"default": TEMPLATE})


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def ids_of(text: str) -> list[int]:
    """The tokens of a text without special tokens, by definition."""
    return [3 + b for b in text.encode()]


def make_model(seed: int = 0) -> Decoder:
    return random_model(spec(vocab=259, positions=CONTEXT), "fp32", seed=seed)


def make_engine(kv_tokens: int = 4 * CONTEXT, **scheduler: Any) -> Engine:
    return Engine(make_model(), byte_tokenizer(),
                  EngineConfig(kv_tokens, scheduler=SchedulerConfig(**scheduler)))


def http_client(**options: Any) -> httpx.Client:
    """A client that is patient, and quick to make: nothing here is asked over TLS."""
    return httpx.Client(timeout=PATIENCE, verify=False, trust_env=False, **options)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


class Running:
    """A server that answers at ``base_url`` until `close`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.context: Context = build_context(engine, config)
        self.engine = engine  # for `self.context.engine.call` only, while the server runs
        self.listener = bind(config)
        self.base_url = url_of(self.listener)
        ready = threading.Event()
        self.server = Server(self.context, on_ready=ready.set)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        # A machine that stands still while the server stops must not cut its last answers.
        self.server.config.timeout_graceful_shutdown = int(PATIENCE / 2)
        self.thread.start()
        assert ready.wait(PATIENCE), "the server did not start"

    def client(self, **options: Any) -> httpx.Client:
        return http_client(base_url=self.base_url, **options)

    def get(self, path: str) -> httpx.Response:
        """On a connection of its own."""
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """On a connection of its own."""
        with self.client() as client:
            return client.post(path, json=body)

    def configure(self, **fields: Any) -> None:
        """Changes limits that every request reads anew."""
        self.context.config = replace(self.context.config, **fields)

    def close(self) -> None:
        """Stops it, and checks that nothing leaked."""
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server did not stop"
        assert self.context.admission.unfinished == 0, "places in the queue leaked"
        self.engine.check_integrity()


StartServer = Callable[..., Running]


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """A server with the usual limits, shared by tests that leave it as it was."""
    running = Running(make_engine(), ServerConfig(NAME, port=0))
    yield running
    running.close()


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts further servers: ``start_server(engine=None, **fields of ServerConfig)``."""
    started: list[Running] = []

    def start(engine: Engine | None = None, **fields: Any) -> Running:
        config = replace(ServerConfig(NAME, port=0), **fields)
        started.append(Running(engine or make_engine(), config))
        return started[-1]

    yield start
    for running in started:
        running.close()
