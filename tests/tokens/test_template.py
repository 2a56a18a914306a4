"""Chat templates: rendered as transformers renders them, and safe with any of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from transformers.utils.chat_template_utils import render_jinja_template

from kilter.tokens import ChatTemplate, TemplateError
from tests.tokens.chats import CHATML, FAMILIES, GEMMA, LLAMA3, MISTRAL, QWEN3
from tests.tokens.texts import texts

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "sun" & <b>rain</b> in °C 🙂',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}


def theirs(
    source: str, messages: list[Any], tools: Any = None, prompt: bool = True, **kw: Any
) -> str:
    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL, **kw
    )
    return rendered[0]


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_role_orders_render_or_raise_as_in_transformers(family: str) -> None:
    source = FAMILIES[family]
    template = ChatTemplate(source, SPECIAL)
    rendered = raised = 0
    for length in (1, 2, 3):
        for roles in itertools.product(["system", "user", "assistant", "tool"], repeat=length):
            messages = [{"role": r, "content": f" text {i}\n"} for i, r in enumerate(roles)]
            for prompt in (True, False):
                try:
                    expected = theirs(source, messages, prompt=prompt)
                except jinja2.TemplateError as error:
                    with pytest.raises(TemplateError) as caught:
                        template.render(messages, add_generation_prompt=prompt)
                    assert str(error).rstrip(".") in str(caught.value)
                    raised += 1
                else:
                    assert template.render(messages, add_generation_prompt=prompt) == expected
                    rendered += 1
    assert rendered > 0 and (raised > 0) == (family in ("mistral", "gemma"))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_goes_through_untouched(family: str) -> None:
    template = ChatTemplate(FAMILIES[family], SPECIAL)

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        messages = [user(text), {"role": "assistant", "content": text}, user("x")]
        assert template.render(messages) == theirs(FAMILIES[family], messages)

    check()


@pytest.mark.parametrize("source", [LLAMA3, QWEN3])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_and_tool_calls(source: str, as_text: bool) -> None:
    """Templates see arguments as an object; OpenAI's API carries them as JSON text."""
    call = json.loads(json.dumps(CALL))
    if as_text:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "content": "21", "tool_call_id": "a1"}
    ours = ChatTemplate(source, SPECIAL).render([user(), assistant, answer], [TOOL])
    given_object = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert ours == theirs(source, [user(), given_object, answer], [TOOL])
    assert '{"city": "Zürich"}' in ours and "<b>rain</b> in °C 🙂" in ours
    assert assistant["tool_calls"] == [call]  # the caller's messages are untouched


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(QWEN3, SPECIAL)
    for thinking in (True, False):
        ours = template.render([user()], enable_thinking=thinking)
        assert ours == theirs(QWEN3, [user()], enable_thinking=thinking)
        assert ours.endswith("</think>\n\n") == (not thinking)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_content_is_empty(family: str) -> None:
    template = ChatTemplate(FAMILIES[family], SPECIAL)
    empty = template.render([user(), {"role": "assistant", "content": ""}])
    assert template.render([user(), {"role": "assistant", "content": None}]) == empty
    assert template.render([user(), {"role": "assistant"}]) == empty
    assert "None" not in empty


@pytest.mark.parametrize("family", FAMILIES)
def test_text_parts_are_one_text(family: str) -> None:
    template = ChatTemplate(FAMILIES[family], SPECIAL)
    parts = [{"type": "text", "text": "One,"}, {"type": "text", "text": "two."}]
    assert template.render([user(parts)]) == template.render([user("One,two.")])


