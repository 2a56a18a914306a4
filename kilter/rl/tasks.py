"""Where prompts come from: a sequence of messages with references, read by index.

    task = build_task(TaskConfig(gym=GymConfig(dataset="chain_sum", size=1000)))
    item = task[17]          # TaskItem(messages, reference, id)

Item i of a task is the same whenever and wherever it is asked for, so a run resumes exactly from a
position. Messages are what a chat template takes; applying it is up to the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from kilter.job import FilePath
from kilter.rl.rewards.config import resolve

Split = Literal["train", "held_out"]
Message = Mapping[str, Any]

_TRIES = 512  # candidates for one item before its dataset is said to have too few questions


@dataclass(frozen=True)
class TaskItem:
    """One prompt.

    Attributes:
        messages: of a chat, each with role and content.
        reference: what a reward needs to judge an answer; any JSON.
        id: names the item among all items of the task's splits.
    """

    messages: tuple[Message, ...]
    reference: Any
    id: str


class Task(Protocol):
    """Prompts by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TaskItem: ...


class TaskError(ValueError):
    """A task that cannot be made or read as it is configured."""


@dataclass(frozen=True)
class GymConfig:
    """Questions of a reasoning-gym dataset (extra ``rl``).

    Almost every dataset draws item i from a generator seeded with its seed + i, so two of them
    whose seeds are 1 apart share all items but one. Here the splits, and the candidates for an
    item, have blocks of seeds that never meet. Different seeds may still ask the same question; so
    a question's text decides its split, by a hash, and an item is the first of its candidates that
    belongs to its split. No question is ever in both; within a split one may come twice.

    Attributes:
        dataset: its name in reasoning-gym.
        size, held_out_size: items of the splits.
        seed: of the first block.
        config: the dataset's own settings, without size and seed.
        held_out_share: the share of all possible questions that is kept for the held-out split. An
            item of it takes 1 / share candidates on average. 0: no held-out split, and item i is
            the dataset's own item i under `seed`.
        system: a system message; "" for none.
        template: the user's message, with {question} where the question goes.
    """

    dataset: str
    size: int = 1000
    held_out_size: int = 100
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    held_out_share: float = 0.1
    system: str = ""
    template: str = ("{question}\n\nThink first, then give only the final answer between <answer> "
                     "and </answer>.")

    def __post_init__(self) -> None:
        problems = []
        for name, value in (("size", self.size), ("held_out_size", self.held_out_size)):
            if value < 1:
                problems.append(f"{name} is {value} but must be at least 1.")
        if self.seed < 0:
            # a generator takes the seed's absolute value: −5 + i would meet 5 − i
            problems.append(f"seed is {self.seed} but must not be negative.")
        if not (self.held_out_share == 0.0 or 0.01 <= self.held_out_share <= 0.5):
            problems.append(f"held_out_share is {self.held_out_share} but must be 0, or 0.01 … "
                            "0.5.")
        if taken := {"size", "seed"} & self.config.keys():
            problems.append(f"config sets {', '.join(sorted(taken))}; set it beside config, which "
                            "has the dataset's other settings.")
        if "{question}" not in self.template:
            problems.append("template has no {question} in it; put it where the question goes.")
        if problems:
            raise ValueError(" ".join(problems))


@dataclass(frozen=True)
class FileConfig:
    """Prompts of a JSONL file: one object per line, with "messages" (a chat) or "prompt" (a text,
    which becomes the user's message), and "reference"; an "id" is optional.

    Attributes:
        path, held_out: files of the splits.
        system: a system message before each prompt that has none.
    """

    path: FilePath
    held_out: FilePath | None = None
    system: str = ""


@dataclass(frozen=True)
class TaskConfig:
    """Exactly one of these.

    Attributes:
        gym: a dataset of reasoning-gym.
        file: a JSONL file.
        python: "package.module:name" of a function (split, **options) → Task of your own.
        options: the function's.
    """

    gym: GymConfig | None = None
    file: FileConfig | None = None
    python: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("gym", "file", "python") if getattr(self, name) is not None]
        problems = []
        if len(given) != 1:
            problems.append(f"A task has {' and '.join(given) or 'no source'}, but needs exactly "
                            "one of gym, file and python.")
        if self.options and self.python is None:
            problems.append("options are for a task of your own; set python, or remove them.")
        if problems:
            raise ValueError(" ".join(problems))


def build_task(config: TaskConfig, split: Split = "train") -> Task:
    """A split of a task.

    Raises TaskError (a ValueError) where it cannot be had.
    """
    if split not in ("train", "held_out"):
        raise TaskError(f"split is {split!r} but must be train or held_out.")
    if config.gym is not None:
        return GymTask(config.gym, split)
    if config.file is not None:
        return FileTask(config.file, split)
    assert config.python is not None
    try:
        task: Any = resolve(config.python)(split, **config.options)
    except TypeError as error:
        raise TaskError(f"{config.python} cannot be called with a split and the options "
                        f"{', '.join(config.options) or '(none)'}: {error}.") from error
    if not (hasattr(task, "__len__") and hasattr(task, "__getitem__")):
        raise TaskError(f"{config.python} made {task!r}, but a task has a length and items by "
                        "index.")
    made: Task = task
    return made


