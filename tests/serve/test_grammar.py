"""Structured output: whatever is sampled inside a grammar belongs to it, and no schema, however
bad, does more than raise."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kilter.serve.grammar import Grammar, GrammarCompiler, GrammarError, GrammarState
from kilter.serve.params import GrammarSpec
from kilter.serve.sampler import SamplingError, SamplingParams, SamplingState
from kilter.tokens import Tokenizer
from kilter.weights.bridge import open_model
from kilter.weights.tokenizer import open_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", "é"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"zip": {
        "type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"],
        "additionalProperties": False}},
}


def is_person(value: Any) -> bool:
    return (isinstance(value, dict) and {"name", "age", "home"} <= set(value)
            and set(value) <= {"name", "age", "tags", "home"}
            and isinstance(value["name"], str) and len(value["name"]) <= 20
            and type(value["age"]) is int and 0 <= value["age"] <= 130
            and all(t in ("a", "b c", "é") for t in value.get("tags", []))
            and len(value.get("tags", [])) <= 3
            and (value["home"] is None or (set(value["home"]) == {"zip"} and bool(
                re.fullmatch("[0-9]{5}", value["home"]["zip"])))))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return open_tokenizer(open_model(smollm2))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.fixture(scope="module")
def bytes_compiler() -> GrammarCompiler:
    """A vocabulary of single bytes in sentencepiece spelling: quick to build, nothing to hide."""
    return GrammarCompiler(sentencepiece_tokenizer(["ab", "▁a"]), end_token_ids=[257])


def sentencepiece_tokenizer(pieces: list[str]) -> Tokenizer:
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ("</s>", "<end>", *pieces):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab, [], unk_token=None, byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                         decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["</s>", "<end>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def generate(state: GrammarState, vocab: int, seed: int, max_tokens: int = 200,
             prefer_end_after: int = 10) -> list[int]:
    """Tokens sampled from uniform logits; from some length on, an end is taken where allowed."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while not state.is_finished and len(tokens) < max_tokens:
        logits = rng.random(vocab, dtype=np.float32)
        if len(tokens) >= prefer_end_after:
            logits[ends_of(state)] += 1000
            logits[[ord(c) for c in '"}]'] if vocab < 1000 else []] += 100
        state.mask(logits)
        tokens.append(int(logits.argmax()))
        state.accept(tokens[-1])
    return tokens


def ends_of(state: GrammarState) -> list[int]:
    return sorted(state._ends)


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(t) for t in tokens
                    if t not in tokenizer.special_ids).decode()


@pytest.mark.parametrize("spec,belongs", [
    (GrammarSpec.json_schema(PERSON), lambda text: is_person(json.loads(text))),
    (GrammarSpec("regex", r"(yes|no), (1[0-2]|[1-9])h?"),
     lambda text: re.fullmatch(r"(yes|no), (1[0-2]|[1-9])h?", text) is not None),
    (GrammarSpec("ebnf", 'root ::= sum\nsum ::= n (" + " n)*\nn ::= [0-9] | "(" sum ")"\n'),
     lambda text: isinstance(eval(text, {"__builtins__": {}}), int)),
    (GrammarSpec("ebnf", 'start: "<" WORD ">"\nWORD: /[a-z]{1,9}/\n'),
     lambda text: re.fullmatch(r"<[a-z]{1,9}>", text) is not None),
])
def test_random_answers_belong(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec,
                               belongs: Callable[[str], bool]) -> None:
    grammar = compiler.compile(spec)
    whole = 0
    for seed in range(50):
        state = grammar.start()
        tokens = generate(state, tokenizer.vocab_size, seed)
        if not state.is_finished:
            continue  # uniform logits seldom close what they open
        whole += 1
        text = text_of(tokenizer, tokens)
        assert belongs(text), text
    assert whole >= 40


