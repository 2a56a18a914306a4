"""The typed job file: TOML and command-line overrides into dataclasses, unknown keys are errors.

    job = read_job(TrainJob, "sft.toml", ["optimizer.lr=1e-4", "layout.dp=2"])

A table of the file is a dataclass, a list of tables a tuple of dataclasses. The dataclasses say
what there is, with defaults and checks; this file only carries values into them, and says every
problem it meets at once, by the dotted name of the key.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

# A setting that names a file or folder. Its ~ is the home folder, which a shell leaves as it is
# after the = of an override.
FilePath: TypeAlias = Annotated[str, "path"]

T = TypeVar("T")


class JobError(ValueError):
    """A job that cannot be read; the message lists every problem."""


def read_job(kind: type[T], path: str | Path, overrides: Sequence[str] = (),
             elsewhere: Mapping[str, Sequence[str]] | None = None) -> T:
    """A job from a TOML file.

    Args:
        kind: the job's dataclass.
        overrides: ``dotted.key=value`` each, of which the last counts; a number stands for that
            part of a list. The value is TOML (``1e-4``, ``true``, ``[1, 2]``, ``"text"``), or text
            where it is no TOML.
        elsewhere: of other commands the settings by which a job of theirs is known.

    Raises:
        JobError: for a file that is not there or no TOML, an unknown key, a missing one, or a
            value of the wrong type or outside its range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise JobError(f"There is no job file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"The job file {path} is not valid TOML: {error}.") from None
    for override in overrides:
        _override(table, override)
    for command, settings in (elsewhere or {}).items():
        if theirs := [name for name in settings if name in table]:
            raise JobError(f"The job {path} has {', '.join(theirs)}, which only a job for "
                           f"`{command}` has; give it to that command, or leave "
                           f"{'it' if len(theirs) == 1 else 'them'} out.")
    return build(kind, table, str(path))


def build(kind: type[T], table: Mapping[str, Any], origin: str = "the job") -> T:
    """A job from a nested dict, as `read_job`."""
    problems: list[str] = []
    job = _dataclass(kind, table, "", problems)
    if problems:
        said = f"The{origin[3:]}" if origin.startswith("the ") else origin
        raise JobError(f"{said} cannot be used: {' '.join(problems)}")
    return job


def dump(job: Any) -> dict[str, Any]:
    """The job as a nested dict of plain values, which `build` reads back."""
    return {f.name: _plain(getattr(job, f.name)) for f in dataclasses.fields(job)
            if getattr(job, f.name) is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dump(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return str(value) if isinstance(value, Path) else value


def _override(table: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        raise JobError(f"The override {override!r} must have the form dotted.key=value.")
    value = _override_value(override, text.strip())
    place: Any = table
    for depth, name in enumerate(names):
        if isinstance(place, dict):
            key: Any = name
        elif not isinstance(place, list):
            raise JobError(f"The override {override!r} reaches into {names[depth - 1]}, which is "
                           "not a table.")
        elif name.isdecimal() and int(name) < len(place):
            key = int(name)
        else:
            after = names[depth + 1:] if name.lstrip("-").isdecimal() else names[depth:]
            example = ".".join([*names[:depth], "0", *after])
            raise JobError(f"The override {override!r} reaches into a list of {len(place)}, which "
                           f"has no {name}"
                           + (f"; count from 0, as in {example}." if place else "."))
        if depth == len(names) - 1:
            place[key] = value
        else:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]


def _override_value(override: str, text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith(("[", "{", '"', "'")):  # meant as TOML
            raise JobError(f"The override {override!r} has a value that is not valid TOML: "
                           f"{error}. A shell takes quotes away; put single quotes around the "
                           "whole setting.") from None
        return text
    # No setting is a date, but a folder may be named by one.
    return text if isinstance(value, datetime.date | datetime.time) else value


def _dataclass(kind: type[Any], table: Any, where: str, problems: list[str]) -> Any:
    """An instance, or None with problems noted."""
    if not isinstance(table, Mapping):
        problems.append(f"{where or 'It'} is {_shown(table)} but must be a table of settings.")
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    before = len(problems)
    for key in table:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            problems.append(f"{_join(where, key)} is not a setting"
                            + (f"; did you mean {_join(where, close[0])}?" if close else
                               f"; there are {', '.join(fields)}."))
    for name, f in fields.items():
        needed = f.default is f.default_factory is dataclasses.MISSING
        if needed and name not in table:
            problems.append(f"{_join(where, name)} is missing.")
    values = {name: _value(hints[name], table[name], _join(where, name), problems)
              for name in fields if name in table}
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        problems.append(f"{where}: {error}" if where else str(error))
        return None


def _value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in args if a is not type(None)]
        if len(options) == 1:
            return _value(options[0], value, where, problems)
        for option in options:
            tried: list[str] = []
            found = _value(option, value, where, tried)
            if not tried:
                return found
        problems.append(f"{where} is {_shown(value)} but must be {_named(hint)}.")
        return None
    if origin is Annotated:
        found = _value(args[0], value, where, problems)
        return os.path.expanduser(found) if isinstance(found, str) else found
    if origin is Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            problems.append(f"{where} is {_shown(value)} but must be one of "
                            f"{', '.join(map(str, args))}.")
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, where, problems)
    if origin is tuple and isinstance(value, list | tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_value(args[0], v, f"{where}.{i}", problems)
                         for i, v in enumerate(value))
        if len(value) == len(args):
            return tuple(_value(a, v, f"{where}.{i}", problems)
                         for i, (a, v) in enumerate(zip(args, value, strict=True)))
    elif hint is tuple and isinstance(value, list | tuple):
        return tuple(value)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {k: _value(args[1], v, _join(where, k), problems) for k, v in value.items()}
    elif hint is Any:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            if math.isfinite(value):
                return float(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (
            hint is bool or not isinstance(value, bool)):
        return value
    alone = origin is tuple and isinstance(value, str) and args[0] is str and Ellipsis in args
    problems.append(f"{where} is {_shown(value)} but must be {_named(hint)}"
                    + (f", as in [{json.dumps(value)}]." if alone else "."))
    return None


def _shown(value: Any) -> str:
    """A value as the job file has it, as far as it matters."""
    if isinstance(value, bool | datetime.date | datetime.time):
        return str(value).lower()
    return repr(value)


def _named(hint: Any) -> str:
    """A type as a reader of the job file thinks of it."""
    plain = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text",
             Path: "a path", type(None): "left out"}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in plain:
        return plain[hint]
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_named(a) for a in args)
    if origin is Annotated:
        return _named(args[0])
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list ({_named(args[0])} each)"
        return f"a list of {len(args)}"
    if origin is Literal:
        return " or ".join(map(str, args))
    if dataclasses.is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "a table"
    return str(getattr(hint, "__name__", hint))


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)
