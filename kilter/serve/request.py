"""A request: a text in the making, described by three integers, ``cached <= computed <= length``.

There are no phases. Whatever is between ``computed`` and ``length`` is work: a fresh prompt has all
of it, a prefix hit moves ``computed`` forward without work, a decode has one token of it, and a
preempted request has all of it again.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from kilter.serve.radix_node import token_key


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """What the scheduler and the executor know of a request.

    Attributes:
        id: arrival number; a lower one is older.
        tokens: prompt and answer so far; ``length`` is their number. Grown by `append` only.
        max_length: the answer ends when there are this many tokens.
        namespace: cached prefixes are shared within one (weights, adapter, salt).
        priority: higher is served first by the priority policy.
        reuse: whether it may start from a cached prefix (not where the log-probabilities of its
            prompt are wanted: those have to be computed).
        share: whether what it computes may enter the prefix cache.
        prompt_length: how many of the tokens are the prompt.
        cached: tokens whose keys and values were found at the last admission.
        found: tokens that were found at the first one, None before it: a preempted request finds
            much of what it computed itself, which is nothing that its prompt was spared.
        computed: tokens whose keys and values are in ``pages``.
        pages: page ids in order of position; held by this request.
        since: the scheduler's step at which it came.
    """

    id: int
    tokens: list[int]
    max_length: int
    namespace: Hashable = None
    priority: int = 0
    reuse: bool = True
    share: bool = True
    prompt_length: int = 0
    cached: int = 0
    found: int | None = None
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    since: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = self.prompt_length or len(self.tokens)
        self._key = bytearray(token_key(self.tokens))

    def append(self, token: int) -> None:
        """Adds a token of the answer."""
        self.tokens.append(token)
        self._key += token.to_bytes(4, "little")

    def key(self, length: int | None = None) -> bytes:
        """The first ``length`` tokens (default all) as the radix tree compares them."""
        return bytes(self._key if length is None else self._key[:4 * length])

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length
