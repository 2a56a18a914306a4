"""What a request may ask of its tokens: how they are chosen, reported, and when they end.

Plain data, checked when it is made: every problem is listed in one error. What needs the model's
vocabulary is checked by `check`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_GREEDY_UP_TO = 1e-4  # temperatures this small are taken as zero
_MAX_ANSWERS = 128  # of one request, as OpenAI has it
_LISTED = 20  # problems that one error names
_MAX_BIAS = 1e30  # keeps any sum of logits and biases finite in fp32


@dataclass(frozen=True)
class GrammarSpec:
    """A language that the answer must belong to.

    kind: "json_schema" (text: the schema), "json_object" (any JSON object; text is empty),
        "regex" (the whole answer matches; no look-around, no back references), or "ebnf" (GBNF as
        llama.cpp writes it, first rule ``root``, or Lark as llguidance extends it, ``start``).

    Whether the text is a usable schema or grammar is found out by `GrammarCompiler.compile`.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf"]
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "ebnf"):
            raise ValueError(f"A grammar's kind is {self.kind!r} but must be json_schema, "
                             f"json_object, regex or ebnf.")
        if not isinstance(self.text, str):
            raise ValueError(f"A grammar's text must be a string but is a "
                             f"{type(self.text).__name__}.")
        if self.kind == "json_object" and self.text:
            raise ValueError("A json_object grammar takes no text; use json_schema for a schema.")

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """The grammar of a JSON schema given as a Python object (the order of properties counts).

        Raises:
            ValueError: if it cannot be written as JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"The JSON schema cannot be written as JSON: {reason}.") from error


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    `kilter.serve.sampler` says in which order the settings act. ``stop``, ``stop_token_ids`` and
    ``logit_bias`` take any collection and are copied.

    Raises:
        ValueError: listing every setting that is out of range or of the wrong type.
    """

    max_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set with at least this probability (1904.09751)
    min_p: float = 0.0  # drop tokens under this fraction of the likeliest one's (2407.01082)
    seed: int | None = None  # None: a fresh one per request
    stop: tuple[str, ...] = ()  # text that ends the answer and is left out of it
    stop_token_ids: tuple[int, ...] = ()  # end the answer even under ignore_eos
    ignore_eos: bool = False  # the model's own end tokens do not end the answer
    # Log-probabilities to report for each token: its own and those of this many likeliest
    # alternatives (0: its own alone; None: none). False reads as None, True as 1.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for each prompt token after the first
    tempered_logprobs: bool = False  # log-probabilities of tokens are of logits / temperature, the
    # distribution that reinforcement learning scores, and not of the model's own
    n: int = 1  # answers to give; answer i draws from random stream (seed, i)
    best_of: int | None = None  # answers to make, of which the n likeliest per token are given
    presence_penalty: float = 0.0  # subtracted from each logit whose token is in the output
    frequency_penalty: float = 0.0  # subtracted once per time that the token is in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens
    # that are in the prompt or the output (1909.05858)
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to a token's logit
    include_stop: bool = False  # leave a stop string, once found, in the text
    min_tokens: int = 0  # before so many tokens nothing ends the answer: the model's end tokens
    # and stop_token_ids cannot be chosen, a stop string that is complete by then is text (one that
    # only begins there still counts); a grammar that is complete ends the answer all the same
    skip_special_tokens: bool = True  # leave special tokens out of the text
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        put = object.__setattr__
        put(self, "stop", _as_tuple(problems, "stop", self.stop))
        put(self, "stop_token_ids", _as_tuple(problems, "stop_token_ids", self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):
                put(self, name, 1 if value else None)
        for name, low, high in (("max_tokens", 0, None), ("top_k", 0, None), ("n", 1, _MAX_ANSWERS),
                                ("min_tokens", 0, None), ("seed", 0, 2**64 - 1),
                                ("best_of", 1, _MAX_ANSWERS), ("logprobs", 0, None),
                                ("prompt_logprobs", 0, None)):
            optional = name in ("seed", "best_of", "logprobs", "prompt_logprobs")
            if not (optional and getattr(self, name) is None):
                _check_integer(problems, name, getattr(self, name), low, high)
        for name, bottom, top in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0),
                                  ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
                                  ("frequency_penalty", -2.0, 2.0),
                                  ("repetition_penalty", 0.01, 100.0)):
            _check_number(problems, name, getattr(self, name), bottom, top)
        if self.top_p == 0:
            problems.append("top_p is 0 but must be more; for the likeliest token alone set "
                            "temperature to 0")
        if not all(isinstance(s, str) for s in self.stop):
            problems.append(f"stop is {self.stop!r} but must hold strings")
        elif "" in self.stop:
            problems.append("a stop string is empty")
        for token in self.stop_token_ids:
            _check_integer(problems, "a stop token id", token, 0, None)
        self._check_bias(problems)
        if self.tempered_logprobs and self.greedy:
            problems.append("tempered_logprobs needs a temperature above 0 and a top_k other than "
                            "1: one token that is certain has no distribution")
        if not problems and self.best_of is not None and self.best_of < self.n:
            problems.append(f"best_of is {self.best_of} but cannot be less than n, {self.n}")
        if not problems and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens is {self.min_tokens} but max_tokens is "
                            f"{self.max_tokens}")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            problems.append(f"grammar is a {type(self.grammar).__name__} but must be a GrammarSpec")
        _raise("These sampling settings cannot be used", problems)

    def check(self, vocab_size: int) -> None:
        """Checks what depends on the model.

        Raises:
            ValueError: naming every token id outside the vocabulary, and a count of log-probability
                alternatives above it.
        """
        problems = []
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                listed = ", ".join(map(str, outside[:10])) + (" …" if len(outside) > 10 else "")
                problems.append(f"{name} has token ids outside the vocabulary of {vocab_size} "
                                f"tokens: {listed}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                problems.append(f"{name} is {getattr(self, name)} but the vocabulary has "
                                f"{vocab_size} tokens")
        _raise("These sampling settings do not fit the model", problems)

    @property
    def greedy(self) -> bool:
        return self.temperature <= _GREEDY_UP_TO or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return (self.presence_penalty != 0 or self.frequency_penalty != 0
                or self.repetition_penalty != 1)

    def _check_bias(self, problems: list[str]) -> None:
        if not isinstance(self.logit_bias, Mapping):
            problems.append(f"logit_bias is a {type(self.logit_bias).__name__} but must map token "
                            f"ids to numbers")
            return
        for token, value in self.logit_bias.items():
            if not _is_integer(token):
                problems.append(f"logit_bias has the key {token!r} but keys must be token ids")
            _check_number(problems, f"logit_bias of token {token}", value, -_MAX_BIAS, _MAX_BIAS)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


