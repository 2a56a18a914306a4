"""From tokens back to text, one token at a time, for streaming.

`Detokenizer` puts bytes through an incremental UTF-8 decoder, so a character is given out when it
is complete and never before; `StopChecker` holds back only what may still become a stop string.
Both keep constant state: the cost of a token does not depend on how many came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer asks of a tokenizer."""

    @property
    def strips_first_space(self) -> bool: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Text of a growing sequence of tokens.

    The pieces returned by `push` and `finish`, joined, equal `tokenizer.decode` of all tokens. A
    U+FFFD appears only where bytes really are invalid UTF-8.

    prompt_tail: the tokens that came before (the last few are enough). Their text is not given
        out, but a character that they began is completed, and a first space is kept where the text
        continues one.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next_space = tokenizer.strips_first_space
        for token_id in prompt_tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is final now, which may be ""."""
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        if data and self._strip_next_space:
            self._strip_next_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """End the text: return what was held back, a cut-off character as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class StopChecker:
    """Cuts a stream of text before (or after) the first stop string in it.

    "First" is the one that is complete first; of several complete at the same character, the
    longest. So the result does not depend on how the text was cut into pieces. Held back is only
    the longest suffix that is a proper prefix of some stop.

    Each stop is searched by the automaton of Knuth, Morris and Pratt: its state is the length of
    the longest suffix of the text that is a prefix of the stop.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(
                f"Stop strings must be a list of strings of at least one character, but are "
                f"{stops!r}. Remove the empty ones."
            )
        self.matched: str | None = None
        self._stops = [(stop, _borders(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take more text; return what is certain to come before a stop. "" once one is found.

        may_stop: False lets stops that are complete within this text pass; one that it only begins
            may still be completed later.
        """
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        for position in range(len(self._held), len(window)):
            for index, (stop, borders) in enumerate(self._stops):
                state = self._states[index]
                while state and stop[state] != window[position]:
                    state = borders[state]
                state += stop[state] == window[position]
                if state == len(stop) and not may_stop:
                    state = borders[state]
                if state == len(stop):
                    self.matched, self._held = stop, ""
                    end = position + 1
                    return window[: end if self._include_stop else end - len(stop)]
                self._states[index] = state
        keep = max(self._states, default=0)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def finish(self) -> str:
        """The text ends here: return what was held back."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """borders[n]: the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return borders
