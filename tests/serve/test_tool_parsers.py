"""Tool calls: found however the text is cut, nothing lost, nothing of a call shown as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.serve.grammar import GrammarCompiler, GrammarError
from kilter.serve.tool_grammar import tool_call_grammar
from kilter.serve.tool_parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Text,
    ToolCall,
    ToolEvent,
    ToolFormat,
    ToolParser,
    parse_tool_calls,
    tool_format,
)
from kilter.weights.bridge import open_model
from kilter.weights.tokenizer import open_tokenizer
from tests.serve.test_grammar import generate, sentencepiece_tokenizer, text_of

WEATHER = '{"city": "São Paulo", "days": [1, {"a": "}"}], "say": "\\"</tool_call>; {"}'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "description": "root ::= start: no"}},
]


def stream(pieces: list[str], format: ToolFormat, names: list[str] | None = None
           ) -> list[ToolEvent]:
    parser = ToolParser(format, names)
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Events without regard to how text and arguments were cut."""
    result: list[ToolEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result


H = "<tool_call>"
# (format, text, text outside calls, calls)
GOOD: list[tuple[ToolFormat, str, str, list[ToolCall]]] = [
    ("hermes", f'{H}\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>', "",
     [ToolCall("weather", WEATHER)]),
    ("hermes", f'Let me see.\n\n{H}{{"name":"a","arguments":{{}}}}</tool_call>\n{H}\n'
               f'{{"name": "b", "arguments": {{"x": 1}}}}\n</tool_call>\n', "Let me see.",
     [ToolCall("a", "{}"), ToolCall("b", '{"x": 1}')]),
    ("hermes", f'{H}{{"arguments": {{"x": "é"}}, "name": "f"}}</tool_call> done', " done",
     [ToolCall("f", '{"x": "é"}')]),
    ("hermes", f'{H}{{"name": "f"}}</tool_call>', "", [ToolCall("f", "{}")]),
    ("hermes", f'{H}{{"name": "f", "arguments": "{{\\"x\\": 1}}"}}</tool_call>', "",
     [ToolCall("f", '{"x": 1}')]),
    # The object's own bracket is missing, the closing marker too: the arguments are whole.
    ("hermes", f'{H}{{"name": "f", "arguments": {{"x": 1}}\n</tool_call>', "",
     [ToolCall("f", '{"x": 1}')]),
    ("hermes", f'{H}{{"name": "f", "arguments": {{"x": 1}}}}', "", [ToolCall("f", '{"x": 1}')]),
    ("hermes", "no < call <tool> at all <tool_cal", "no < call <tool> at all <tool_cal", []),
    ("hermes", "", "", []),
    ("hermes", "  \n", "  \n", []),
    ("llama3", f'{{"name": "weather", "parameters": {WEATHER}}}', "",
     [ToolCall("weather", WEATHER)]),
    ("llama3", '\n{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}',
     "", [ToolCall("now", "{}"), ToolCall("weather", '{"a": 1}')]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {"a": [1, 2]}}', "",
     [ToolCall("now", '{"a": [1, 2]}')]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", [ToolCall("now", "{}")]),
    ("llama3", 'I will. <|python_tag|>{"name": "now", "parameters": {}}', "I will.",
     [ToolCall("now", "{}")]),
    # An answer that is JSON, a call of something else, a JSON object later in a text.
    ("llama3", '{"answer": {"name": "now"}}', '{"answer": {"name": "now"}}', []),
    ("llama3", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3", 'See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}',
     []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
]
# Broken calls are text in a whole answer, to the last character.
BROKEN: list[tuple[ToolFormat, str]] = [
    ("hermes", f"{H}not json</tool_call> and more"),
    ("hermes", f'a {H}{{"name": "f", "argum'),
    ("hermes", f'{H}{{"name": "f", "arguments": {{"x": 1'),
    ("hermes", f'{H}{{"name": "f", "arguments": {{"x": nope}}}}</tool_call>'),
    ("hermes", f'{H}{{"name": "f", "arguments": {{"x": <b>}}}}</tool_call>'),
    ("hermes", f'{H}{{"name": "\\q", "arguments": {{}}}}</tool_call>'),
    ("hermes", f'{H}{{"name": 5, "arguments": {{}}}}</tool_call>'),
    ("hermes", f'{H}{{"name": "f", "arguments": [1]}}</tool_call>'),
    ("hermes", f'{H}["f"]</tool_call>'),
    ("hermes", f"{H}{H}"),
    ("hermes", f'{H}"a'),
    ("llama3", '{"name": "now", "parameters": {"x": 1'),
    ("llama3", '{"name": "now", "parameters": {"x": 1 2}} tail'),
    ("llama3", "{"),
    ("llama3", "<|python_tag|>"),
]


@pytest.mark.parametrize("format,text,content,calls", GOOD)
def test_calls_are_found(format: ToolFormat, text: str, content: str, calls: list[ToolCall]
                         ) -> None:
    assert parse_tool_calls(text, format, ["weather", "now"]) == (content, calls)


@pytest.mark.parametrize("format,text", BROKEN)
def test_broken_calls_are_text(format: ToolFormat, text: str) -> None:
    assert parse_tool_calls(text, format, ["weather", "now"]) == (text, [])


@pytest.mark.parametrize("format,text", [(g[0], g[1]) for g in GOOD] + BROKEN)
def test_how_the_text_is_cut_does_not_matter(format: ToolFormat, text: str) -> None:
    names = ["weather", "now"]
    whole = joined(stream([text], format, names))
    assert joined(stream(list(text), format, names)) == whole
    for cut in range(1, len(text)):
        assert joined(stream([text[:cut], text[cut:]], format, names)) == whole


@pytest.mark.parametrize("format,text,content,calls", GOOD)
def test_the_stream_is_the_whole_answer(format: ToolFormat, text: str, content: str,
                                        calls: list[ToolCall]) -> None:
    events = joined(stream(list(text), format, ["weather", "now"]))
    assert "".join(e.text for e in events if isinstance(e, Text)) == content
    assert [e.name for e in events if isinstance(e, CallStart)] == [c.name for c in calls]
    assert [e.text for e in events if isinstance(e, CallArguments)] == [c.arguments for c in calls]
    ends = [e for e in events if isinstance(e, CallEnd)]
    assert [e.index for e in ends] == list(range(len(calls)))
    assert all(e.valid for e in ends)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser("hermes")
    head = f'{H}{{"name": "f", "arguments": {{"x": "'
    assert parser.push(head) == [CallStart(0, "f"), CallArguments(0, '{"x": "')]
    assert parser.push("abc") == [CallArguments(0, "abc")]
    assert parser.push('"}}') == [CallArguments(0, '"}'),
                                  CallEnd(0, True, head + 'abc"}}')]
    assert parser.push("\n</tool_call>") == []
    assert parser.finish() == []


def test_only_what_may_become_a_call_is_held_back() -> None:
    parser = ToolParser("hermes")
    assert parser.push("a <") == [Text("a")]
    assert parser.push("b") == [Text(" <b")]
    assert parser.push("<tool_") == []
    assert parser.push("x") == [Text("<tool_x")]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "now", "parameters": ', "{", "}",
    '"', "\\", ";", "[", "]", ",", " ", "\n", '{"a": 1}', "text", "<", '"name"', ":", "now"]),
    max_size=14), st.sampled_from(["hermes", "llama3"]))