@dataclass(frozen=True)
class BeamParams:
    """Beam search: how wide, how long, and how sequences of different lengths compare.

    A finished sequence's score is its log-probability divided by length ** length_penalty (above 0
    favours longer ones). early_stopping: True ends when ``width`` sequences are finished; False
    when no running one, scored at its present length, beats the worst of them; "never" when none
    could at any length up to max_tokens. (The settings of transformers, with its defaults.)

    Raises:
        ValueError: listing every setting that is out of range or of the wrong type.
    """

    width: int = 4
    max_tokens: int = 256
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        object.__setattr__(self, "stop_token_ids",
                           _as_tuple(problems, "stop_token_ids", self.stop_token_ids))
        _check_integer(problems, "width", self.width, 1, None)
        _check_integer(problems, "max_tokens", self.max_tokens, 1, None)
        _check_number(problems, "length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            problems.append(f"early_stopping is {self.early_stopping!r} but must be true, false or "
                            f"\"never\"")
        for token in self.stop_token_ids:
            _check_integer(problems, "a stop token id", token, 0, None)
        _raise("These beam search settings cannot be used", problems)


def _as_tuple(problems: list[str], name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable):
        return tuple(value)
    problems.append(f"{name} is {value!r} but must be a list")
    return ()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(problems: list[str], name: str, value: Any, low: int, high: int | None) -> None:
    if not _is_integer(value):
        problems.append(f"{name} is {value!r} but must be an integer")
    elif value < low or (high is not None and value > high):
        bound = f"{low} or more" if high is None else f"from {low} to {high}"
        problems.append(f"{name} is {value} but must be {bound}")


def _check_number(problems: list[str], name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        problems.append(f"{name} is {value!r} but must be a number")
    elif not low <= value <= high or math.isinf(value):
        bound = f"finite and {low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
        problems.append(f"{name} is {value} but must be {bound}")


def _raise(what: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(f"{what}: {'; '.join(problems[:_LISTED])}{more}.")