def test_random_json_objects_parse(bytes_compiler: GrammarCompiler) -> None:
    whole = 0
    for seed in range(50):
        state = bytes_compiler.compile(GrammarSpec("json_object")).start()
        tokens = generate(state, 260, seed, prefer_end_after=20)
        if state.is_finished:
            whole += 1
            text = b"".join(bytes_compiler._tokenizer.token_bytes(t) for t in tokens
                            if t not in (256, 257)).decode()
            assert isinstance(json.loads(text), dict)
    assert whole >= 40


def allowed(state: GrammarState, vocab: int) -> list[int]:
    logits = np.zeros(vocab, dtype=np.float32)
    state.mask(logits)
    assert set(np.unique(logits)) <= {0.0, -np.inf}
    return np.flatnonzero(logits == 0).tolist()


def test_the_mask_is_the_set_of_tokens_that_can_continue(compiler: GrammarCompiler,
                                                         tokenizer: Tokenizer) -> None:
    """Brute force: a token may come iff what it spells is the start of a member."""
    members = ["cat", "catalog", "cow, 12", "dog é", "dog èx"]
    state = compiler.compile(GrammarSpec("regex", "|".join(members))).start()
    encoded = [member.encode() for member in members]
    special = tokenizer.special_ids
    for so_far in (b"", b"c", b"cat", b"dog "):
        if so_far:
            state = compiler.compile(GrammarSpec("regex", "|".join(members))).start(
                tokenizer.encode(so_far.decode(), add_special_tokens=False))
        expected = [t for t in range(tokenizer.vocab_size) if t not in special
                    and (piece := tokenizer.token_bytes(t))
                    and any(m.startswith(so_far + piece) for m in encoded)]
        ends = tokenizer.eos_token_ids if so_far in encoded else []
        assert allowed(state, tokenizer.vocab_size) == sorted([*expected, *ends])
        assert state.may_end == (so_far in encoded)


def test_sentencepiece_tokens_and_every_end_token(bytes_compiler: GrammarCompiler) -> None:
    """Bytes, several tokens of one spelling ("a" twice is not possible here, "ab" and its bytes
    are), a leading space, and both end tokens."""
    state = bytes_compiler.compile(GrammarSpec("regex", "(ab| a)+")).start()
    assert allowed(state, 1000) == [ord(" "), ord("a"), 258, 259]  # and nothing in the padding
    state.accept(259)  # "▁a" is b" a"
    assert allowed(state, 264) == [ord(" "), ord("a"), 256, 257, 258, 259]
    state.accept(257)
    assert state.is_finished and state.may_end


def test_special_tokens_are_not_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("regex", r"<\|im_start\|>.*")).start()
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False)[0] not in allowed(
        state, tokenizer.vocab_size)


def test_replay_gives_the_same_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec.json_schema(PERSON))
    tokens = generate(grammar.start(), tokenizer.vocab_size, seed=5, prefer_end_after=0)
    state = grammar.start()
    for length, token in enumerate(tokens):
        replayed = allowed(grammar.start(tokens[:length]), tokenizer.vocab_size)
        assert allowed(state, tokenizer.vocab_size) == replayed
        state.accept(token)


def test_a_wrong_token_is_an_error(bytes_compiler: GrammarCompiler) -> None:
    grammar = bytes_compiler.compile(GrammarSpec("regex", "ab"))
    with pytest.raises(GrammarError, match="does not allow token 98"):
        grammar.start([98])
    with pytest.raises(GrammarError, match="may not end"):
        grammar.start([256])
    with pytest.raises(GrammarError, match="does not allow token 97"):
        grammar.start([97, 98, 256, 97])


def test_finished_without_an_end_token(bytes_compiler: GrammarCompiler) -> None:
    state = bytes_compiler.compile(GrammarSpec("regex", "ab")).start([97])
    assert not state.is_finished
    state.accept(98)
    assert state.is_finished
    assert allowed(state, 260) == [256, 257]


