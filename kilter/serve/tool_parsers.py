"""Tool calls in a model's text, found while it streams.

Two ways of writing a call are known; `tool_format` tells from a chat template which one a model was
tuned on:

    hermes   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    llama3   {"name": "f", "parameters": {...}}; {"name": ...    or after <|python_tag|>

`ToolParser` takes text as it comes and gives events: text, and for each call its name and then its
arguments piece by piece, as OpenAI streams them. Nothing that may still become a call is given out
as text. What turns out not to be a call is given out as the text that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

ToolFormat = Literal["hermes", "llama3"]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_JSON_OUTSIDE_STRINGS = re.compile(r"[,:\s0-9a-zA-Z+.-]")  # brackets and quotes aside
# The start of a call in the usual order of keys, after which arguments can be given out.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"'
                     r"\s*:\s*(?=\{)")
_MAX_HEADER = 1024  # characters; past these a call is only given out as a whole


@dataclass(frozen=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The index-th call, from 0, calls this function."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces joined are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is over. Where its arguments are not valid JSON, or the text ended inside them,
    ``valid`` is False; ``raw`` is all the text that the call was read from."""

    index: int
    valid: bool
    raw: str


ToolEvent = Text | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object


def tool_format(chat_template: str) -> ToolFormat | None:
    """The way of writing calls that a chat template shows, or None."""
    if HERMES_OPEN in chat_template:
        return "hermes"
    if _PYTHON_TAG in chat_template or ('"parameters"' in chat_template
                                        and "ipython" in chat_template):
        return "llama3"
    return None


def parse_tool_calls(text: str, format: ToolFormat, names: Collection[str] | None = None
                     ) -> tuple[str, list[ToolCall]]:
    """(the text outside calls, the calls) of a whole answer. A broken call is part of the text,
    also where a stream has already begun to give it out."""
    parser = ToolParser(format, names)
    content: list[str] = []
    calls: list[ToolCall] = []
    name, arguments = "", ""
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case Text(text=piece):
                content.append(piece)
            case CallStart():
                name, arguments = event.name, ""
            case CallArguments(text=piece):
                arguments += piece
            case CallEnd(valid=True):
                calls.append(ToolCall(name, arguments))
            case CallEnd(raw=raw):
                content.append(raw)
    return "".join(content), calls


