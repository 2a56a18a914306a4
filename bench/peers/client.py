"""A load client that costs the servers little: one request per connection, parsed after it ended.

The client shares the machine with the server it measures. While an answer streams it only looks
for the first text and for the end; JSON is read afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIRST_TEXT = re.compile(rb'"(?:text|content)":\s*"(?!")')
_TAIL = 512  # bytes looked at again, so that a match may lie over two reads


@dataclass(frozen=True)
class Reply:
    """One answer. Times in seconds of `time.perf_counter`."""

    text: str
    prompt_tokens: int
    cached_tokens: int | None  # where the server tells
    tokens: int
    started: float
    first: float  # when the first text had arrived; without streaming, when the answer had
    ended: float

    @property
    def time_to_first_token(self) -> float:
        return self.first - self.started

    @property
    def time_per_output_token(self) -> float:
        return (self.ended - self.first) / max(1, self.tokens - 1)


async def post(port: int, path: str, body: Mapping[str, Any]) -> Reply:
    """Sends one request to 127.0.0.1.

    Raises:
        RuntimeError: for any answer but 200, and one without its token counts.
    """
    payload = json.dumps(body).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write((f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
                      f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
                      ).encode() + payload)
        raw, first = bytearray(), None
        while piece := await reader.read(1 << 16):
            ended = time.perf_counter()
            raw += piece
            seen = max(0, len(raw) - len(piece) - _TAIL)
            if first is None and _FIRST_TEXT.search(raw, seen):
                first = ended
            if raw.find(b"data: [DONE]", seen) >= 0:
                break
        else:
            ended = time.perf_counter()
    finally:
        writer.close()
    head, _, content = bytes(raw).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path} on port {port} answered {raw[:2000].decode(errors='replace')}")
    if b"transfer-encoding: chunked" in head.lower():
        content = _unchunk(content)
    text, usage = _read_events(content) if body.get("stream") else _read_object(content)
    if not usage:
        raise RuntimeError(f"{path} on port {port} told no token counts: {content[-500:]!r}")
    return Reply(text, usage["prompt_tokens"],
                 (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                 usage["completion_tokens"], started, first or ended, ended)


def _unchunk(content: bytes) -> bytes:
    parts, at = [], 0
    while at < len(content):
        line_end = content.find(b"\r\n", at)
        size = int(content[at:line_end].split(b";")[0] or b"0", 16) if line_end > at else 0
        if not size:
            break
        parts.append(content[line_end + 2:line_end + 2 + size])
        at = line_end + size + 4
    return b"".join(parts)


def _text_of(choice: Mapping[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or ""


def _read_object(content: bytes) -> tuple[str, dict[str, Any]]:
    answer = json.loads(content)
    return _text_of(answer["choices"][0]), answer["usage"]


def _read_events(content: bytes) -> tuple[str, dict[str, Any]]:
    text: list[str] = []
    usage: dict[str, Any] = {}
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"The server broke off with {event['error']}")
            text += [_text_of(choice) for choice in event.get("choices", ())]
            usage = event.get("usage") or usage
    return "".join(text), usage