def test_blanks_are_bounded(bytes_compiler: GrammarCompiler) -> None:
    state = bytes_compiler.compile(GrammarSpec("json_object")).start([ord("{")])
    for blank in [ord("\n")] + [ord(" ")] * 64:
        state.accept(blank)
    assert {ord(" "), ord("\n")}.isdisjoint(allowed(state, 260))


# ---- schemas that are not usable ----

def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS: dict[str, Any] = {
    "unknown type": {"type": "strng"},
    "type is a number": {"type": 5},
    "a list": [1, 2],
    "a string": "object",
    "null": None,
    "properties is a list": {"type": "object", "properties": [1]},
    "a property is a number": {"type": "object", "properties": {"a": 5}},
    "required is a string": {"type": "object", "required": "a"},
    "missing $ref": {"$ref": "#/$defs/nope"},
    "$ref to itself": {"$ref": "#"},
    "$ref in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                         "$ref": "#/$defs/a"},
    "infinite by recursion": {"type": "object", "properties": {"a": {"$ref": "#"}},
                              "required": ["a"], "additionalProperties": False, "maxProperties": 0},
    "remote $ref": {"$ref": "https://example.com/schema.json"},
    "unknown format": {"type": "string", "format": "no-such-format"},
    "broken pattern": {"type": "string", "pattern": "("},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "back reference": {"type": "string", "pattern": r"(a)\1"},
    "empty enum": {"enum": []},
    "enum is a string": {"enum": "abc"},
    "huge enum": {"enum": [f"value {i} of far too many" for i in range(100_000)]},
    "minimum above maximum": {"type": "integer", "minimum": 5, "maximum": 2},
    "minLength above maxLength": {"type": "string", "minLength": 9, "maxLength": 3},
    "negative minItems": {"type": "array", "items": {}, "minItems": -1},
    "huge maxLength": {"type": "string", "maxLength": 10**12},
    "nested 200 deep": nested(200),
    "nested 700 deep": nested(700),
    "contradiction": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "false": False,
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "broken patternProperties": {"type": "object", "patternProperties": {"(": {}}},
    "empty anyOf": {"anyOf": []},
    "anyOf is a string": {"anyOf": "x"},
    "multipleOf 0": {"type": "integer", "multipleOf": 0},
    "if/then": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "exponential allOf": {"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"{side}{i}": {"type": "integer"}}}
        for side in "ab"]} for i in range(16)]},
    "lone surrogate": {"enum": ["\ud800"]},
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_bad_schema_is_an_error(bytes_compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(GrammarError, match=r"^The JSON schema .*\.$") as error:
        bytes_compiler.compile(GrammarSpec.json_schema(BAD_SCHEMAS[name]))
    assert "panic" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["", "{", '{"type": "string"', '{"a": NaN}', "\ud800", "{} {}"])
def test_text_that_is_not_json_is_an_error(bytes_compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError, match="JSON schema cannot be used"):
        bytes_compiler.compile(GrammarSpec("json_schema", text))


@pytest.mark.parametrize("schema", [float("nan"), {"a": {1, 2}}, nested(5000)])
def test_what_json_cannot_write_is_an_error(schema: Any) -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        GrammarSpec.json_schema(schema)


@pytest.mark.parametrize("text", [
    "(", "[", "*a", "a{2,1}", "[z-a]", "(?=a)b", "(?<!a)b", r"(a)\1", r"\bword\b", r"\p{Foo}",
    "a^b", "(?P<n>a", "\ud800", "(" * 3000 + "a" + ")" * 3000, "x" * 20_000, "[^\\s\\S]"])
def test_a_bad_regex_is_an_error(bytes_compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError, match=r"^The regular expression .*\.$"):
        bytes_compiler.compile(GrammarSpec("regex", text))


