"""The grammar of tool calls that must be made; `kilter.serve.tool_parsers` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kilter.serve.grammar import JSON_OPTIONS
from kilter.serve.params import GrammarSpec
from kilter.serve.tool_parsers import HERMES_CLOSE, HERMES_OPEN, ToolFormat

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule for function names


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], format: ToolFormat,
                      function: str | None = None, parallel: bool = True) -> GrammarSpec:
    """The grammar of an answer that is nothing but calls: OpenAI's tool_choice "required", or a
    named ``function``.

    Args:
        tools: as OpenAI's API has them: ``{"type": "function", "function": {"name": ...,
            "parameters": <JSON schema>}}``.
        parallel: allow more than one call (never for a named function).

    Raises:
        ValueError: listing every tool that is malformed, or if there is none of that name.
    """
    schemas = _schemas_of(tools)
    if function is not None:
        if function not in schemas:
            raise ValueError(f"tool_choice names the function {function!r}, which is not among the "
                             f"tools: {', '.join(schemas) or 'there are none'}.")
        schemas = {function: schemas[function]}
    if not schemas:
        raise ValueError("tool_choice requires a tool call, but there are no tools.")
    if format == "hermes":
        key, before, after, between = "arguments", f"{HERMES_OPEN}\n", f"\n{HERMES_CLOSE}", "\n"
    else:
        key, before, after, between = "parameters", "", "", "; "
    more = f" ({json.dumps(between)} call)*" if parallel and function is None else ""
    rules = [f"start: call{more}",
             "call: " + " | ".join(f"call{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        opening = json.dumps(f'{before}{{"name": "{name}", "{key}": ')
        rules.append(f"call{i}: {opening} %json {schema} {json.dumps('}' + after)}")
    return GrammarSpec("ebnf", "\n".join(rules) + "\n")


def _schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Each tool's name and its parameters' schema as JSON."""
    schemas: dict[str, str] = {}
    problems = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            problems.append(f"tool {i} is not of the form {{\"type\": \"function\", \"function\": "
                            f"{{...}}}}")
        elif not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"tool {i} has the name {name!r}, but names are 1 to 64 letters, "
                            f"digits, _ or -")
        elif name in schemas:
            problems.append(f"two tools have the name {name!r}")
        else:
            schema = function.get("parameters") or {"type": "object", "properties": {}}
            if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
                problems.append(f"the parameters of tool {name!r} are not a JSON schema of an "
                                f"object")
                continue
            try:
                schemas[name] = GrammarSpec.json_schema(
                    {"type": "object", **schema, "x-guidance": JSON_OPTIONS}).text
            except ValueError as error:
                problems.append(f"tool {name!r}: {str(error).rstrip('.')}")
    if problems:
        raise ValueError("These tools cannot be used: " + "; ".join(problems) + ".")
    return schemas
