"""What a reward is given: one answer, with what it answers.

A reward reads `answer_text`, which is decoded from the tokens that the policy sampled and from no
others: what a tool or an environment said between two turns is not the policy's, and a number in it
must not score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it brings torch, and rewards need none
    from kilter.rl.experience import FinishReason

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One answer of the policy.

    Attributes:
        prompt: text, or the messages of a chat.
        answer_text: what the policy wrote; of several turns, each turn's text on lines of its own.
        token_ids: the action tokens, prompt and observations left out.
        finish: how it ended: by itself, at a limit of tokens, or interrupted.
        reference: the task's own record, any JSON: the right answer, tests, an address.
        metadata: whatever else a reward wants to know.
    """

    prompt: Prompt
    answer_text: str
    token_ids: tuple[int, ...] = ()
    finish: FinishReason = "stop"
    reference: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *, prompt: Prompt, tokens: Sequence[int], is_action: Sequence[bool],
           decode: Callable[[list[int]], str], finish: FinishReason = "stop",
           reference: Any = None, metadata: Mapping[str, Any] | None = None) -> Sample:
        """A sample from a rollout's tokens (prompt and answer) and its mask of sampled ones.

        Args:
            decode: token ids to text, without special tokens.
        """
        turns = action_turns(tokens, is_action)
        return cls(prompt=prompt, answer_text="\n".join(decode(turn) for turn in turns),
                   token_ids=tuple(token for turn in turns for token in turn), finish=finish,
                   reference=reference, metadata=metadata or {})


def action_turns(tokens: Sequence[int], is_action: Sequence[bool]) -> list[list[int]]:
    """The runs of neighbouring action tokens: one per turn of the policy.

    Raises ValueError where the mask is not as long as the tokens.
    """
    if len(tokens) != len(is_action):
        raise ValueError(f"There are {len(tokens)} tokens but the action mask has {len(is_action)} "
                         "entries; give one entry per token.")
    pairs = ((int(token), bool(action)) for token, action in zip(tokens, is_action, strict=True))
    return [[token for token, _ in run]
            for action, run in groupby(pairs, key=lambda pair: pair[1]) if action]
