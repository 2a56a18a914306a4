"""Records of conversations, in the spellings that data sets have, to messages.

    messages     {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", …}]}
                 {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", …}]}
    completion   {"prompt": "2+2?", "completion": "4"}          each text, or a list of messages
    instruction  {"instruction": "Add.", "input": "2 and 2", "output": "4"}

Beside them may stand `tools` (a list, or its JSON text), and in the second and the last spelling
`system`. Only the completion of a prompt is learned. An assistant's message with `"weight": 0` is
not learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kilter.train.data.errors import DataError

LISTS = ("messages", "conversations")
FIELDS = (*LISTS, "prompt", "completion", "instruction", "input", "output", "history")

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
          "model": "assistant", "assistant": "assistant", "function_call": "assistant",
          "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"}


def conversation_of(content: Mapping[str, Any], field: str, shape: str, where: str
                    ) -> dict[str, Any]:
    """{"messages": [...], "tools": a list or None, "learned": a bool for each message}.

    field: where the messages are, "" for the usual names; shape: as in `SourceConfig`.

    Raises DataError, with `where`, for a record that is no such conversation.
    """
    given = {name for name, value in content.items() if value is not None}
    found = {field: "messages"} if field else _found(given)
    if shape != "auto":
        found = {names: of for names, of in found.items() if of == shape}
    if not found:
        wanted = "a conversation" if shape == "auto" else f"a conversation of the shape {shape!r}"
        raise DataError(f"{where} has no field that holds {wanted}; it has "
                        f"{', '.join(map(repr, content)) or 'none'}. Known are {_KNOWN}. Set the "
                        "source's field to where the messages are, or convert the records.")
    if len(found) > 1:
        raise DataError(f"{where} could be read in more than one way: by {' or by '.join(found)}. "
                        "Set the source's field or shape.")
    [(names, of)] = found.items()
    if of == "messages":
        messages = _listed(content, names, where)
    elif of == "completion":
        messages = _prompted(content, where)
    else:
        messages = _instructed(content, where)
    system = content.get("system")
    if system and of != "completion" and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": _text(content, "system", where)})
    learned = [_is_learned(message, f"messages[{i}] of {where}")
               for i, message in enumerate(messages)]
    return {"messages": [{k: v for k, v in message.items() if k != "weight"}
                         for message in messages],
            "tools": tools_of(content.get("tools"), where), "learned": learned}


def messages_of(value: Any, role: str | None, name: str, where: str) -> list[dict[str, Any]]:
    """A list of messages in either spelling; or text, which `role` says, if that is given."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return [_message(m, f"{name}[{i}] of {where}") for i, m in enumerate(value)]
    kind = "a conversation:" if role is None else "text or"
    raise DataError(f"The field {name!r} of {where} must be {kind} a list of at least one "
                    f"message, each an object with role and content, but is {_told(value)}.")


def tools_of(value: Any, where: str) -> list[Any] | None:
    """The tools of a conversation, None if there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError) as error:
            raise DataError(f"The tools of {where} are text that is not valid JSON: {error}."
                            ) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"The tools of {where} must be a list of objects or its JSON text, but are "
                        f"{_told(value)}.")
    return value


def _found(given: set[str]) -> dict[str, str]:
    """What the fields that are there make possible: their names, and the shape."""
    found = {name: "messages" for name in LISTS if name in given}
    if {"prompt", "completion"} <= given:
        found["prompt and completion"] = "completion"
    if {"instruction", "output"} <= given:
        found["instruction and output"] = "instruction"
    return found


_KNOWN = "messages, conversations, prompt with completion, and instruction with output"


def _listed(content: Mapping[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    if field not in content:
        raise DataError(f"{where} has no field {field!r}; it has "
                        f"{', '.join(map(repr, content)) or 'none'}. Set the source's field, or "
                        "correct the record.")
    return messages_of(content[field], None, field, where)


def _prompted(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    prompt = messages_of(content["prompt"], "user", "prompt", where)
    completion = messages_of(content["completion"], "assistant", "completion", where)
    if all(message.get("role") != "assistant" for message in completion):
        raise DataError(f"The completion of {where} has no message of the assistant, so there is "
                        "nothing to learn from it. Remove the record, or correct its roles.")
    for message in prompt:
        if message.get("role") == "assistant":
            message["weight"] = 0
    return prompt + completion


def _instructed(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages = []
    history = content.get("history") or []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2
                and all(isinstance(text, str) for text in turn)):
            raise DataError(f"The history of {where} must be a list of pairs of texts, an "
                            f"instruction and its answer, but has {_told(turn)}.")
        messages += [{"role": "user", "content": turn[0]},
                     {"role": "assistant", "content": turn[1]}]
    asked = [_text(content, "instruction", where)]
    if content.get("input") is not None and _text(content, "input", where).strip():
        asked.append(content["input"])
    return [*messages, {"role": "user", "content": "\n".join(asked)},
            {"role": "assistant", "content": _text(content, "output", where)}]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """With role and content, whatever the spelling."""
    if "role" in message or "from" not in message:
        return dict(message)
    sender = message["from"]
    role = _ROLES.get(sender.lower()) if isinstance(sender, str) else None
    if role is None:
        raise DataError(f"{where} is from {sender!r}; known are {', '.join(_ROLES)}. Rename it.")
    made = {k: v for k, v in message.items() if k not in ("from", "value")}
    value = _text(message, "value", where)
    if sender.lower() != "function_call":
        return {**made, "role": role, "content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is a function call, whose value must be JSON, but: {error}."
                        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**made, "role": role, "content": "",
            "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    weight, mine = message.get("weight"), message.get("role") == "assistant"
    if weight is None:
        return mine
    if weight not in (0, 1):
        raise DataError(f"The weight of {where} is {weight!r}; it must be 1 (learned) or 0 (not).")
    if weight and not mine:
        raise DataError(f"The weight of {where} is 1, but only what the assistant says is learned. "
                        "Remove it, or correct the role.")
    return bool(weight)


def _text(content: Mapping[str, Any], name: str, where: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise DataError(f"The {name} of {where} must be text, but is {_told(value)}.")
    return value


def _told(value: Any) -> str:
    if value is None:
        return "null"
    return "empty" if value in ([], {}, "") else f"of type {type(value).__name__}"
