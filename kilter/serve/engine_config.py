"""Sizes of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kilter.serve.scheduler import SchedulerConfig


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        kv_tokens: tokens the KV cache holds, rounded up to pages.
        page_size: tokens per page, 1 to 64.
        max_context: longest prompt plus answer, tokens; default what the model was loaded for,
            at most what the cache holds.
        eos_token_ids: ids that end an answer besides the tokenizer's own.
    """

    kv_tokens: int = 16384
    page_size: int = 16
    max_context: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def num_pages(self) -> int:
        return -(-self.kv_tokens // self.page_size)

    def context_of(self, max_positions: int) -> int:
        """The longest prompt plus answer of a model with so many positions, tokens."""
        capacity = min(max_positions, self.num_pages * self.page_size)
        return min(self.max_context or capacity, capacity)

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.page_size <= 64:
            problems.append(f"page_size is {self.page_size} tokens but must be from 1 to 64")
        for name in ("kv_tokens", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value} but must be at least 1")
        if problems:
            raise ValueError(f"An engine cannot have these sizes: {'; '.join(problems)}.")
