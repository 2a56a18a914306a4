"""The four loads: batch of requests, shared prefixes, chats of several turns, and one at a time."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.peers.client import Reply
from kilter.tokens import Tokenizer

Complete = Callable[[str, int], Awaitable[Reply]]  # (prompt, new tokens)
Chat = Callable[[list[dict[str, str]], int], Awaitable[Reply]]  # (messages, new tokens)


class Texts:
    """Texts of an exact number of tokens: words that are one token each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
        words = [piece for piece in pieces if re.fullmatch(r" [a-z]{3,9}", piece)]
        self._words = [word for word in words if len(tokenizer.encode(word)) == 1]

    def draw(self, tokens: int, rng: random.Random) -> str:
        text = "".join(rng.choices(self._words, k=tokens))
        if (found := len(self._tokenizer.encode(text))) != tokens:
            raise AssertionError(f"{tokens} words became {found} tokens: {text!r}")
        return text


@dataclass(frozen=True)
class Load:
    """A workload. ``run(complete, chat, texts, seed)`` gives its replies; every seed is a load
    that no prefix cache has seen."""

    name: str
    what: str
    new_tokens: int
    run: Callable[[Complete, Chat, Texts, int], Coroutine[Any, Any, list[Reply]]]


async def _all(calls: list[Callable[[], Awaitable[Reply]]], concurrency: int) -> list[Reply]:
    """Every call's reply; so many are under way at a time."""
    waiting = iter(calls)

    async def work() -> list[Reply]:
        return [await call() for call in waiting]

    replies = await asyncio.gather(*(work() for _ in range(concurrency)))
    return [reply for part in replies for reply in part]


async def _batch(complete: Complete, chat: Chat, texts: Texts, seed: int) -> list[Reply]:
    rng = random.Random(f"batch {seed}")
    prompts = [texts.draw(128, rng) for _ in range(32)]
    return await _all([partial(complete, p, 64) for p in prompts], 16)


async def _shared(complete: Complete, chat: Chat, texts: Texts, seed: int) -> list[Reply]:
    rng = random.Random(f"shared {seed}")
    prefixes = [texts.draw(512, rng) for _ in range(8)]
    prompts = [prefix + texts.draw(32, rng) for prefix in prefixes for _ in range(8)]
    rng.shuffle(prompts)
    return await _all([partial(complete, p, 32) for p in prompts], 16)


async def _chats(complete: Complete, chat: Chat, texts: Texts, seed: int) -> list[Reply]:
    rng = random.Random(f"chats {seed}")
    users = [[texts.draw(96, rng) for _ in range(4)] for _ in range(8)]

    async def talk(questions: list[str]) -> list[Reply]:
        messages, replies = [{"role": "system", "content": "Answer at length."}], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            replies.append(await chat(messages, 48))
            messages.append({"role": "assistant", "content": replies[-1].text})
        return replies

    return [reply for part in await asyncio.gather(*map(talk, users)) for reply in part]


async def _single(complete: Complete, chat: Chat, texts: Texts, seed: int) -> list[Reply]:
    rng = random.Random(f"single {seed}")
    prompts = [texts.draw(128, rng) for _ in range(2)]
    return await _all([partial(complete, p, 128) for p in prompts], 1)


LOADS = (
    Load("batch", "32 requests, 128 tokens in, 64 out, 16 at a time", 64, _batch),
    Load("shared", "64 requests in 8 groups that share 512 tokens, 32 of their own, 32 out, "
         "16 at a time, shuffled", 32, _shared),
    Load("chats", "8 users at once, 4 turns of 96 tokens in and 48 out each, the server's own "
         "answers sent back", 48, _chats),
    Load("single", "2 requests one after the other, 128 tokens in, 128 out", 128, _single),
)
