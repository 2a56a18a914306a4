"""Records to tokens, and which of the tokens are targets.

Text: every token is a target. A conversation: the tokens of the assistant's turns with the token
that ends a turn, for these are what the model has to write by itself. Where a turn begins and ends
is said by the template's own `{% generation %}` marks, or found by rendering prefixes:

    render(messages before the turn, with generation prompt)   <|im_start|>user ... assistant\\n
    render(messages up to the turn)                            ... assistant\\nHello.<|im_end|>\\n

The turn is what the second adds to the first, without the white space after its end token, which
is never generated. A turn that is not to be learned is no target.

A pair: both conversations, one after the other, each up to its last target, as a rollout ends
there. Turns that both have are the prompt's and no targets.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kilter.tokens import ChatTemplate, TemplateError, Tokenizer
from kilter.train.data.config import ChatConfig, DataConfig
from kilter.train.data.errors import DataError
from kilter.train.data.sources import Record

Span = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """Tokens of one record. targets_N: bool [N], or None where all are.

    chosen: of a pair, how many of the tokens are the chosen conversation, the rest being the
        rejected one; 0: no pair.
    margin: of a pair.
    """

    tokens_N: np.ndarray
    targets_N: np.ndarray | None
    chosen: int = 0
    margin: float = 0.0


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text. turns: the assistant's, in characters; marked: by the template."""

    text: str
    turns: Sequence[Span]
    marked: bool


