"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from kilter.serve.tool_parsers import ToolFormat


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it serves, and its limits.

    Attributes:
        served_name: the model's name in /v1/models and in requests.
        aliases: further names that requests may give.
        host: address to listen on; port: 0 takes a free one.
        api_key: clients send it as ``Authorization: Bearer …``; None lets everybody in.
        cors_origins: web origins whose pages may read the answers ("*": all of them).
        max_body_bytes: a larger request body is refused.
        max_queue: answers that may wait beyond those that run; a request for more is refused.
        request_timeout: seconds that a request may take in all; None: as long as it needs.
        drain_timeout: seconds that running requests may still take once the server is told to stop.
        stall_timeout: the engine counts as stuck when it is busy and no step ended for so long,
            seconds.
        admin: offer the endpoints that replace the weights and flush the cache.
        prepare_threads: threads that parse, render, tokenise and compile grammars.
        tool_format: how the model writes tool calls; None: as its chat template shows.

    Raises:
        ValueError: listing every value that is out of range.
    """

    served_name: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_queue: int = 256
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    stall_timeout: float = 60.0
    admin: bool = False
    prepare_threads: int = 2
    tool_format: ToolFormat | None = None

    def __post_init__(self) -> None:
        problems = [f"{name} is {value} but must be from {low} to {high}"
                    for name, value, low, high in (
                        ("port", self.port, 0, 65535),
                        ("max_body_bytes", self.max_body_bytes, 1024, 2**30),
                        ("max_queue", self.max_queue, 0, 100_000),
                        ("prepare_threads", self.prepare_threads, 1, 64))
                    if not low <= value <= high]
        problems += [f"{name} is {value:g} seconds but must be more than 0 and finite"
                     for name, value in (("request_timeout", self.request_timeout),
                                         ("stall_timeout", self.stall_timeout))
                     if value is not None and not 0 < value < float("inf")]
        if not 0 <= self.drain_timeout < float("inf"):
            problems.append(f"drain_timeout is {self.drain_timeout:g} seconds but must be 0 or "
                            f"more and finite")
        if not all((self.served_name, *self.aliases)):
            problems.append("a served name is empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()
                                             and self.api_key.strip()):
            problems.append("the API key must be printable ASCII characters, at least one")
        if problems:
            raise ValueError(f"The server cannot start so: {'; '.join(problems)}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which requests may call the model."""
        return self.served_name, *self.aliases
