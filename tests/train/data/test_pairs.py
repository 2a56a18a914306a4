"""Records of pairs: what they become, in every spelling, and what is said of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.train.data import (
    IGNORE,
    ChatConfig,
    DataConfig,
    DataError,
    DataLoader,
    SourceConfig,
    evaluation_packs,
    open_data,
)
from kilter.train.data.pairs import pair_of
from kilter.train.data.sources import Record
from kilter.train.data.tokenise import Document, Tokeniser
from tests.train.data.test_tokenise import targets
from tests.train.data.tiny import CHATML, FORGETFUL, MARKED, chat_tokenizer, write_jsonl

PLAIN = {"prompt": "2+2?", "chosen": "he: 4", "rejected": "5"}
USER, GOOD, BAD = ({"role": role, "content": text} for role, text in
                   (("user", "2+2?"), ("assistant", "he: 4"), ("assistant", "5")))


def pairs_config(path: Path, **settings: Any) -> DataConfig:
    settings = {"seq_len": 64, "long_documents": "drop"} | settings
    return DataConfig((SourceConfig((str(path),), pairs=True),), **settings)


def tokenise(row: dict[str, Any], template: str = CHATML, **settings: Any) -> Document:
    config = pairs_config(Path("x.jsonl"), **settings)
    return Tokeniser(chat_tokenizer(template), config).documents(
        [Record("x.jsonl, line 7", pair_of(row, "x.jsonl, line 7"), 0)])[0]


def sides(document: Document) -> tuple[Document, Document]:
    assert document.targets_N is not None
    n = document.chosen
    return (Document(document.tokens_N[:n], document.targets_N[:n]),
            Document(document.tokens_N[n:], document.targets_N[n:]))


@pytest.mark.parametrize("row", [
    PLAIN,
    {"prompt": [USER], "chosen": [GOOD], "rejected": "5"},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 1.5},
    {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": [USER], "chosen": [USER, GOOD], "rejected": "5"},
], ids=["texts", "messages", "conversations", "prompt-again", "prompt-again-in-one"])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_are_targets_and_end_the_sequences(row: dict[str, Any], template: str) -> None:
    tokenizer, document = chat_tokenizer(template), tokenise(row, template)
    assert document.margin == row.get("margin", 0.0)
    for side, answer in zip(sides(document), ("he: 4", "5"), strict=True):
        text = f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        assert tokenizer.decode(side.tokens_N.tolist(), skip_special_tokens=False) == text
        assert targets(tokenizer, side) == [f"{answer}<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_differs_counts(template: str) -> None:
    """Turns of the assistant in the prompt are none of the answer's, but an equal beginning is."""
    start = [USER, GOOD, {"role": "user", "content": "sure?"}]
    more = [{"role": "assistant", "content": "he"}, {"role": "user", "content": "?"},
            {"role": "assistant", "content": "yes"}]
    row = {"chosen": [*start, *more], "rejected": [*start, {"role": "assistant", "content": "h"}]}
    tokenizer = chat_tokenizer(template)
    chosen, rejected = sides(tokenise(row, template))
    assert targets(tokenizer, chosen) == ["he<|im_end|>", "yes<|im_end|>"]
    assert targets(tokenizer, rejected) == ["h<|im_end|>"]
    prompt = {"prompt": start, "chosen": more, "rejected": "h"}
    assert tokenise(prompt, template).tokens_N.tolist() == tokenise(row, template).tokens_N.tolist()
    parted = {"chosen": [USER, GOOD, *more[1:]], "rejected": [USER, BAD, *more[1:]]}
    chosen, rejected = sides(tokenise(parted, template))
    assert targets(tokenizer, chosen) == ["he: 4<|im_end|>", "yes<|im_end|>"]
    assert targets(tokenizer, rejected) == ["5<|im_end|>", "yes<|im_end|>"]
    last, _ = sides(tokenise(row, FORGETFUL, chat=ChatConfig(turns="last")))
    assert targets(tokenizer, last) == ["(thinking)yes<|im_end|>"]


answers = st.text(st.sampled_from("he :4"), max_size=6)


@settings(deadline=None, max_examples=50)
@given(answers, answers)
def test_a_pair_is_the_conversations_it_has(chosen: str, rejected: str) -> None:
    """As each of them is tokenised alone, without what follows the answer."""
    if chosen == rejected:
        return
    document = tokenise({"prompt": "he?", "chosen": chosen, "rejected": rejected})
    made = Tokeniser(chat_tokenizer(), pairs_config(Path("x.jsonl")))
    for side, answer in zip(sides(document), (chosen, rejected), strict=True):
        talk = [{"role": "user", "content": "he?"}, {"role": "assistant", "content": answer}]
        [alone] = made.documents([Record("", {"messages": talk, "tools": None}, 0)])
        n = len(side.tokens_N)
        assert alone.targets_N is not None and side.targets_N is not None
        assert alone.tokens_N[:n].tolist() == side.tokens_N.tolist()
        assert alone.targets_N.nonzero()[0].tolist() == side.targets_N.nonzero()[0].tolist()