@pytest.mark.parametrize("text", [
    "", 'foo: "a"', 'rule ::= "a"', "root ::= other", "start: other", "start: start", 'start: "a',
    "start: x\nx: y\ny: x", 'root ::= root "a"', "root ::= [z", 'root ::= "a', "start: /(/",
    'start: "a"~5..2', 'start: %json {"type": "strng"}', "%import foo", "start: <nope>", "\x00",
    "start: @other", "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "start: " + '"a" ' * 20_000])
def test_a_bad_grammar_is_an_error(bytes_compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError, match=r"^The grammar .*\.$"):
        bytes_compiler.compile(GrammarSpec("ebnf", text))


def test_a_costly_grammar_ends_its_own_answer_only(bytes_compiler: GrammarCompiler) -> None:
    """What passes compilation but cannot be followed cheaply raises from mask, and sampling makes
    that the request's own error."""
    grammar = bytes_compiler.compile(GrammarSpec("ebnf", 'root ::= "a" s\ns ::= s s | "b" | ""\n'))
    state = SamplingState(SamplingParams(temperature=0), grammar=grammar.start())
    with pytest.raises(SamplingError, match="grammar"):
        for _ in range(1000):
            logits = np.zeros(260, dtype=np.float32)
            logits[ord("b")] = 1
            state.accept(state.choose(logits))
    healthy = bytes_compiler.compile(GrammarSpec("regex", "a|b")).start()
    assert allowed(healthy, 260) == [97, 98]


def test_grammars_are_cached_and_bounded(bytes_compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("regex", "cached")
    assert bytes_compiler.compile(spec) is bytes_compiler.compile(GrammarSpec("regex", "cached"))
    for i in range(200):
        bytes_compiler.compile(GrammarSpec("regex", f"n{i}"))
    assert len(bytes_compiler._cache) == 64
    assert isinstance(bytes_compiler.compile(spec), Grammar)


def test_without_the_package_the_error_says_what_to_install(
        tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install 'kilter\[structured\]'"):
        GrammarCompiler(tokenizer)


def test_a_model_without_an_end_token_is_refused() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(GrammarError, match="no end token"):
        GrammarCompiler(Tokenizer(backend, {}))


def test_threads_that_want_the_same_grammar_compile_it_once(monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
    """And wait for it, not for each other's; what fails fails for all, and again."""
    compiler = GrammarCompiler(sentencepiece_tokenizer(["a"]), (257,), cache_size=2)
    compiled: list[str] = []
    real, gate = compiler._matcher, threading.Event()

    def slow(spec: GrammarSpec, vocabulary: Any) -> Any:
        compiled.append(spec.text)
        if spec.text == "slow":
            assert gate.wait(30)
        return real(spec, vocabulary)

    monkeypatch.setattr(compiler, "_matcher", slow)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(compiler.compile, GrammarSpec("regex", "slow")) for _ in range(4)]
        quick = pool.submit(compiler.compile, GrammarSpec("regex", "quick"))
        assert quick.result(30) is not None and not any(future.done() for future in waiting)
        gate.set()
        assert len({id(future.result(30)) for future in waiting}) == 1
        broken = [pool.submit(compiler.compile, GrammarSpec("regex", "(")) for _ in range(3)]
        errors = [future.exception(30) for future in broken]
    assert all(isinstance(error, GrammarError) for error in errors)
    assert len({id(error) for error in errors}) == 3  # an error that is raised twice grows
    assert sorted(compiled) == ["(", "quick", "slow"]
    compiler.compile(GrammarSpec("regex", "other"))
    compiler.compile(GrammarSpec("regex", "more"))
    compiler.compile(GrammarSpec("regex", "quick"))  # it had to go, of three
    assert compiled.count("quick") == 2

    monkeypatch.setattr(compiler, "_matcher", lambda *_: 1 / 0)
    for _ in range(2):  # a bug is told each time, and nobody waits for ever
        with pytest.raises(ZeroDivisionError):
            compiler.compile(GrammarSpec("regex", "bug"))