class Tokeniser:
    """Makes documents of records in the way the data's settings say.

    Raises DataError where the tokenizer lacks what they need: an EOS, a BOS.
    """

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.tokenizer = tokenizer
        self._chat = config.chat
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._before, self._after = _ends(tokenizer, config)
        self._own_template = self._read_template()

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """What the records become, in their order; many at once are faster than one by one.

        Raises DataError, with the record's place, if one cannot be tokenised.
        """
        try:
            return self._documents(records)
        except ValueError as error:
            for record in records if len(records) > 1 else ():
                self.documents([record])  # raises for the one
            raise DataError(f"{records[0].where}: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts alone. A corpus is text from strangers: "<|im_end|>" in it is no end
        of a turn."""
        return self.tokenizer.encode_batch(texts, parse_special=False)

    def fingerprint(self, chat: bool) -> str:
        """Equal for two tokenisers that make the same documents of the same records."""
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    digest.update(path.name.encode() + b"\0" + path.read_bytes())
        settings: list[Any] = [self._before, self._after]
        if chat:
            own = self._own_template.source if self._own_template else None
            settings = [self._chat.turns, own, dict(self._chat.variables)]
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _documents(self, records: Sequence[Record]) -> list[Document]:
        texts = iter(self.encode([r.value for r in records if isinstance(r.value, str)]))
        rendered = [self._sides(r.value) for r in records if not isinstance(r.value, str)]
        encoded = iter(self.tokenizer.encode_batch_with_offsets(
            [side.text for sides in rendered for side in sides]))
        masked = iter([[self._masked(side, *next(encoded)) for side in sides]
                       for sides in rendered])
        return [self._text(record, next(texts)) if isinstance(record.value, str)
                else _joined(next(masked), record.value) for record in records]

    def _text(self, record: Record, ids: list[int]) -> Document:
        before = self._before if record.begins else []
        after = self._after if record.ends else []
        if not ids and record.begins and record.ends:
            before = after = []  # nothing is said, so there is nothing to learn
        return Document(np.array([*before, *ids, *after], self.dtype), None)

    def _sides(self, value: Mapping[str, Any]) -> list[_Rendered]:
        """A conversation; or the two of a pair, without the turns that both have."""
        if "chosen" not in value:
            return [self._rendered(value["messages"], value["tools"], value.get("learned"))]
        both = [self._rendered(value[side], value["tools"]) for side in _SIDES]
        shared = _shared_turns(*both)
        return [_Rendered(side.text, side.turns[shared:], side.marked) for side in both]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
        learned: Sequence[bool] | None = None,
    ) -> _Rendered:
        """learned: whether each message is; None: all that the assistant says is."""
        template = self._own_template or self.tokenizer.chat_template(tools)
        self._check_template(template, messages, tools)
        text, spans = template.render_with_spans(messages, tools, **self._chat.variables)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        skips = learned is not None and not all(learned[turn] for turn in turns)
        if spans and skips and len(spans) != len(turns):
            raise DataError(f"Not all of the assistant's {len(turns)} turns are to be learned, but "
                            f"the chat template marks {len(spans)} with {{% generation %}}, so "
                            "which of them cannot be told. Let it mark each turn once.")
        last = slice(-1, None) if self._chat.turns == "last" else slice(None)
        if spans and not skips:
            return _Rendered(text, spans[last], True)
        wanted = [turn for turn in turns[last] if learned is None or learned[turn]]
        if spans:
            return _Rendered(text, [spans[turns.index(turn)] for turn in wanted], True)
        if not turns:
            raise DataError("The conversation has no assistant turn, so there is nothing to learn "
                            "from it. Remove it, or correct its roles.")
        return _Rendered(text, _turns_by_prefix(template, text, messages, tools, self._chat,
                                                wanted), False)

    def _check_template(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Raises DataError for what the template would leave out without a word."""
        if tools and "tools" not in template.reads:
            raise DataError("The conversation has tools, but the chat template does not show any. "
                            "Set a template that does, or remove the tools.")
        if "tool_calls" not in template.source and any(m.get("tool_calls") for m in messages):
            raise DataError("The conversation has tool_calls, but the chat template does not show "
                            "any. Set a template that does, or write them into the content.")
        unread = [name for name in self._chat.variables if name not in template.reads]
        if unread:
            raise DataError(f"The chat setting variables has {unread[0]!r}, which the template "
                            f"does not read; it reads {', '.join(sorted(template.reads))}. "
                            "Correct or remove it.")

    def _masked(self, rendered: _Rendered, ids: list[int], offsets: list[Span]) -> Document:
        targets_N = np.zeros(len(ids), bool)
        offsets_N2 = np.array(offsets, np.int64).reshape(len(ids), 2)
        for span in rendered.turns:
            begin, end = _tokens_of(span, offsets_N2)
            targets_N[begin : end if rendered.marked else self._trimmed(ids, begin, end)] = True
        return Document(np.array(ids, self.dtype), targets_N)

    def _trimmed(self, ids: Sequence[int], begin: int, end: int) -> int:
        """The end of a turn without white space after its last special token."""
        for last in range(end - 1, begin - 1, -1):
            if ids[last] in self.tokenizer.special_ids:
                return last + 1
            if self.tokenizer.token_bytes(ids[last]).strip():
                break
        return end

    def _read_template(self) -> ChatTemplate | None:
        if self._chat.template is None:
            return None
        try:
            source = Path(self._chat.template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"The chat template {self._chat.template} cannot be read: "
                            f"{error.strerror or error}.") from error
        return ChatTemplate(source, self.tokenizer.special_tokens)


_SIDES = ("chosen", "rejected")


def _joined(sides: Sequence[Document], value: Mapping[str, Any]) -> Document:
    """A conversation as it is; the two of a pair one after the other, up to their last targets."""
    if len(sides) == 1:
        return sides[0]
    parts = []
    for name, document in zip(_SIDES, sides, strict=True):
        assert document.targets_N is not None
        found = np.flatnonzero(document.targets_N[1:])
        if not len(found):
            raise DataError(f"The {name} answer has no token of the assistant, so there is "
                            "nothing to compare. Remove the record, or correct its roles.")
        end = int(found[-1]) + 2
        parts.append((document.tokens_N[:end], document.targets_N[:end]))
    tokens_N, targets_N = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Document(tokens_N, targets_N, len(parts[0][0]), value["margin"])


def _shared_turns(one: _Rendered, other: _Rendered) -> int:
    """How many turns two conversations have in common from their beginning."""
    count = 0
    for a, b in zip(one.turns, other.turns, strict=False):
        if a != b or one.text[: a[1]] != other.text[: b[1]]:
            break
        count += 1
    return count


def _ends(tokenizer: Tokenizer, config: DataConfig) -> tuple[list[int], list[int]]:
    """What stands before and after each text document."""
    bos, before = tokenizer.bos_token_id, []
    adds_bos = bos in tokenizer.encode("") if config.bos is None else config.bos
    if adds_bos:
        if bos is None:
            raise DataError("The data asks for a BOS before each document, but the tokenizer has "
                            "none. Set bos to false.")
        before = [bos]
    if config.eos and not tokenizer.eos_token_ids:
        raise DataError("The data asks for an EOS after each document, but the tokenizer has "
                        "none. Set eos to false.")
    return before, tokenizer.eos_token_ids[:1] if config.eos else []


def _turns_by_prefix(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat: ChatConfig,
    turns: Sequence[int],
) -> list[Span]:
    """Character ranges of messages of the assistant in `text`, the rendering of all messages."""
    spans = []
    for turn in turns:
        try:
            before = template.render(messages[:turn], tools, True, **chat.variables)
            upto = text
            if turn + 1 < len(messages):
                upto = template.render(messages[: turn + 1], tools, False, **chat.variables)
        except TemplateError as error:
            raise DataError(f"Where the assistant's turn messages[{turn}] begins and ends cannot "
                            f"be told, because the messages before it do not render alone: "
                            f"{error} {_MARKS}") from error
        if not upto.startswith(before) or not text.startswith(upto):
            other, what = ((before, "generation prompt") if not upto.startswith(before)
                           else (upto, "text up to it"))
            at = next((i for i, (a, b) in enumerate(zip(other, text, strict=False)) if a != b),
                      min(len(other), len(text)))
            last = "" if chat.turns == "last" else ', or set turns to "last"'
            raise DataError(f"Where the assistant's turn messages[{turn}] begins and ends cannot "
                            f"be told, because the chat template renders the {what} differently "
                            f"when more messages follow: {other[at : at + 30]!r} becomes "
                            f"{text[at : at + 30]!r} at character {at}. {_MARKS[:-1]}{last}.")
        spans.append((len(before), len(upto)))
    return spans


_MARKS = ("Give a template that marks the assistant's turns with {% generation %} and "
          "{% endgeneration %}.")


def _tokens_of(span: Span, offsets_N2: np.ndarray) -> Span:
    """The range of tokens that stand for any of the span's characters."""
    inside = np.flatnonzero((offsets_N2[:, 0] < span[1]) & (offsets_N2[:, 1] > span[0]))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
