"""Which tokens a record becomes and which of them are targets: against transformers and by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from kilter.tokens import Tokenizer
from kilter.train.data import ChatConfig, DataConfig, DataError, SourceConfig
from kilter.train.data.sources import Record
from kilter.train.data.tokenise import Document, Tokeniser
from tests.tokens.chats import LLAMA3, QWEN3
from tests.train.data.tiny import CHATML, FORGETFUL, MARKED, chat_tokenizer

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "\nhe: 4"},
        {"role": "user", "content": "sure?\n"}, {"role": "assistant", "content": "yes\n"}]


def tokenise(tokenizer: Tokenizer, value: Any, **settings: Any) -> Document:
    config = DataConfig((SourceConfig(("x.jsonl",)),), seq_len=8, **settings)
    if isinstance(value, list):
        value = {"messages": value, "tools": None}
    return Tokeniser(tokenizer, config).documents([Record("x.jsonl, line 7", value, 0)])[0]


def targets(tokenizer: Tokenizer, document: Document) -> list[str]:
    """The texts of the runs of target tokens."""
    runs: list[list[int]] = [[]]
    assert document.targets_N is not None
    for token, target in zip(document.tokens_N.tolist(), document.targets_N, strict=True):
        if target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(MARKED).save(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_white_space_at_the_edges_of_a_turn_is_its_own() -> None:
    """Some post-processors take white space out of offsets; its tokens then stand for nothing."""
    tokenizer = chat_tokenizer(MARKED)
    tokenizer._backend.post_processor = processors.ByteLevel(trim_offsets=True)
    talk = [TALK[0], {"role": "assistant", "content": " 4 "}]
    assert targets(tokenizer, tokenise(tokenizer, talk)) == [" 4 <|im_end|>"]
    only = chat_tokenizer("{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
                          "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
                          "{% endfor %}")
    only._backend.post_processor = tokenizer._backend.post_processor
    talk = [TALK[0], {"role": "assistant", "content": " "}, TALK[0]]
    assert targets(only, tokenise(only, talk)) == [" "]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.booleans(),
                          st.text(st.sampled_from("he\n "), max_size=5)), min_size=1, max_size=6),
       st.sampled_from([CHATML, MARKED]), st.sampled_from(["all", "last"]))
def test_turns_of_weight_0_are_no_targets(
    turns: list[tuple[str, bool, str]], template: str, which: Any
) -> None:
    """Against the same conversation, tokenised turn by turn."""
    turns = [("user", False, "h"), *turns, ("assistant", True, "e")]
    tokenizer, expected_ids, expected = chat_tokenizer(template), [], []
    learned = [role == "assistant" and mine for role, mine, _ in turns]
    for i, (role, _, content) in enumerate(turns):
        for text, target in ((f"<|im_start|>{role}\n", False),
                             (f"{content}<|im_end|>", learned[i] and (
                                 which == "all" or i == len(turns) - 1)), ("\n", False)):
            for part in re.split("(?<=>)|(?=<)", text):  # no merge reaches over a special token
                ids = tokenizer.encode(part)
                expected_ids += ids
                expected += [target] * len(ids)
    value = {"messages": [{"role": role, "content": content} for role, _, content in turns],
             "tools": None, "learned": learned}
    document = tokenise(tokenizer, value, chat=ChatConfig(turns=which))
    assert document.targets_N is not None
    whole = chat_tokenizer().decode
    assert whole(document.tokens_N.tolist(), False) == whole(expected_ids, False)
    # A line feed that begins an answer may be one token with that before it.
    if document.tokens_N.tolist() == expected_ids:
        assert document.targets_N.tolist() == expected


def test_weights_need_marks_that_can_be_told_apart() -> None:
    double = MARKED.replace("{% generation %}{{ message['content'] + '<|im_end|>' }}",
                            "{% generation %}{{ message['content'] }}{% endgeneration %}"
                            "{% generation %}{{ '<|im_end|>' }}")
    value = {"messages": TALK, "tools": None, "learned": [False, True, False, True]}
    tokenizer = chat_tokenizer(double)
    assert targets(tokenizer, tokenise(tokenizer, value)) == [
        "\n\nhe: 4<|im_end|>", "yes\n<|im_end|>"]  # one token has the line feed before it
    with pytest.raises(DataError, match=r"2 turns are to be learned, but .* marks 4"):
        tokenise(tokenizer, {**value, "learned": [False, False, False, True]})


def test_what_a_template_would_leave_out_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for value, why in (({"messages": TALK, "tools": tools}, "does not show any"),
                       ({"messages": [TALK[0], call], "tools": None}, "has tool_calls, but")):
        with pytest.raises(DataError, match=rf"line 7: .*{why}"):
            tokenise(chat_tokenizer(), value)
    shows = ("{{ tools | tojson }}" + CHATML).replace(
        "message['content']", "message['content'] + (message.tool_calls or '') | string")
    text = chat_tokenizer().decode(tokenise(
        chat_tokenizer(shows), {"messages": [TALK[0], call], "tools": tools},
        chat=ChatConfig(turns="last")).tokens_N.tolist(), False)
    assert '"name": "f"' in text and "'name': 'f'" in text
    with pytest.raises(DataError, match="variables has 'thinking', which the template does not"):
        tokenise(chat_tokenizer(), TALK, chat=ChatConfig(variables={"thinking": False}))


def test_one_bad_record_of_a_batch_is_named() -> None:
    records = [Record(f"x, line {i}", text, 0) for i, text in enumerate(["a", "b", "\ud800", "c"])]
    config = DataConfig((SourceConfig(("x.jsonl",)),), 8)
    with pytest.raises(DataError, match="x, line 2: The text holds a lone surrogate"):
        Tokeniser(chat_tokenizer(), config).documents(records)


def test_an_empty_text_teaches_nothing() -> None:
    assert len(tokenise(chat_tokenizer(bos=True), "", bos=True).tokens_N) == 0
    assert len(tokenise(chat_tokenizer(bos=True), "a", bos=True).tokens_N) == 3


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]),
                           "content": st.text(st.sampled_from("he\n é🙂:"), max_size=8)}),
    min_size=1, max_size=5,
).filter(lambda talk: any(message["role"] == "assistant" for message in talk))


@settings(deadline=None, max_examples=60)
@given(messages)
def test_marks_give_the_mask_of_transformers(theirs: Any, talk: list[Any]) -> None:
    expected = theirs.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    document = tokenise(chat_tokenizer(MARKED), talk)
    assert document.tokens_N.tolist() == expected["input_ids"]
    assert document.targets_N is not None
    assert document.targets_N.astype(int).tolist() == expected["assistant_masks"]


@settings(deadline=None, max_examples=60)
@given(messages)
def test_prefixes_find_the_turns_that_marks_would(talk: list[Any]) -> None:
    if talk[0]["role"] == "assistant":
        talk = [{"role": "user", "content": ""}, *talk]
    found, marked = (tokenise(chat_tokenizer(t), talk) for t in (CHATML, MARKED))
    assert found.targets_N is not None and marked.targets_N is not None
    assert found.tokens_N.tolist() == marked.tokens_N.tolist()
    assert found.targets_N.tolist() == marked.targets_N.tolist()


def test_smollm2_turns_by_hand(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    document = tokenise(tokenizer, TALK[:1] + [{"role": "assistant", "content": "It is 4."}])
    text = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
            "It is 4.<|im_end|>\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert document.tokens_N.tolist() == ids
    answer = tokenizer.encode("It is 4.<|im_end|>", add_special_tokens=False)
    assert document.targets_N is not None
    assert document.targets_N.tolist() == (  # the line feed after the turn is never generated
        [False] * (len(ids) - len(answer) - 1) + [True] * len(answer) + [False])


def test_llama_style_turns_without_tokens_of_the_vocabulary() -> None:
    """The end of a turn may be plain text to the tokenizer; then it is a target like any text."""
    tokenizer = chat_tokenizer(LLAMA3)
    tokenizer.special_tokens["bos_token"] = "<eos>"
    assert targets(tokenizer, tokenise(tokenizer, TALK)) == ["he: 4<|eot_id|>", "yes<|eot_id|>"]


def test_only_the_last_turn() -> None:
    for template in (CHATML, MARKED, FORGETFUL, QWEN3):
        tokenizer = chat_tokenizer(template)
        document = tokenise(tokenizer, TALK, chat=ChatConfig(turns="last"))
        assert [t.replace("(thinking)", "").split("</think>")[-1].strip("\n")
                for t in targets(tokenizer, document)] == ["yes\n<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(DataError, match=r"line 7: .*messages\[1\].*generation.*\"last\"") as caught:
        tokenise(chat_tokenizer(FORGETFUL), TALK)
    assert "'(thinking)" in str(caught.value)


def test_conversations_that_teach_nothing_are_refused() -> None:
    for talk, why in ((TALK[:1], "no assistant turn"), (TALK[1:2], r"messages\[0\] begins")):
        with pytest.raises(DataError, match=rf"x.jsonl, line 7: .*{why}"):
            tokenise(chat_tokenizer(), talk)


def test_own_template_and_its_variables(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ name }}:{% for m in messages %}{% generation %}{{ m.content }}"
                   "{% endgeneration %}{% endfor %}")
    chat = ChatConfig(template=str(own), variables={"name": "N"})
    document = tokenise(chat_tokenizer(), TALK[:1], chat=chat)
    assert targets(chat_tokenizer(), document) == ["2+2?"]
    assert chat_tokenizer().decode(document.tokens_N.tolist()) == "N:2+2?"
    with pytest.raises(DataError, match=r"no\.jinja cannot be read"):
        tokenise(chat_tokenizer(), TALK, chat=ChatConfig(template="no.jinja"))


def test_text_is_closed_by_eos_and_holds_no_special_token() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenise(tokenizer, "a<|im_end|>").tokens_N.tolist()
    assert ids[-1:] == tokenizer.eos_token_ids
    assert tokenizer.special_ids.isdisjoint(ids[:-1])
    assert tokenizer.decode(ids[:-1]) == "a<|im_end|>"
    assert tokenise(tokenizer, "a", eos=False).tokens_N.tolist() == ids[:1]


def test_bos_is_put_where_asked_for_or_where_the_tokenizer_does() -> None:
    tokenizer = chat_tokenizer(bos=True)
    bos, body = tokenizer.bos_token_id, tokenizer.encode("hi")
    end = tokenizer.eos_token_ids
    assert tokenise(tokenizer, "hi", bos=True).tokens_N.tolist() == [bos, *body, *end]
    assert tokenise(tokenizer, "hi").tokens_N.tolist() == [*body, *end]
    with pytest.raises(DataError, match=r"has none\. Set bos to false"):
        tokenise(chat_tokenizer(), "hi", bos=True)


def test_fingerprints_tell_tokenisers_apart() -> None:
    def of(template: str = CHATML, chat: bool = False, **settings: Any) -> str:
        config = DataConfig((SourceConfig(("x.jsonl",)),), 8, **settings)
        return Tokeniser(chat_tokenizer(template), config).fingerprint(chat)

    assert of() == of() != of(eos=False)
    last = Tokeniser(chat_tokenizer(), DataConfig((SourceConfig(("x.jsonl",)),), 8,
                                                  chat=ChatConfig(turns="last")))
    assert last.fingerprint(chat=False) == of()
    assert last.fingerprint(chat=True) != of(chat=True) != of(MARKED, chat=True)
