"""The tables of settings in the documents are whole and true: every setting and option stands in
one, with its own default, and nothing stands there that does not exist."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from kilter.rl.algorithms import Recipe
from kilter.rl.config import RLJob
from kilter.rl.rewards.config import REWARDS, RewardConfig
from kilter.rl.rewards.judged import Jailed
from kilter.rl.tasks import FileConfig, GymConfig, TaskConfig
from kilter.train.config import TrainJob
from kilter.train.lora import LoraConfig
from kilter.train.preference.config import DpoConfig
from kilter.verbs import rl, serve, train

DOCS = Path(__file__).parents[1] / "docs"
# Tables of an RL job that are described for training.
SHARED = ("model", "optimizer", "schedule", "layout", "pipeline", "context", "recompute", "lora",
          "checkpoint", "launch")
NEEDED = object()  # the default of a setting that has to be given


def told(page: str, section: str = "") -> dict[str, str]:
    """What a page's tables of keys say: dotted name -> the default, as it is written ("" if the
    setting has to be given). Keys under a heading of one `[section]`, or in a table whose head
    names one, belong to it."""
    found: dict[str, str] = {}
    prefix, inside = section, False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            names = re.findall(r"`\[+([\w.]+)\]+`", line)
            prefix = names[0] if len(names) == 1 else section
        head = re.match(r"\| key (?:of `\[+([\w.]+)\]+` )?\| default \|", line)
        if head:
            inside, own = True, head[1] or prefix
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            keys, default = (cell.strip() for cell in line.split("|")[1:3])
            names = re.findall(r"`\[*([\w.]+)\]*`", keys)
            defaults = _split(default, len(names))
            for name, value in zip(names, defaults, strict=True):
                dotted = f"{own}.{name}" if own else name
                assert dotted not in found, f"{page} has {dotted} twice"
                found[dotted] = value
    return found


def _split(cell: str, count: int) -> list[str]:
    """The defaults of so many keys of one row; the same for all where it is no list of values."""
    values = _values(cell)
    if values is not None and len(values) == count:
        return [_toml(value) for value in values]
    return [cell] * count


def _values(cell: str) -> list[Any] | None:
    try:
        values: list[Any] = tomllib.loads(f"x = [{cell.replace('`', '')}]")["x"]
    except tomllib.TOMLDecodeError:
        return None
    return values


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def settings(kind: type, made: Any = None) -> Iterator[tuple[str, Any]]:
    """Dotted names of a job's settings with their defaults; tables and lists of tables too, and
    what is in them."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        default: Any = NEEDED
        if made is not None:
            default = getattr(made, field.name)
        elif field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, default
        part = _table(hints[field.name])
        if part is not None:
            own = default if dataclasses.is_dataclass(default) else None
            yield from ((f"{field.name}.{name}", value) for name, value in settings(part, own))


def _table(hint: Any) -> type | None:
    """The dataclass that a setting is, may be, or has a list of."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if get_origin(hint) in (tuple, Union, UnionType):
        return next(filter(None, map(_table, get_args(hint))), None)
    return None


def check(found: Mapping[str, str], kind: type, prefix: str = "", **others: Any) -> None:
    """That the tables have each setting of a job, with its default, and nothing else.

    Args:
        others: defaults that follow from other settings, of keys of ``recipe``.
    """
    there = {f"{prefix}{name}": default for name, default in settings(kind)}
    there |= {f"recipe.{name}": default for name, default in others.items()}
    assert [name for name in found if name not in there] == []
    for name, default in there.items():
        inner = [other for other in there if other.startswith(f"{name}.")]
        if name in found:
            assert (found[name] == "") == (default is NEEDED), name
            values = _values(found[name])
            if values and len(values) == 1 and not dataclasses.is_dataclass(default):
                plain = list(default) if isinstance(default, tuple) else default
                assert values[0] == plain, f"{name} is {plain}, and not {values[0]}"
        elif not inner:
            above = [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)]
            assert any(table in found for table in above), f"{name} is not told of"


def test_every_setting_of_a_training_job() -> None:
    found = told("training.md") | told("preference.md")
    check(found, TrainJob)


def test_every_setting_of_an_rl_job() -> None:
    own = told("rl.md")
    shared = {name: value for name, value in told("training.md").items()
              if name.split(".")[0] in SHARED}
    rewards = told("rewards.md")
    recipe = {field.name: field.default for field in dataclasses.fields(Recipe)
              if field.default is not dataclasses.MISSING}
    check(shared | own, RLJob, **recipe)
    check({k.removeprefix("rewards."): v for k, v in rewards.items() if k.startswith("rewards.")},
          RewardConfig)
    for table, kind in (("task.gym", GymConfig), ("task.file", FileConfig)):
        check({k: v for k, v in rewards.items() if k.startswith(f"{table}.")}, kind, f"{table}.")
    check({k: v for k, v in rewards.items() if k.startswith("task.") and k.count(".") == 1},
          TaskConfig, "task.")


def test_tables_that_are_told_of_twice() -> None:
    check(told("lora.md"), LoraConfig)
    check({k: v for k, v in told("preference.md").items() if k.startswith("dpo.")}, DpoConfig,
          "dpo.")


@pytest.mark.parametrize("kind", REWARDS)
def test_every_option_of_a_reward(kind: str) -> None:
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{kind}` |"))
    common = text[text.index("The last three kinds also have"):].partition("Workers")[0]
    told_of = set(re.findall(r"`(\w+)`", row))
    if issubclass(REWARDS[kind], Jailed):
        told_of |= set(re.findall(r"`(\w+)`", common))
    options = {field.name for field in dataclasses.fields(REWARDS[kind])
               if field.init and field.name != "name"}
    assert options <= told_of


def test_what_tells_the_jobs_of_the_two_commands_apart() -> None:
    names = {kind: {field.name for field in dataclasses.fields(kind)}
             for kind in (TrainJob, RLJob)}
    assert set(train.ELSEWHERE["kilter rl"]) <= names[RLJob] - names[TrainJob]
    assert set(rl.ELSEWHERE["kilter train"]) <= names[TrainJob] - names[RLJob]


def test_every_option_of_the_server() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    there = {option for action in parser._actions for option in action.option_strings} - {
        "-h", "--help"}
    text = (DOCS / "serving.md").read_text(encoding="utf-8")
    options = text[text.index("## Options"):text.index("## Endpoints")]
    assert set(re.findall(r"--[a-z][a-z-]*", options)) == there
