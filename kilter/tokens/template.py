"""Chat templates: from a list of messages to the text a model was tuned on.

A template is a program in the jinja language that came with somebody's weights, so it runs in a
sandbox, sees plain data only, and has a budget of loop iterations. Whatever goes wrong in it
becomes one `TemplateError` that says so in the template's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 200_000  # loop iterations and macro calls in one rendering
MAX_REPEAT = 1_000_000  # elements in the result of `text * n`, and the value of an exponent


class TemplateError(ValueError):
    """A conversation that its chat template does not render."""


class ChatTemplate:
    """One compiled chat template.

    source: the jinja text.
    variables: what the template may also read: bos_token, eos_token, ...

    Raises TemplateError if the source is not valid jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The chat template is not valid jinja: line {error.lineno}: {_words(error)}. "
                "Correct the template, or take the model's original one."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        A message's content may be text, None (as in a message of tool calls only; it counts as
        empty) or a list of text parts, which are joined where the template wants one text.
        Arguments of tool calls may be an object or its JSON text; the template sees the object.
        `variables` go to the template (`enable_thinking=False`).

        Raises TemplateError where the messages are malformed, or where the template raises, reads
        what is not there, breaks out of its sandbox or does not end.
        """
        text, _ = self.render_with_spans(messages, tools, add_generation_prompt, **variables)
        return text

    def render_with_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges that the template marks with `{% generation %}`."""
        given = {
            "messages": self._messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        return self._run(given)

    def _run(self, given: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        run = _Run()
        token = _current.set(run)
        try:
            for block in self._template.generate(given):
                run.blocks.append(block)
                run.length += len(block)
        except _Rejected as error:
            raise TemplateError(
                f"The chat template does not accept this conversation: {_words(error)}. Change the "
                "messages to what the template asks for."
            ) from error
        except jinja2.UndefinedError as error:
            raise TemplateError(
                f"The chat template reads something that is not there: {_words(error)}. "
                "Give the messages the fields that the template reads."
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(
                f"The chat template was stopped by its sandbox: {_words(error)}. "
                "Use a template that only formats messages."
            ) from error
        except Exception as error:  # any Python error can come out of a template
            raise TemplateError(
                f"The chat template failed on this conversation: {type(error).__name__}: "
                f"{_words(error)}. Change the messages, or correct the template."
            ) from error
        finally:
            _current.reset(token)
        return "".join(run.blocks), run.spans

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise TemplateError(
                f"The messages must be a list of objects with role and content, but are of type "
                f"{type(messages).__name__}."
            )
        if not messages:
            raise TemplateError("The list of messages is empty. Give at least one message.")
        problems: list[str] = []
        plain = []
        for index, message in enumerate(messages):
            try:
                plain.append(self._message(message, f"messages[{index}]"))
            except TemplateError as error:
                problems.append(str(error))
        if problems:
            raise TemplateError(" ".join(problems))
        return plain

    def _message(self, message: Any, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise TemplateError(
                f"{where} must be an object with role and content, but is {message!r}."
            )
        plain = {k: v for k, v in _plain(dict(message), where).items() if v is not None}
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise TemplateError(
                f"{where} needs a role ('user', 'assistant', 'system', ...), but has "
                f"{message.get('role')!r}."
            )
        plain["content"] = self._content(plain.get("content", ""), where)
        for number, call in enumerate(plain.get("tool_calls", [])):
            _read_arguments(call, f"{where}.tool_calls[{number}]")
        return plain

    def _content(self, content: Any, where: str) -> Any:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise TemplateError(
                f"The content of {where} must be text, null or a list of parts, but is {content!r}."
            )
        texts = []
        for part in content:
            text = part if isinstance(part, str) else None
            if isinstance(part, dict) and part.get("type") == "text":
                text = part.get("text")
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise TemplateError(
                    f"The content of {where} has a part of the type {kind!r}. Only text parts, "
                    '{"type": "text", "text": "..."}, are supported.'
                )
            texts.append(text)
        if self.takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "".join(texts)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the variables that the template reads and does not set itself."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template itself goes through lists of parts: found out by trying one."""
        probe = "kilter-probe"
        message = {"role": "user", "content": [{"type": "text", "text": probe}]}
        given = {"messages": [message], "add_generation_prompt": False, **self._variables}
        try:
            text, _ = self._run(given)
        except TemplateError:
            return False
        return probe in text and "'text'" not in text and '"text"' not in text


def _words(error: Exception) -> str:
    message = error.message if isinstance(error, jinja2.TemplateSyntaxError) else str(error)
    return (message or "no reason given").rstrip(".")


def _read_arguments(call: Any, where: str) -> None:
    """Put the parsed object where a tool call carries its arguments as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise TemplateError(f"{where} must be an object with a function, but is {call!r}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise TemplateError(
                f"The arguments of {where} are not valid JSON ({error}): {arguments!r}."
            ) from error
    if not isinstance(arguments, dict):
        raise TemplateError(
            f"The arguments of {where} must be a JSON object, but are {arguments!r}."
        )
    if "arguments" in function:
        function["arguments"] = arguments


def _plain(value: Any, where: str) -> Any:
    """A fresh copy made of JSON types only: a template gets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TemplateError(
        f"{where} is of type {type(value).__name__}, which a chat template cannot read. Give text, "
        "numbers, lists and objects."
    )


# ---- the sandbox ----


class _Rejected(jinja2.TemplateError):
    """raise_exception(...) in a template."""


@dataclass
class _Run:
    """State of one rendering."""

    blocks: list[str] = field(default_factory=list)
    length: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0


_current: ContextVar[_Run] = ContextVar("kilter_template_run")


class _Support(Extension):
    """The `generation` block, and the step counter that every loop body and macro calls."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generation")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def generation(self, caller: Any) -> str:
        run = _current.get()
        text: str = caller()
        run.spans.append((run.length, run.length + len(text)))
        return text

    def step(self) -> None:
        run = _current.get()
        run.steps += 1
        if run.steps > MAX_STEPS:
            raise OverflowError(f"it did not end within {MAX_STEPS:,} loop iterations")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for loop in loops:
            step = nodes.ExtensionAttribute(_Support.identifier, "step")
            call = nodes.Call(step, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for sized, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(sized, str | list | tuple):
                too_large = isinstance(count, int) and len(sized) * count > MAX_REPEAT
                break
        else:
            too_large = operator == "**" and abs(right) * len(str(left)) > MAX_REPEAT
        if too_large:
            raise OverflowError(f"a {operator!r} gives more than {MAX_REPEAT:,} elements")
        return super().call_binop(context, operator, left, right)


class _SafeNamespace(Namespace):
    """`namespace()` without attributes that could stand for Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


@cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Support, LoopControlExtension],
        cache_size=0,
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_SafeNamespace,
        dict=_make_dict,
    )
    return environment


def _raise_exception(message: str) -> None:
    raise _Rejected(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were tuned on it: no HTML escapes, unlike jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