class GymTask:
    """A split of a reasoning-gym dataset, as `GymConfig` says."""

    def __init__(self, config: GymConfig, split: Split = "train") -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise TaskError("A task of reasoning-gym needs its package. Install it with "
                            "`pip install 'kilter[rl]'`.") from error
        if split == "held_out" and config.held_out_share == 0.0:
            raise TaskError("held_out_share is 0, so there is no held-out split; set it to 0.1, "
                            "say.")
        self.config, self.split = config, split
        self._make = lru_cache(maxsize=64)(lambda block: reasoning_gym.create_dataset(
            config.dataset, **self.settings(block)))
        try:
            self._make(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise TaskError(f"reasoning-gym cannot make the dataset {config.dataset} with the "
                            f"config {dict(config.config)}: {error}.") from error

    def __len__(self) -> int:
        return self.config.size if self.split == "train" else self.config.held_out_size

    def __getitem__(self, index: int) -> TaskItem:
        _check_index(index, len(self))
        for block in range(_TRIES):
            entry = self._make(block)[index]
            if self._is_ours(entry["question"]):
                break
        else:
            raise TaskError(f"No question for item {index} of the {self.split} split was found in "
                            f"{_TRIES} tries; {self.config.dataset} has too few different "
                            "questions under this config. Raise held_out_share, or widen the "
                            "config.")
        user = self.config.template.replace("{question}", entry["question"])
        reference = {"dataset": self.config.dataset, "config": self.settings(block),
                     "index": index, "answer": entry["answer"]}
        return TaskItem(_messages(self.config.system, user), reference,
                        f"{self.config.dataset}/{self.split}/{index}")

    def settings(self, block: int) -> dict[str, Any]:
        """The dataset's config for candidates number `block`: train blocks at even multiples of the
        stride, held-out ones at odd, each of at most a stride of seeds."""
        stride = max(self.config.size, self.config.held_out_size)
        place = 2 * block + (self.split == "held_out")
        return {**self.config.config, "size": len(self), "seed": self.config.seed + place * stride}

    def _is_ours(self, question: str) -> bool:
        if self.config.held_out_share == 0.0:
            return True
        digest = hashlib.sha256(question.encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2.0 ** 64
        return (share < self.config.held_out_share) == (self.split == "held_out")


class FileTask:
    """A JSONL file of prompts, read whole and checked when it is made."""

    def __init__(self, config: FileConfig, split: Split = "train") -> None:
        path = config.path if split == "train" else config.held_out
        if path is None:
            raise TaskError("This task has no held-out file; set held_out to one.")
        self._items: list[TaskItem] = []
        seen: set[str] = set()
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        item = _item(line, config.system, f"{Path(path).name}/{number}", where)
                        if item.id in seen:
                            raise TaskError(f"{where} has the id {item.id!r} again; ids name one "
                                            "item each.")
                        seen.add(item.id)
                        self._items.append(item)
        except UnicodeDecodeError as error:
            raise TaskError(f"{path} is not UTF-8; convert it.") from error
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror or error}.") from error
        if not self._items:
            raise TaskError(f"{path} has no prompts; give one JSON object per line.")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> TaskItem:
        _check_index(index, len(self))
        return self._items[index]


def _item(line: str, system: str, id: str, where: str) -> TaskItem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise TaskError(f"{where} must be an object with either messages or prompt.")
    if unknown := record.keys() - {"prompt", "messages", "reference", "id"}:
        raise TaskError(f"{where} has the unknown fields {', '.join(sorted(unknown))}; put what a "
                        "reward needs into reference.")
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"]:
            raise TaskError(f"The prompt of {where} must be a text that is not empty.")
        messages = _messages(system, record["prompt"])
    else:
        given = record["messages"]
        good = isinstance(given, list) and given and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m
            for m in given)
        if not good:
            raise TaskError(f"The messages of {where} must be a list of at least one object with "
                            "role and content.")
        own = any(m["role"] == "system" for m in given)
        head = () if own or not system else ({"role": "system", "content": system},)
        messages = (*head, *given)
    return TaskItem(messages, record.get("reference"), str(record.get("id", id)))


def _messages(system: str, user: str) -> tuple[Message, ...]:
    head = ({"role": "system", "content": system},) if system else ()
    return (*head, {"role": "user", "content": user})


def _check_index(index: int, size: int) -> None:
    if not 0 <= index < size:
        raise IndexError(f"There is no item {index}; the task has {size}, counted from 0.")