def test_any_text_is_cut_invariant_and_kept(pieces: list[str], format: ToolFormat) -> None:
    text = "".join(pieces)
    events = stream(pieces, format, ["now"])
    assert joined(events) == joined(stream([text], format, ["now"]))
    assert all(event.text for event in events if isinstance(event, Text | CallArguments))
    content, calls = parse_tool_calls(text, format, ["now"])
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not calls:
        assert content == text


# ---- formats and forced calls ----

def test_the_format_is_told_by_the_template() -> None:
    assert tool_format("... <tool_call>\n{{ tool | tojson }}") == "hermes"
    assert tool_format('{"name": f, "parameters": {}} <|start_header_id|>ipython') == "llama3"
    assert tool_format("{{ messages[0].content }}") is None
    with pytest.raises(ValueError, match="hermes or llama3"):
        ToolParser("other")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    return GrammarCompiler(open_tokenizer(open_model(smollm2)))


@pytest.mark.parametrize("format", ["hermes", "llama3"])
@pytest.mark.parametrize("function", [None, "now", "weather"])
def test_forced_calls_are_calls(compiler: GrammarCompiler, format: ToolFormat,
                                function: str | None) -> None:
    tokenizer = compiler._tokenizer
    grammar = compiler.compile(tool_call_grammar(TOOLS, format, function))
    whole = 0
    for seed in range(12):
        state = grammar.start()
        tokens = generate(state, tokenizer.vocab_size, seed)
        if not state.is_finished:
            continue  # uniform logits seldom close what they open
        whole += 1
        content, calls = parse_tool_calls(text_of(tokenizer, tokens), format, ["now", "weather"])
        assert not content and calls
        for call in calls:
            assert call.name in ([function] if function else ["now", "weather"])
            arguments = json.loads(call.arguments)
            assert call.name != "weather" or isinstance(arguments["city"], str)
    assert whole


def test_what_a_forced_call_may_be() -> None:
    tokenizer = sentencepiece_tokenizer([])
    compiler = GrammarCompiler(tokenizer)

    def allows(text: str, format: ToolFormat, function: str | None = None, parallel: bool = True
               ) -> bool:
        grammar = compiler.compile(tool_call_grammar(TOOLS, format, function, parallel))
        try:
            return grammar.start(list(text.encode())).may_end
        except GrammarError:
            return False

    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    paris = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert allows(now, "hermes") and allows(paris, "hermes")
    assert allows(f"{now}\n{paris}", "hermes")
    assert not allows(f"{now}\n{paris}", "hermes", parallel=False)
    assert allows(now, "hermes", "now") and not allows(paris, "hermes", "now")
    assert not allows(f"{now}\n{now}", "hermes", "now")
    assert not allows(paris.replace("city", "town"), "hermes")
    assert not allows(paris.replace("Paris", 'Paris", "x": "y'), "hermes")
    assert not allows("Sure! " + now, "hermes") and not allows("", "hermes")
    bare = '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}'
    assert allows(bare, "llama3", "weather") and allows(f"{bare}; {bare}", "llama3")
    assert not allows(bare.replace("2", '"2"'), "llama3") and not allows(bare, "hermes")


def test_bad_tools_are_all_listed() -> None:
    with pytest.raises(ValueError) as error:
        tool_call_grammar([TOOLS[0], TOOLS[0], {"type": "web"}, {"function": {"name": "a b"}},
                           {"function": {"name": "s", "parameters": {"type": "string"}}},
                           {"function": {"name": "n", "parameters": {"x": float("nan")}}}],
                          "hermes")
    for words in ("two tools", "tool 2", "'a b'", "'s'", "'n'"):
        assert words in str(error.value)
    with pytest.raises(ValueError, match="'other', which is not among the tools: weather, now"):
        tool_call_grammar(TOOLS, "hermes", "other")
    with pytest.raises(ValueError, match="no tools"):
        tool_call_grammar([], "llama3")
