"""Log-probabilities and tokens as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kilter.serve.sampler import Choice
from kilter.tokens import Detokenizer, Tokenizer

_LEAST = -9999.0  # OpenAI's value for "as good as impossible"; JSON has no infinity


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""A token's text; where its bytes alone are no UTF-8, ``bytes:\xe2\x82``."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """The entries of a chat choice's ``logprobs.content``."""
    return [{**_entry(tokenizer, choice.token_id, choice.logprob),
             "top_logprobs": [_entry(tokenizer, token, value) for token, value in choice.top]}
            for choice in choices]


def prompt_logprobs(tokenizer: Tokenizer, choices: Iterable[Choice]) -> list[Any]:
    """Of every prompt token, as in a chat's content; the first, which follows nothing, has none."""
    return [None, *chat_logprobs(tokenizer, choices)]


class CompletionLogprobs:
    """Writes the ``logprobs`` of a completion's choice piece by piece: four lists side by side.

    ``text_offset`` is where a token's text begins in the choice's text, special tokens left out if
    they are left out there.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool,
                 prompt_tail: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens,
                                 prompt_tail=prompt_tail)
        self._offset = 0

    def prompt(self, ids: Sequence[int], choices: Sequence[Choice]) -> dict[str, Any]:
        """Of an echoed prompt: its first token follows nothing and has no log-probability."""
        first = self._lists([Choice(ids[0])])
        first["token_logprobs"], first["top_logprobs"] = [None], [None]
        rest = self._lists(choices)
        return {name: first[name] + rest[name] for name in first}

    def answer(self, choices: Iterable[Choice]) -> dict[str, Any]:
        """Of the answer's next tokens."""
        return self._lists(choices)

    def _lists(self, choices: Iterable[Choice]) -> dict[str, list[Any]]:
        tokens, values, tops, offsets = [], [], [], []
        for choice in choices:
            tokens.append(token_text(self._tokenizer, choice.token_id))
            values.append(_finite(choice.logprob))
            top: dict[str, float] = {}
            for token, value in (*choice.top, (choice.token_id, choice.logprob)):
                # Tokens of one text share a key; the likeliest comes first and stays.
                top.setdefault(token_text(self._tokenizer, token), _finite(value))
            tops.append(top)
            piece = self._text.push(choice.token_id)
            # Bytes before it that turn out not to be a character become one in front of it.
            broken = len(piece) - len(tokens[-1]) if piece.endswith(tokens[-1]) else 0
            offsets.append(self._offset + broken)
            self._offset += len(piece)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops,
                "text_offset": offsets}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token), "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token))}


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(logprob, _LEAST)