def test_parts_reach_a_template_that_takes_them() -> None:
    assert ChatTemplate(GEMMA, SPECIAL).takes_parts
    assert not any(ChatTemplate(s, SPECIAL).takes_parts for s in (CHATML, LLAMA3, MISTRAL, QWEN3))
    parts = [{"type": "text", "text": " One "}, {"type": "text", "text": " two "}]
    assert ChatTemplate(GEMMA, SPECIAL).render([user(parts)]) == theirs(GEMMA, [user(parts)])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "list of messages is empty"),
        ("hello", "must be a list of objects"),
        ({"role": "user"}, "must be a list of objects"),
        (["hello"], r"messages\[0\] must be an object with role"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([user(3)], r"content of messages\[0\] must be text"),
        ([user([{"type": "image_url", "image_url": {}}])], "part of the type 'image_url'"),
        ([user([{"type": "text"}])], "part of the type 'text'"),
        ([user(object())], r"messages\[0\].content is of type object"),
        ([user(), {"role": "assistant", "tool_calls": [3]}], r"tool_calls\[0\] must be an object"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
            "must be a JSON object",
        ),
        ([user(3), {"content": "x"}], r"messages\[0\] must be text.*messages\[1\] needs a role"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No, thanks.') }}", "does not accept this conversation: No, thanks."),
        ("{{ messages[0].name + 'x' }}", "reads something that is not there: .*name"),
        ("{{ ''.__class__.__mro__ }}", "stopped by its sandbox: .*__class__"),
        ("{{ messages.append(1) }}", "stopped by its sandbox"),
        ("{{ raise_exception.__globals__.x }}", "stopped by its sandbox"),
        ("{{ self.__init__.__globals__ }}", "sandbox|not there"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "sandbox|not there"),
        ("{{ namespace(a=1)['__class__'].__base__ }}", "sandbox|not there"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "stopped by its sandbox"),
        ("{{ ''|attr('__class__') }}{{ (''|attr('__class__')).x }}", "sandbox|not there"),
        ("{{ '%s'.__mod__('x') }}", "stopped by its sandbox"),
        ("{{ '{0.__class__}'.format(1) }}{{ ('{0.__class__.__mro__}'.format(1)).x }}", "sandbox"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "did not end within 200,000 loop iterations",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "did not end within",
        ),
        ("{{ 'a' * 10**9 }}", "gives more than 1,000,000 elements"),
        ("{{ [1] * 10**9 }}", "gives more than 1,000,000 elements"),
        ("{{ 9 ** (10 ** 8) }}", "gives more than 1,000,000 elements"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% include 'other' %}", "failed on this conversation: TypeError"),
    ],
)
def test_whatever_a_template_does_is_one_clear_error(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate(source).render([user()])
    assert isinstance(caught.value, ValueError) and str(caught.value).endswith(".")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}", "{% for %}"])
def test_syntax_errors(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not valid jinja: line 1: .+"):
        ChatTemplate(source)


def test_ordinary_jinja_works_as_in_transformers() -> None:
    sources = [
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}"
        "{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{% else %}none{% endfor %}",
        "{{ dict(a=1, b='<') | tojson }} {{ messages | tojson(indent=2, sort_keys=true) }}",
        "{{ '-' * 3 }} {{ 3 * 'ab' }} {{ [0] * 2 }} {{ 2 ** 8 }} {{ 2 * 1.5 }} {{ -2 ** 0.5 }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
        "{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
        "  {% if true %}\n  a\n  {% endif %}\nb {{ messages[0].missing }}|{{ bos_token }}",
        "{{ messages[0] | items | list }} {{ messages | selectattr('role', 'eq', 'user') | list }}",
    ]
    messages = [user("<&'\"é"), {"role": "assistant", "content": "x"}, user("y")]
    for source in sources:
        assert ChatTemplate(source, SPECIAL).render(messages) == theirs(source, messages), source


def test_generation_spans_mark_what_the_model_says() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = [user("ask"), {"role": "assistant", "content": "A 🙂"}, user("b")]
    messages += [{"role": "assistant", "content": "C"}]
    text, spans = ChatTemplate(source).render_with_spans(messages)
    assert [text[a:b] for a, b in spans] == ["A 🙂</s>", "C</s>"]
    assert text == theirs(source, messages, prompt=False)
