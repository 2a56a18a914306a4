"""Streaming gives exactly the text of the whole, character by complete character."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.tokens import Detokenizer, StopChecker, Tokenizer
from tests.tokens.texts import texts

KINDS = ["byte_level_gguf", "sentencepiece_gguf", "prefixed"]


class Bytes:
    """A tokenizer whose token n is the byte n; 256 is special."""

    strips_first_space = False
    special_ids = frozenset([256])

    def __init__(self) -> None:
        self.asked = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return b"<end>" if token_id == 256 else bytes([token_id])


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param != "prefixed":
        return Tokenizer.from_gguf_metadata(request.getfixturevalue(request.param))
    metadata = request.getfixturevalue("sentencepiece_gguf")
    return Tokenizer.from_gguf_metadata({**metadata, "tokenizer.ggml.add_space_prefix": True})


def test_stream_of_a_text_is_the_text_and_never_broken(tokenizer: Tokenizer) -> None:
    @settings(max_examples=200, deadline=None)
    @given(texts, st.booleans())
    def check(text: str, skip: bool) -> None:
        text = text.replace("▁", "_").replace("\ufffd", "?")
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        # The library's own decoder is the oracle: all these bytes are valid.
        assert "".join(pieces) == tokenizer._backend.decode(ids, skip_special_tokens=skip)
        assert all("\ufffd" not in piece for piece in pieces)

    check()


def test_stream_of_any_tokens_is_the_decoding_of_their_bytes(tokenizer: Tokenizer) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    def check(ids: list[int]) -> None:
        visible = [i for i in ids if i not in tokenizer.special_ids]
        data = b"".join(tokenizer.token_bytes(i) for i in visible)
        if tokenizer.strips_first_space:
            data = data.removeprefix(b" ")
        stream = Detokenizer(tokenizer)
        text = ""
        for token_id in ids:
            text += stream.push(token_id)
            assert data.decode(errors="replace").startswith(text)
        assert text + stream.finish() == data.decode(errors="replace") == tokenizer.decode(ids)

    check()


def test_all_sequences_of_difficult_bytes() -> None:
    difficult = [0x41, 0x80, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 0xFF]
    for data in itertools.product(difficult, repeat=4):
        stream = Detokenizer(Bytes())
        pieces = [stream.push(byte) for byte in data] + [stream.finish()]
        assert "".join(pieces) == bytes(data).decode(errors="replace")


def test_endless_lone_bytes_are_given_out_at_a_flat_cost() -> None:
    """A token looks at nothing but itself: the decoder asks for its bytes once, ever."""
    for lone in (0x80, 0xE2):
        source = Bytes()
        stream, checker = Detokenizer(source), StopChecker(["\ufffd!"])
        pieces = [checker.push(stream.push(lone)) for _ in range(2000)]
        assert source.asked == 2000
        assert max(map(len, pieces)) <= 1 and pieces[10:20] == ["\ufffd"] * 10
        assert "".join(pieces) + checker.push(stream.finish()) + checker.finish() == (
            "\ufffd" * 2000)


def test_a_cut_character_is_flushed_once() -> None:
    stream = Detokenizer(Bytes())
    assert [stream.push(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    assert Detokenizer(Bytes()).push(256) == ""
    assert Detokenizer(Bytes(), skip_special_tokens=False).push(256) == "<end>"


def test_prompt_tail_completes_characters_and_keeps_spaces(
    sentencepiece_gguf: dict[str, Any],
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(
        {**sentencepiece_gguf, "tokenizer.ggml.add_space_prefix": True}
    )
    prompt, word = tokenizer.encode("the"), tokenizer.encode(" fox", add_special_tokens=False)[1:]
    word = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(map(Detokenizer(tokenizer, prompt_tail=prompt).push, word)) == " fox"
    assert "".join(map(Detokenizer(tokenizer).push, word)) == "fox"
    assert "".join(map(Detokenizer(tokenizer, prompt_tail=[1]).push, word)) == "fox"
    head, *rest = "🙂!".encode()
    assert "".join(map(Detokenizer(Bytes(), prompt_tail=[65, head]).push, rest)) == "🙂!"


# ---- stop strings ----


def cut_by_hand(text: str, stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """The definition: the stop that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=14, max_size=14),
    st.booleans(),
)
def test_stops_do_not_depend_on_how_the_text_arrives(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    checker = StopChecker(stops, include)
    given_out, rest, taken = "", text, ""
    for size in sizes:
        chunk, rest = rest[:size], rest[size:]
        taken += chunk
        given_out += checker.push(chunk)
        if checker.matched is None:
            held = taken[len(given_out) :]
            candidates = [n for s in stops for n in range(1, len(s)) if taken.endswith(s[:n])]
            assert len(held) == max(candidates, default=0)  # nothing more than needed
    given_out += checker.finish()
    expected, which = cut_by_hand(text, stops, include)
    assert (given_out, checker.matched) == (expected, which)


def test_every_split_of_a_stop_string() -> None:
    text, stop = "Say <STOP> and more", "<STOP>"
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(3, 12), n) for n in range(5)
    ):
        edges = [0, *cuts, len(text)]
        checker = StopChecker([stop])
        pieces = [checker.push(text[a:b]) for a, b in itertools.pairwise(edges)]
        assert "".join(pieces) + checker.finish() == "Say "
        assert checker.matched == stop


def test_stop_strings_across_tokens(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox jumps over 你好 12"
    ids = tokenizer.encode(text)
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        stop = text[start:end]
        stream, checker = Detokenizer(tokenizer), StopChecker([stop])
        pieces = [*(checker.push(stream.push(i)) for i in ids), checker.push(stream.finish()),
                  checker.finish()]
        assert "".join(pieces) == text[: text.index(stop)]
        assert checker.matched == stop


def test_text_flows_at_once_where_no_stop_can_begin() -> None:
    checker = StopChecker(["\n\nHuman:"])
    assert checker.push("Hello") == "Hello"
    assert checker.push("\n") == ""
    assert checker.push("world") == "\nworld"


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1]])
def test_unusable_stops(stops: Any) -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopChecker(stops)


def test_a_stop_may_begin_in_text_that_may_not_stop_yet() -> None:
    """Whole stops pass there (overlapping ones too); one that it only begins still counts."""
    checker = StopChecker(["abab"])
    assert checker.push("xababab", may_stop=False) == "xabab"
    assert checker.push("ab") == ""
    assert checker.matched == "abab"
    checker = StopChecker(["END"])
    assert checker.push("END.EN", may_stop=False) == "END."
    assert checker.push("D!") == "" and checker.matched == "END"