class ToolParser:
    """Finds the calls in a text that comes in pieces; how it is cut does not matter.

    Args:
        names: the functions there are. In llama3's bare form a JSON object counts as a call only if
            it names one of them, since an answer may be a JSON object too.
    """

    def __init__(self, format: ToolFormat, names: Collection[str] | None = None) -> None:
        if format not in ("hermes", "llama3"):
            raise ValueError(f"The tool format is {format!r} but must be hermes or llama3.")
        self._hermes = format == "hermes"
        self._marker = HERMES_OPEN if self._hermes else _PYTHON_TAG
        self._names = None if names is None else frozenset(names)
        self._waiting = ""  # text whose meaning is still open
        self._blank = True  # llama3: only blanks came so far, so a "{" begins a call
        self._after_call = False
        self._call: _Call | None = None
        self._count = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Takes more text; returns what is certain now."""
        self._waiting += text
        events: list[ToolEvent] = []
        while self._step(events, final=False):
            pass
        return _joined(events)

    def finish(self) -> list[ToolEvent]:
        """The text ends here: gives out what was held back."""
        events: list[ToolEvent] = []
        while self._step(events, final=True):
            pass
        return _joined(events)

    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        """Reads one part of what is waiting; False when it needs more text."""
        if self._call is not None:
            return self._read_call(self._call, events, final)
        if self._after_call and not self._skip_separator(final):
            return False
        return self._read_text(events, final)

    def _read_text(self, events: list[ToolEvent], final: bool) -> bool:
        waiting = self._waiting
        at = waiting.find(self._marker)
        bare = re.match(r"\s*\{", waiting) if self._blank and not self._hermes else None
        if bare is not None:
            self._begin(waiting[:bare.end() - 1], bare.end() - 1, named=True)
            return True
        if at >= 0:
            before = waiting[:at].rstrip()
            if before:
                self._give(events, before)
            self._begin(waiting[len(before):at + len(self._marker)], at + len(self._marker),
                        named=False)
            return True
        if final:
            keep = 0
            if self._after_call and not waiting.strip():
                self._waiting = ""
        else:
            # Blanks before a call are not part of the text, so they wait as a marker does.
            keep = _overlap(waiting, self._marker)
            keep = len(waiting) - len(waiting[:len(waiting) - keep].rstrip())
        if len(self._waiting) > keep:
            self._give(events, waiting[:len(waiting) - keep])
            self._waiting = waiting[len(waiting) - keep:]
        return False

    def _begin(self, prefix: str, at: int, named: bool) -> None:
        self._call = _Call(self._count, prefix, self._names if named else None)
        self._waiting = self._waiting[at:]

    def _give(self, events: list[ToolEvent], text: str) -> None:
        events.append(Text(text))
        self._blank = self._blank and not text.strip()
        self._after_call = False

    def _read_call(self, call: _Call, events: list[ToolEvent], final: bool) -> bool:
        taken = call.read(self._waiting, events)
        self._waiting = self._waiting[taken:]
        if not call.over and not final:
            return False
        self._call = None
        if call.end(events):
            self._count += 1
            self._after_call = not call.broken
            self._blank = self._after_call
        else:
            self._give(events, call.raw)
        return True

    def _skip_separator(self, final: bool) -> bool:
        """What stands between calls: the closing marker, or a semicolon. False to wait for more."""
        rest = self._waiting.lstrip()
        closing = HERMES_CLOSE if self._hermes else ";"
        if rest.startswith(closing):
            self._waiting = rest[len(closing):]
            return True
        return final or not closing.startswith(rest)


class _Call:
    """One call being read: a JSON object with a name and arguments.

    raw: everything it was read from, its marker included.
    """

    def __init__(self, index: int, prefix: str, names: frozenset[str] | None) -> None:
        self.raw = prefix
        self.over = False  # the object is complete, or cannot become one
        self.broken = False
        self._index = index
        self._names = names
        self._start = len(prefix)
        self._object = _Brackets()
        self._arguments: _Brackets | None = None  # once the header was read
        self._arguments_start = 0

    def read(self, text: str, events: list[ToolEvent]) -> int:
        """Takes what belongs to the call from the start of ``text``; returns how much."""
        taken, sound = self._object.read(text)
        self.over = self._object.closed or not sound
        self.broken = not sound
        self.raw += text[:taken]
        if self._arguments is None and len(self.raw) - self._start <= _MAX_HEADER:
            header = _HEADER.match(self.raw, self._start)
            if header is not None and self._known(name := header[1]):
                self._arguments, self._arguments_start = _Brackets(), header.end()
                events.append(CallStart(self._index, name))
                self._stream(self.raw[header.end():], events)
        elif self._arguments is not None:
            self._stream(text[:taken], events)
        return taken

    def end(self, events: list[ToolEvent]) -> bool:
        """No more will come. False if this was no call: then its text is ``raw``."""
        if self._arguments is not None:
            end = self._arguments_start + self._arguments.length
            valid = self._arguments.closed and _is_object(self.raw[self._arguments_start:end])
            self.broken = not valid
            events.append(CallEnd(self._index, valid, self.raw))
            return True
        found = self._whole()
        if found is None:
            return False
        self.broken = False
        events.extend((CallStart(self._index, found.name),
                       CallArguments(self._index, found.arguments),
                       CallEnd(self._index, True, self.raw)))
        return True

    def _stream(self, text: str, events: list[ToolEvent]) -> None:
        assert self._arguments is not None
        if not self._arguments.closed:
            taken, _ = self._arguments.read(text)
            if taken:
                events.append(CallArguments(self._index, text[:taken]))

    def _whole(self) -> ToolCall | None:
        """A call in another order of keys, without arguments, or with arguments as a string."""
        try:
            call = json.loads(self.raw[self._start:])
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not self._known(name):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str) and _is_object(arguments):
            return ToolCall(name, arguments)
        if not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _known(self, name: str) -> bool:
        return self._names is None or name in self._names


class _Brackets:
    """Follows a JSON object to its closing bracket, one piece of text at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.length = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> tuple[int, bool]:
        """(characters that belong to the object, whether they can be JSON). Stops after the closing
        bracket and before a character that no JSON has outside strings."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif self._depth == 0 and character != "{":
                if not character.isspace():
                    self.length += position
                    return position, False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    self.length += position + 1
                    return position + 1, True
            elif not _JSON_OUTSIDE_STRINGS.match(character):
                self.length += position
                return position, False
        self.length += len(text)
        return len(text), True


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1)
                 if text.endswith(marker[:n])), 0)


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring texts as one."""
    joined: list[ToolEvent] = []
    for event in events:
        if isinstance(event, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined
