"""Structured output: the tokens that keep an answer inside a JSON schema, a regex or a grammar.

`GrammarCompiler` turns a `GrammarSpec` into a `Grammar` for one tokenizer; each answer follows its
own `GrammarState`, which masks logits and takes the chosen tokens. The work is llguidance's (the
extra ``kilter[structured]``): an Earley parser over the bytes of tokens, which knows nothing of the
tokenizer but `Tokenizer.token_bytes`. Special tokens are never text: an answer cannot spell one.

A schema or grammar comes from a stranger, so its size, its compilation and the work of each mask
are bounded, and whatever is wrong with it is a `GrammarError`.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kilter.serve.params import GrammarSpec
from kilter.tokens import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MAX_TEXT = {"json_schema": 256 * 1024, "json_object": 0, "regex": 16 * 1024, "ebnf": 64 * 1024}
# Between JSON's tokens: enough for any indented layout, but a model cannot write blanks for ever.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[\x20]{0,4}|\n[\x20\t]{0,64}"}


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that it cannot follow."""


class GrammarCompiler:
    """Makes grammars for one tokenizer, and keeps the last ``cache_size``. Safe between threads.

    Args:
        end_token_ids: tokens that end an answer besides the tokenizer's own.

    Raises:
        GrammarError: if the extra is not installed, or the model has no end token.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Iterable[int] = (),
                 cache_size: int = 64) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise GrammarError("Structured output needs the package llguidance, which is not "
                               "installed; install it with: pip install 'kilter[structured]'."
                               ) from error
        self._library = llguidance
        self._tokenizer = tokenizer
        self._ends = list(dict.fromkeys([*tokenizer.eos_token_ids, *end_token_ids]))
        if not self._ends:
            raise GrammarError("This model names no end token, so an answer inside a grammar could "
                               "never end; name one in its generation_config.json.")
        # An ambiguous grammar's row of parser items grows with the answer and a token costs its
        # square: at 500 some 15 ms. Real schemas stay far below.
        self._limits = llguidance.LLParserLimits(max_items_in_row=500, verbose_errors=False)
        # Whoever asks first compiles, others wait for that; what cannot be used is kept too.
        self._cache: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar of a spec. Takes milliseconds (the first call seconds, for the vocabulary).

        Raises:
            GrammarError: if it is malformed, uses something that is not supported, is too large, or
                no text at all can satisfy it.
        """
        with self._lock:
            vocabulary = self._vocabulary
            grammar = self._cache.get(spec)
            if mine := grammar is None:
                grammar = self._cache[spec] = Future()
                if len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(spec)
        if mine:
            try:
                grammar.set_result(Grammar(self._matcher(spec, vocabulary), self._ends))
            except BaseException as error:  # whatever it is, nobody may wait for ever
                grammar.set_exception(GrammarError(str(error)))
                if not isinstance(error, GrammarError):
                    with self._lock:
                        self._cache.pop(spec, None)
                    raise
        if (failure := grammar.exception()) is not None:
            raise GrammarError(str(failure))  # not that one: each time it is raised it would grow
        return grammar.result()

    def _matcher(self, spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
        what = {"json_schema": "JSON schema", "json_object": "JSON object grammar",
                "regex": "regular expression", "ebnf": "grammar"}[spec.kind]
        size, limit = len(spec.text), _MAX_TEXT[spec.kind]
        if size > limit:
            raise GrammarError(f"The {what} has {size} characters, more than the {limit} allowed; "
                               f"make it smaller.")
        from llguidance.gbnf_to_lark import gbnf_to_lark

        make = self._library.LLMatcher
        try:
            match spec.kind:
                case "json_schema":
                    source = make.grammar_from_json_schema(spec.text, defaults=JSON_OPTIONS)
                case "json_object":
                    source = make.grammar_from_json_schema('{"type": "object"}',
                                                           defaults=JSON_OPTIONS)
                case "regex":
                    source = make.grammar_from_regex(spec.text)
                case "ebnf":
                    gbnf = re.search(r"(?m)^\s*[\w-]+\s*::=", spec.text)
                    source = self._library.grammar_from(
                        "lark", gbnf_to_lark(spec.text) if gbnf else spec.text)
            matcher = make(vocabulary, source, log_level=0, limits=self._limits)
        except Exception as error:  # the GBNF converter raises bare ones
            raise GrammarError(f"The {what} cannot be used: {_first_lines(str(error))}") from error
        if matcher.is_error():
            raise GrammarError(f"The {what} cannot be used: {_first_lines(matcher.get_error())}")
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError(f"The {what} cannot be used: no text satisfies it, or none that "
                               f"these tokens can spell (a rule that only refers to itself, say).")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._ends)),
            eos_token=self._ends)


class Grammar:
    """A compiled grammar; `start` gives each answer its own state."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = frozenset(ends)

    def start(self, output_ids: Sequence[int] = ()) -> GrammarState:
        """The state after these tokens of an answer (those of a preempted one, say).

        Raises:
            GrammarError: if the grammar does not allow them.
        """
        state = GrammarState(self._matcher.deep_copy(), self._ends)
        for token in output_ids:
            state.accept(token)
        return state


class GrammarState:
    """Where one answer stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._ended = False  # by an end token, of which the matcher is not told

    def mask(self, logits_V: np.ndarray) -> None:
        """Sets the logits of all tokens that may not come next to -inf, in place. End tokens may
        come where the grammar may end. Logits beyond the tokenizer's vocabulary (the padding of an
        output layer) may never. Where the grammar leaves one text, only the token may come that
        the tokenizer itself would write, not each of its beginnings.

        Raises:
            GrammarError: if following the grammar became too costly, or no token can continue it.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=min(logits_V.size, 8 * bits.size), bitorder="little")
        if not allowed.any():
            raise GrammarError("No token of this model can continue the answer inside its grammar.")
        np.copyto(logits_V[:allowed.size], -np.inf, where=allowed == 0)
        logits_V[allowed.size:] = -np.inf

    def accept(self, token: int) -> None:
        """The answer goes on with this token.

        Raises:
            GrammarError: if the grammar does not allow it; the state is then of no more use.
        """
        if token in self._ends:
            if not self._matcher.is_accepting():
                raise GrammarError(f"Token {token} ends the answer where its grammar may not end.")
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            reason = _first_lines(self._matcher.get_error()) or "it has ended."
            raise GrammarError(f"The answer's grammar does not allow token {token}: {reason}")

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is a whole one."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can come: an end token did, or the grammar allows no other. The
        answer is complete then, with or without an end token, and so under ignore_eos too."""
        return self._ended or (self._matcher.is_stopped() and self.may_end)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"The answer's grammar can be followed no further: "
                               f"{_first_lines(self._matcher.get_error())}")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.union(ends))

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _first_lines(message: str) -> str:
    """The library's message on one line, without its state, back traces and quoted source."""
    lines = message.partition("<non-verbose/>")[0].partition("<backtrace>")[0].splitlines()
    text = "; ".join(line.strip() for line in lines
                     if line.strip(" |^") and not re.match(r" *\d+ \|", line))
    return (text if len(text) <= 300 else text[:300] + " …").rstrip(".") + "." if text else ""
