"""Tools in a chat: what the template is shown, and the grammar that calls are held to.

Answers are held to a grammar where something was promised of them: a call must come ("required", a
named function), arguments must fit their schema (a tool with ``strict``), at most one call may come
(``parallel_tool_calls: false``), or what is no call has a format of its own.
"""

from __future__ import annotations

import json
from typing import Any

from kilter.serve.params import GrammarSpec
from kilter.serve.server.errors import ApiError
from kilter.serve.server.messages import ChatRequest, JsonSchemaFormat, NamedTool, TextFormat
from kilter.serve.server.prepare import refused, structured_grammar
from kilter.serve.tool_grammar import tool_call_grammar
from kilter.serve.tool_parsers import ToolFormat

# Text up to a call. Lazy: it ends with the first marker, so no text can hold one.
_HERMES_TEXT = 'TEXT: /(?s:.*)/\nbefore[lazy]: /(?s:.*)<tool_call>/\n'
_LLAMA3_TEXT = 'TEXT: /(\\s*[^\\s{](?s:.*))?/\n'


def tools_of(request: ChatRequest, format: ToolFormat | None) -> list[dict[str, Any]]:
    """The tools that the model may call, as its template is shown them.

    Raises:
        ApiError: if there are some and the model knows no way to call them.
    """
    if not request.tools or request.tool_choice == "none":
        return []
    if format is None:
        raise ApiError(400, "This model's chat template shows no way of calling tools; leave tools "
                            "out, or start the server with --tool-format.", param="tools")
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in request.tools]


def chat_grammar(request: ChatRequest, tools: list[dict[str, Any]], format: ToolFormat | None
                 ) -> GrammarSpec | None:
    """What the answer is held to, or None.

    Raises:
        ApiError: for two formats at a time, or tools or schemas that cannot be used.
    """
    text = _text_grammar(request)
    if not tools or format is None:
        return text
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    function = choice.function.name if isinstance(choice, NamedTool) else None
    with refused("tool_choice" if function else "tools"):
        calls = tool_call_grammar(tools, format, function, parallel)
    if choice == "required" or function is not None:
        return calls
    strict = any(tool.function.strict for tool in request.tools or ())
    if text is None and parallel and not strict:
        return None
    return _text_or_calls(text, calls, format)


def _text_grammar(request: ChatRequest) -> GrammarSpec | None:
    format = request.response_format
    if format is None or isinstance(format, TextFormat):
        return structured_grammar(request.structured_outputs) if request.structured_outputs else (
            None)
    if request.structured_outputs is not None:
        raise ApiError(400, "response_format and structured_outputs both say what the answer looks "
                            "like; give one.", param="structured_outputs")
    if isinstance(format, JsonSchemaFormat):
        with refused("response_format"):
            return GrammarSpec.json_schema(format.json_schema.schema_ or {})
    return GrammarSpec("json_object")


def _text_or_calls(text: GrammarSpec | None, calls: GrammarSpec, format: ToolFormat
                   ) -> GrammarSpec:
    """Either an answer of its own format, or calls (after some text, where text is free)."""
    first, _, rules = calls.text.partition("\n")
    calls_rule = first.removeprefix("start: ")
    if text is None and format == "hermes":
        # The marker of the first call ends the text before it, so the call goes on without it.
        _, _, more = calls_rule.partition(" ")
        options = [line for line in rules.splitlines() if line.startswith("call")][1:]
        rest = " | ".join(line.partition(": ")[2].replace('"<tool_call>', '"', 1)
                          for line in options)
        return GrammarSpec("ebnf", f"start: TEXT | before rest {more}\nrest: {rest}\n"
                                   f"{rules}{_HERMES_TEXT}")
    if text is None:
        answer, terminals = "TEXT", _LLAMA3_TEXT
    elif format == "llama3":
        raise ApiError(400, "This model writes a tool call as a JSON object, so an answer of JSON "
                            "cannot be told from one; leave response_format or tools out.",
                       param="response_format")
    elif text.kind in ("regex", "ebnf"):
        raise ApiError(400, "structured_outputs with a regex, choices or a grammar cannot be "
                            "joined with tools; leave one out.", param="structured_outputs")
    else:
        schema = text.text or json.dumps({"type": "object"})
        answer, terminals = f"%json {schema}", ""
    return GrammarSpec("ebnf", f"start: answer | calls\nanswer: {answer}\ncalls: {calls_rule}\n"
                               f"{rules}{terminals}")
