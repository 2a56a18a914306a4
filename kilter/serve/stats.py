"""What an engine is doing, in numbers: a small picture that is made after every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment between two steps. Counters only grow.

    Answers are counted, not requests: one that asks for n answers has n prompts, of which all but
    the first are usually found in the cache.

    Attributes:
        running: answers that run; waiting: those that do not yet, or not now.
        max_running: the limit of those that run together.
        max_context: longest prompt plus answer, tokens.
        page_size: tokens of a page.
        pages_total: pages of the cache; each is free, cached (only the prefix cache counts on it)
            or held (a running request does).
        preemptions: how often a running answer had to give its pages back.
        steps: steps that computed something; failed_steps: of them those that failed.
        step_seconds: time that all steps took together, seconds.
        last_step_seconds, last_step_tokens: duration and computed tokens of the last step.
        computed_tokens: tokens that all steps computed, those of preempted answers again.
        prompt_tokens: of the answers that have begun; cached_prompt_tokens: of these found in the
            prefix cache.
        completion_tokens: tokens that were chosen.
        weights_version: how often the weights were replaced.
    """

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    max_context: int = 0
    page_size: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_step_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    weights_version: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the prompts' tokens that was found in the cache; 0 before the first."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StepMeter:
    """Counts an engine's steps as they come."""

    def __init__(self) -> None:
        self.steps = self.failed_steps = 0
        self.seconds = self.last_seconds = 0.0
        self.tokens = self.last_tokens = 0
        self.completion_tokens = 0
        self.last_batch: list[tuple[int, int, int]] = []

    def begin(self, batch: list[tuple[int, int, int]]) -> None:
        """A step begins that computes so many tokens: (request number, answer's index, tokens)."""
        self.last_batch = batch

    def end(self, seconds: float) -> None:
        """The step has ended."""
        self.steps += 1
        self.last_seconds = seconds
        self.seconds += seconds
        self.last_tokens = sum(tokens for _, _, tokens in self.last_batch)
        self.tokens += self.last_tokens