@pytest.mark.parametrize(("row", "sentence"), [
    ({"prompt": "a", "chosen": "b"}, "has no field 'rejected'; it has 'prompt', 'chosen'"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same, so there is nothing to learn"),
    ({"chosen": "b", "rejected": "c"}, "has no prompt, and text alone for answers"),
    ({"chosen": [USER, GOOD], "rejected": [BAD]}, "do not begin with the same message"),
    ({"prompt": "a", "chosen": [], "rejected": "c"}, "'chosen' of {} must be text or a list"),
    ({"prompt": 7, "chosen": "b", "rejected": "c"}, "'prompt' of {} must be text or a list"),
    ({**PLAIN, "margin": "much"}, "The margin of {} is 'much', but must be a finite number"),
    ({**PLAIN, "margin": float("nan")}, "The margin of {} is nan"),
    ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "has no assistant turn"),
    ({"prompt": [USER, GOOD], "chosen": [USER], "rejected": "c"}, "has no token of the assistant"),
    ([1], "must be a JSON object"),
])
def test_bad_rows_are_sentences(tmp_path: Path, row: Any, sentence: str) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [PLAIN, row])
    with pytest.raises(DataError) as error:
        open_data(pairs_config(path), chat_tokenizer(), tmp_path / "cache")
    where = f"{path}, line 2"
    assert sentence.format(where) in str(error.value) and where in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"chat": True}, "Remove chat"), ({"field": "x"}, "Remove field"), ({"format": "text"},
                                                                       "have no pairs")])
def test_settings_that_do_not_go_together(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SourceConfig(("x.jsonl",), pairs=True, **settings)
    with pytest.raises(ValueError, match="a pair that is cut is no comparison"):
        pairs_config(Path("x.jsonl"), long_documents="truncate")


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i % 10}", "chosen": "h" * (i % 5), "rejected": f"e{i}", "margin": i / 8}
            for i in range(count)]


def test_both_sides_are_in_one_pack(tmp_path: Path) -> None:
    """As two sequences, whose labels do not cross the seam; every pair once an epoch."""
    path = write_jsonl(tmp_path / "pairs.jsonl", rows(40))
    data = open_data(pairs_config(path, seq_len=150), chat_tokenizer(), tmp_path / "cache")
    tokenizer, seen = chat_tokenizer(), []
    with DataLoader(data, 1) as loader:
        while loader.epoch == 0:
            [pack] = loader.next_step()
            if loader.epoch:
                break
            assert pack.margins_P is not None and pack.valid == len(pack.ids)
            texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in
                     pack.tokens_T.split(pack.cu_seqlens_S1.diff().tolist())]
            assert len(texts) == 2 * pack.valid
            for p, id in enumerate(pack.ids):
                row = rows(40)[id.record]
                assert texts[2 * p].endswith(f"assistant\n{row['chosen']}<|im_end|>")
                assert texts[2 * p + 1].endswith(f"assistant\n{row['rejected']}<|im_end|>")
                assert float(pack.margins_P[p]) == row["margin"]
                assert data.train.number(id) == id.record  # nothing is held out or dropped
            ends = pack.cu_seqlens_S1[1:].long() - 1
            assert bool((pack.labels_T[ends] == IGNORE).all())
            shifted = torch.where(pack.labels_T == IGNORE, pack.tokens_T.roll(-1), pack.labels_T)
            assert torch.equal(shifted, pack.tokens_T.roll(-1))
            seen += [id.record for id in pack.ids]
            assert pack.padded(200).valid == pack.valid and pack.blank().valid == 0
    assert sorted(seen) == list(range(40))


def test_a_target_that_begins_a_sequence_is_not_the_one_befores_label(tmp_path: Path) -> None:
    """Where a template leaves out all but answers, nothing predicts their first tokens."""
    only = ("{% for m in messages if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}"
            "{% endfor %}")
    path = write_jsonl(tmp_path / "pairs.jsonl", [PLAIN])
    data = open_data(pairs_config(path), chat_tokenizer(only), tmp_path / "cache")
    with DataLoader(data, 1) as loader:
        [pack] = loader.next_step()
    assert chat_tokenizer().decode(pack.tokens_T.tolist(), False) == "he: 4<|im_end|>5<|im_end|>"
    assert (pack.labels_T == IGNORE).nonzero()[:, 0].tolist() == [4, 6]


def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path) -> None:
    long = {**PLAIN, "chosen": "h" * 60}
    path = write_jsonl(tmp_path / "pairs.jsonl", [PLAIN, long, PLAIN])
    data = open_data(pairs_config(path), chat_tokenizer(), tmp_path / "cache")
    assert (data.train.counts.units, data.train.counts.dropped_too_long) == (2, 1)


def test_a_prompt_is_on_one_side_of_what_is_held_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", rows(60))
    data = open_data(pairs_config(path, eval_fraction=0.4), chat_tokenizer(), tmp_path / "cache")
    held = {id.record for pack in evaluation_packs(data) for id in pack.ids}
    assert 0 < len(held) < 60
    assert {i % 10 for i in held}.isdisjoint(i % 10 for i in set(range(60)) - held)


def test_parquet_has_the_same_pairs(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows(7)), tmp_path / "pairs.parquet")
    lines = write_jsonl(tmp_path / "pairs.jsonl", rows(7))
    found = []
    for path in (tmp_path / "pairs.parquet", lines):
        data = open_data(pairs_config(path, shuffle=False), chat_tokenizer(), tmp_path / "cache")
        with DataLoader(data, 1) as loader:
            found.append(json.dumps(loader.next_step()[0].tokens_T.tolist()))
    assert found[0] == found[1]
