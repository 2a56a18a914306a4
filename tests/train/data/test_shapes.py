"""Every spelling of a conversation gives the same messages; what is none is said with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kilter.train.data import DataConfig, DataError, SourceConfig, open_data
from kilter.train.data.shapes import conversation_of
from kilter.train.data.sources import read_records
from tests.train.data.tiny import chat_tokenizer, write_jsonl

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Add."}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(record: Any, field: str = "", shape: str = "auto") -> dict[str, Any]:
    return conversation_of(record, field, shape, "x.jsonl, line 7")


@pytest.mark.parametrize(("record", "messages", "learned"), [
    ({"messages": [USER, REPLY]}, [USER, REPLY], [False, True]),
    ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
     [USER, REPLY], [False, True]),
    ({"conversations": [USER, REPLY], "messages": None, "id": 3}, [USER, REPLY], [False, True]),
    ({"conversations": [{"from": "Human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
      "system": "Add."}, [SYSTEM, USER, REPLY], [False, False, True]),
    ({"messages": [SYSTEM, USER, REPLY], "system": "Other."}, [SYSTEM, USER, REPLY],
     [False, False, True]),
    ({"prompt": "2+2?", "completion": "4"}, [USER, REPLY], [False, True]),
    ({"prompt": [USER, REPLY, USER], "completion": "4"}, [USER, REPLY, USER, REPLY],
     [False, False, False, True]),
    ({"prompt": "2+2?", "completion": [REPLY, USER, REPLY]}, [USER, REPLY, USER, REPLY],
     [False, True, False, True]),
    ({"instruction": "2+2?", "input": "", "output": "4"}, [USER, REPLY], [False, True]),
    ({"instruction": "2+2?", "input": None, "output": "4", "text": "all of it"}, [USER, REPLY],
     [False, True]),
    ({"instruction": "Add.", "input": "2 and 2", "output": "4"},
     [{"role": "user", "content": "Add.\n2 and 2"}, REPLY], [False, True]),
    ({"instruction": "2+2?", "output": "4", "system": "Add.", "history": [["2+2?", "4"]]},
     [SYSTEM, USER, REPLY, USER, REPLY], [False, False, True, False, True]),
    ({"messages": [USER, {**REPLY, "weight": 0}, USER, {**REPLY, "weight": 1}]},
     [USER, REPLY, USER, REPLY], [False, False, False, True]),
])
def test_spellings(record: Any, messages: Any, learned: list[bool]) -> None:
    before = json.dumps(record)
    assert read(record) == {"messages": messages, "tools": None, "learned": learned}
    assert json.dumps(record) == before


def test_one_of_several_can_be_named() -> None:
    both = {"messages": [USER, REPLY], "prompt": "a", "completion": "b",
            "said": [{"from": "user", "value": "2+2?"}, REPLY]}
    with pytest.raises(DataError, match="more than one way: by messages or by prompt and compl"):
        read(both)
    assert read(both, shape="messages")["messages"] == [USER, REPLY]
    assert read(both, field="said")["messages"] == [USER, REPLY]
    assert read(both, shape="completion")["messages"][0]["content"] == "a"
    # A prompt that stands beside the conversation, without a completion, is no other reading.
    assert read({"messages": [USER, REPLY], "prompt": "2+2?"})["messages"] == [USER, REPLY]


def test_tools_and_calls() -> None:
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert read({"messages": [USER, REPLY], "tools": tools})["tools"] == TOOLS
    for none in (None, "", [], "[]"):
        assert read({"messages": [USER, REPLY], "tools": none})["tools"] is None
    call = {"name": "add", "arguments": {"a": 2}}
    found = read({"conversations": [
        {"from": "human", "value": "2+2?"}, {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]})
    assert found["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": call}]}
    assert found["messages"][2] == {"role": "tool", "content": "4"}
    assert found["learned"] == [False, True, False, True]


@pytest.mark.parametrize(("record", "settings", "why"), [
    ({"text": "x"}, {}, "no field that holds a conversation; it has 'text'"),
    ({"prompt": "x"}, {}, "no field that holds a conversation; it has 'prompt'"),
    ({"messages": None}, {}, "no field that holds a conversation"),
    ({}, {}, "it has none"),
    ({"messages": [USER, REPLY]}, {"shape": "instruction"}, "of the shape 'instruction'"),
    ({"body": [USER]}, {"field": "talk"}, "no field 'talk'; it has 'body'"),
    ({"messages": "hi"}, {}, "'messages' of {} must be a conversation: .* but is of type str"),
    ({"messages": []}, {}, "is empty"),
    ({"messages": [USER, None]}, {}, "must be a conversation"),
    ({"messages": [USER, REPLY], "conversations": [USER, REPLY]}, {}, "more than one way"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, {},
     r"conversations\[0\] of {} is from 'narrator'; known are human"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, {}, "value of .* must be text, but is of"),
    ({"conversations": [{"from": "function_call", "value": "add"}]}, {}, "must be JSON"),
    ({"prompt": 3, "completion": "x"}, {}, "'prompt' of {} must be text or a list"),
    ({"prompt": "x", "completion": [USER]}, {}, "completion of {} has no message of the assistant"),
    ({"instruction": "x", "output": 4}, {}, "The output of {} must be text, but is of type int"),
    ({"instruction": "x", "output": "y", "input": ["z"]}, {}, "The input of {} must be text"),
    ({"instruction": "x", "output": "y", "history": [["a"]]}, {}, "list of pairs of texts"),
    ({"messages": [USER, {**REPLY, "weight": 0.5}]}, {}, r"weight of messages\[1\] of {} is 0.5"),
    ({"messages": [{**USER, "weight": 1}, REPLY]}, {}, "only what the assistant says is learned"),
    ({"messages": [USER, REPLY], "tools": "{"}, {}, "tools of {} are text that is not valid JSON"),
    ({"messages": [USER, REPLY], "tools": {"a": 1}}, {}, "tools of {} must be a list of objects"),
])
def test_what_is_no_conversation(record: Any, settings: dict[str, str], why: str) -> None:
    with pytest.raises(DataError, match=why.replace("{}", "x.jsonl, line 7")) as caught:
        read(record, **settings)
    assert "x.jsonl, line 7" in str(caught.value) and str(caught.value).endswith(".")


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="chat is false"):
        SourceConfig(("x.jsonl",), shape="messages")
    with pytest.raises(ValueError, match="fields of fixed names"):
        SourceConfig(("x.jsonl",), chat=True, shape="instruction", field="body")
    with pytest.raises(ValueError, match="'alpaca'"):
        SourceConfig(("x.jsonl",), chat=True, shape="alpaca")  # type: ignore[arg-type]


def test_parquet_has_the_same_spellings_and_no_invented_nulls(tmp_path: Path) -> None:
    """Rows of one type share all fields, so what one tool takes is null in another's call."""
    def turn(name: str, **arguments: Any) -> Any:
        return {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}]}

    rows = [{"messages": [USER, turn("add", a=2)]}, {"messages": [USER, turn("look", where="x")]}]
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = SourceConfig((str(path),), chat=True)
    found = [record.value for record in read_records(source, path)]
    calls = [value["messages"][1]["tool_calls"][0]["function"]["arguments"]  # type: ignore[index]
             for value in found]
    assert calls == [{"a": 2}, {"where": "x"}]
    rows = [{"instruction": "2+2?", "input": None, "output": "4", "source": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    [record] = read_records(source, path)
    assert record.value == read(rows[0])
    with pytest.raises(DataError, match="has no column 'messages'; it has n"):
        pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), path)
        list(read_records(source, path))


def test_all_spellings_become_the_same_tokens(tmp_path: Path) -> None:
    records = [{"messages": [USER, REPLY]}, {"prompt": "2+2?", "completion": "4"},
               {"conversations": [{"from": "human", "value": "2+2?"},
                                  {"from": "gpt", "value": "4"}]},
               {"instruction": "2+2?", "output": "4"}]
    path = write_jsonl(tmp_path / "t.jsonl", records)
    config = DataConfig((SourceConfig((str(path),), chat=True),), 64)
    data = open_data(config, chat_tokenizer(), tmp_path / "cache")
    samples = [data.train.read(0, unit) for unit in range(4)]
    assert len({(tuple(s.tokens_N), tuple(s.labels_N)) for s in samples}) == 1
