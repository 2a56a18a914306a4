"""A request: a text in the making, described by three integers, ``cached <= computed <= length``.

There are no phases. Whatever is between ``computed`` and ``length`` is work: a fresh prompt has all
of it, a prefix hit moves ``computed`` forward without work, a decode has one token of it, and a
preempted request has all of it again.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """What the scheduler and the executor know of a request.

    Attributes:
        id: arrival number; a lower one is older.
        tokens: prompt and answer so far; ``length`` is their number.
        prompt_length: how many of them are the prompt.
        max_length: the answer ends when there are this many tokens.
        namespace: cached prefixes are shared within one (weights, adapter, salt).
        priority: higher is served first by the priority policy.
        use_cache: False computes every prompt token (their log-probabilities are wanted).
        cached: tokens whose keys and values were found at the last admission.
        computed: tokens whose keys and values are in ``pages``.
        pages: page ids in order of position; held by this request.
        handle: the locked end of its path in the radix tree.
        waited: scheduling steps it has been passed over, since it came or was preempted.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    max_length: int
    namespace: Hashable = None
    priority: int = 0
    use_cache: bool = True
    cached: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    handle: Any = None
    status: Status = Status.WAITING
    waited: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Most tokens the answer can still get."""
        return self.max_length - len(self.tokens)
