"""Prompts of a task in the run's order: place i of an endless row is always the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kilter.rl.rollout import Prompt
from kilter.rl.tasks import Task, TaskItem
from kilter.tokens import Tokenizer
from kilter.train.data.order import Permutation


@dataclass(frozen=True)
class Question:
    """A prompt and what it came from."""

    prompt: Prompt
    item: TaskItem


class Prompts:
    """Epoch after epoch of a task, each in an order of its own.

    Args:
        samples: of each prompt.
        format: how messages become tokens.
        seed: of the order; None: as the task has them.
        name: what the prompts' ids begin with.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, *, samples: int,
                 format: Literal["chat", "text"], seed: int | None, name: str = "p") -> None:
        if len(task) == 0:
            raise ValueError("The task has no prompts; give it at least one.")
        if format == "chat" and not tokenizer.has_chat_template:
            raise ValueError("rollout.format is chat, but the model's tokenizer has no chat "
                             "template; set rollout.format = \"text\" for a base model, or take "
                             "the tokenizer of a chat model (model.tokenizer).")
        self._task, self._tokenizer, self._samples = task, tokenizer, samples
        self._format, self._seed, self._name = format, seed, name

    def at(self, place: int) -> Question:
        """Raises ValueError for a task that fails, and messages that the format cannot take."""
        epoch, index = divmod(place, len(self._task))
        if self._seed is not None:
            order = Permutation(len(self._task), self._seed, "prompts", epoch)
            index = int(order(np.array([index]))[0])
        try:
            item = self._task[index]
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"The task failed at prompt {index}: {type(error).__name__}: {error}"
                             ) from error
        if not isinstance(item, TaskItem):
            raise ValueError(f"The task's prompt {index} is {item!r}, but must be a "
                             "kilter.rl.tasks.TaskItem.")
        return Question(Prompt(self._tokens(item.messages), place, f"{self._name}{place}",
                               self._samples), item)

    def _tokens(self, messages: tuple[Mapping[str, Any], ...]) -> list[int]:
        if self._format == "chat":
            return self._tokenizer.encode_chat(messages)
        text = "".join(str(message["content"]) for message in messages)
        return self._tokenizer.encode(text)
