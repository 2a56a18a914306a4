"""Packs and steps against brute force: every target once per epoch, the same packs on any number
of ranks, and a resume at any step that is as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilter.train.data import (
    IGNORE,
    Data,
    DataConfig,
    DataError,
    DataLoader,
    Pack,
    SampleId,
    SourceConfig,
    evaluation_packs,
    open_data,
)
from kilter.train.data.order import Order
from kilter.train.data.packing import Packer
from tests.train.data.tiny import chat_tokenizer, text_config, write_jsonl, write_texts

TOKENIZER = chat_tokenizer()
quick = settings(deadline=None, max_examples=40,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


def some_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Texts without two equal ones, of 1 to `longest` tokens and more."""
    draw = random.Random(seed)
    return [f"{i:x}" + "".join(draw.choices("abcd", k=draw.randrange(longest)))
            for i in range(count)]


def epochs_of(data: Data, count: int) -> list[list[Pack]]:
    """The packs of the first epochs, one epoch after the other."""
    found: list[list[Pack]] = []
    epoch = -1
    with DataLoader(data, 1) as loader:
        while True:
            pack = loader.next_step()[0]
            if loader.epoch != epoch:
                epoch = loader.epoch
                if epoch == count:
                    return found
                found.append([])
            found[-1].append(pack)


def sequences(pack: Pack) -> list[tuple[SampleId, list[int], list[int]]]:
    cu = pack.cu_seqlens_S1.tolist()
    return [(key, pack.tokens_T[a:b].tolist(), pack.labels_T[a:b].tolist())
            for key, a, b in zip(pack.ids, cu[:-1], cu[1:], strict=True)]


def same(a: list[Pack], b: list[Pack]) -> bool:
    return len(a) == len(b) and all(
        x.ids == y.ids and torch.equal(x.tokens_T, y.tokens_T)
        and torch.equal(x.labels_T, y.labels_T) and torch.equal(x.positions_T, y.positions_T)
        and torch.equal(x.cu_seqlens_S1, y.cu_seqlens_S1) for x, y in zip(a, b, strict=True))


def steps_of(loader: DataLoader, count: int) -> list[list[Pack]]:
    return [loader.next_step() for _ in range(count)]


def texts_data(folder: Path, texts: list[str], **settings: Any) -> Data:
    path = write_texts(folder / "t.jsonl", texts)
    return open_data(text_config(path, **settings), TOKENIZER, folder / "cache")


@quick
@given(st.lists(st.text(st.sampled_from("abhe"), max_size=40), min_size=1, max_size=12),
       st.integers(2, 20), st.booleans(), st.booleans(), st.integers(1, 5))
def test_every_target_is_there_once_per_epoch(
    tmp_path: Path, texts: list[str], seq_len: int, packing: bool, shuffle: bool, lookahead: int
) -> None:
    if not any(texts):
        texts = [*texts, "a"]
    data = texts_data(tmp_path, texts, seq_len=seq_len, packing=packing, shuffle=shuffle,
                      **{"lookahead": lookahead} if packing else {})
    eos = TOKENIZER.eos_token_ids[0]
    documents = [[*TOKENIZER.encode(text, parse_special=False), eos] for text in texts]
    expected = Counter((0, 0, record, place, document[place], document[place + 1])
                       for record, document in enumerate(documents)
                       for place in range(len(document) - 1))
    for packs in epochs_of(data, 2):
        found: Counter[tuple[int, ...]] = Counter()
        for pack in packs:
            assert pack.num_tokens <= seq_len
            assert packing or len(pack.ids) == 1
            assert pack.valid == sum(label != IGNORE for label in pack.labels_T.tolist())
            for key, tokens, labels in sequences(pack):
                document = documents[key.record]
                assert tokens == document[key.begin : key.begin + len(tokens)]
                last = key.begin + len(tokens) == len(document)
                assert (labels[-1] == IGNORE) == last and IGNORE not in labels[:-1]
                found.update((*key[:3], key.begin + i, token, label)
                             for i, (token, label) in enumerate(zip(tokens, labels, strict=True))
                             if label != IGNORE)
        assert found == expected
    assert data.train.counts.tokens == sum(pack.num_tokens for pack in packs)
    assert data.train.counts.units == sum(len(pack.ids) for pack in packs)


def test_a_pack_is_documents_side_by_side(tmp_path: Path) -> None:
    data = texts_data(tmp_path, ["abc", "d", "abcdefghijklm"], seq_len=8, shuffle=False)
    first, second, third = epochs_of(data, 1)[0]
    a, b, c, d = (TOKENIZER.encode(letter)[0] for letter in "abcd")
    eos = TOKENIZER.eos_token_ids[0]
    assert first.tokens_T.tolist() == [a, b, c, eos, d, eos]
    assert first.labels_T.tolist() == [b, c, eos, IGNORE, eos, IGNORE]
    assert first.positions_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert first.cu_seqlens_S1.tolist() == [0, 4, 6]
    assert first.ids == (SampleId(0, 0, 0, 0), SampleId(0, 0, 1, 0))
    assert first.valid == 4
    assert second.ids == (SampleId(0, 0, 2, 0),) and third.ids == (SampleId(0, 0, 2, 8),)
    assert second.valid == 8  # its last label is the first token of the next piece
    assert third.positions_T.tolist() == list(range(6))
    batch = first.batch()
    assert (batch.num_tokens, batch.num_seqs, batch.max_seqlen) == (6, 2, 4)
    assert [t.dtype for t in (first.tokens_T, first.positions_T, first.cu_seqlens_S1,
                              first.labels_T)] == [torch.int64, torch.int32, torch.int32,
                                                   torch.int64]


def test_padding_is_a_sequence_without_labels(tmp_path: Path) -> None:
    pack = epochs_of(texts_data(tmp_path, ["abc", "d"], seq_len=8), 1)[0][0]
    padded = pack.padded(8)
    assert padded.positions_T.tolist() == [*pack.positions_T.tolist(), 0, 1]
    assert padded.cu_seqlens_S1.tolist() == [*pack.cu_seqlens_S1.tolist(), 8]
    assert padded.valid == pack.valid and padded.ids == pack.ids
    assert padded.padded(8) is padded
    assert pack.blank().valid == 0 and pack.blank().ids == ()
    with pytest.raises(ValueError, match="6 tokens cannot be padded to 4"):
        pack.padded(4)


@quick
@given(st.lists(st.integers(1, 20), max_size=12), st.integers(0, 25))
def test_packer_takes_the_longest_that_fits(lengths: list[int], room: int) -> None:
    packer = Packer(enumerate(lengths))
    waiting = dict(enumerate(lengths))
    while waiting:
        fits = [(length, -place) for place, length in waiting.items() if length <= room]
        expected = -max(fits)[1] if fits else None
        assert packer.fitting(room) == expected
        if expected is None:
            expected = min(waiting)
            assert packer.first() == expected
        del waiting[expected]
        assert packer.places == sorted(waiting)
    assert packer.first() is None


def test_packing_wastes_little(tmp_path: Path) -> None:
    """Of many random lengths only the end of an epoch is left without choice."""
    data = texts_data(tmp_path, some_texts(600, 40), seq_len=64)
    packs = epochs_of(data, 1)[0]
    assert sum(pack.num_tokens for pack in packs) > 0.97 * 64 * len(packs)


def test_packs_do_not_depend_on_ranks(tmp_path: Path) -> None:
    data = texts_data(tmp_path, some_texts(25, 30), lookahead=7)
    with DataLoader(data, 4) as loader:
        alone = steps_of(loader, 25)  # some epochs
    assert loader.epoch >= 2
    for dp in (2, 4):
        for rank in range(dp):
            with DataLoader(data, 4, rank, dp) as loader:
                for whole, mine in zip(alone, steps_of(loader, 25), strict=True):
                    assert same(mine, whole[rank::dp])


@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_at_every_step_is_as_if_uninterrupted(tmp_path: Path, shuffle: bool) -> None:
    data = texts_data(tmp_path, some_texts(40, 30), lookahead=5, shuffle=shuffle)
    with DataLoader(data, 4, 1, 4) as saving:
        states = [saving.state_dict()]
        for _ in range(20):
            saving.next_step()
            states.append(saving.state_dict())
    with DataLoader(data, 4) as loader:
        whole = steps_of(loader, 24)
    random.seed(0)
    torch.manual_seed(0)
    drawn = random.getstate(), torch.get_rng_state()
    with DataLoader(data, 4, 1, 2) as resumed:  # four ranks saved, two go on
        for number, state in enumerate(states):
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.state_dict() == state
            for step in range(number, min(number + 4, 24)):
                assert same(resumed.next_step(), whole[step][1::2])
    assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])


@settings(quick, max_examples=25)
@given(st.lists(st.text(st.sampled_from("abhe"), max_size=40), min_size=4, max_size=9),
       st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.0]), min_size=2, max_size=2),
       st.integers(1, 2), st.lists(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 3)]),
                                   min_size=1, max_size=6), st.booleans())
def test_epochs_are_exact_over_any_ranks_and_resumes(
    tmp_path: Path, texts: list[str], weights: list[float], epochs: int,
    splits: list[tuple[int, int]], chat: bool
) -> None:
    """The targets of all steps are those that the order takes, each once: also where every step is
    taken by other ranks in other micro-batches, from the state that the one before left, and where
    the last step is not full. Every micro-batch but those of the end has something to learn."""
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"messages": [
            {"role": "user", "content": f"{number}" + "?" * len(text)},
            {"role": "assistant", "content": text}], "text": f"{number}{text}"} for text in texts])
    sources = tuple(SourceConfig((str(tmp_path / f"{number}.jsonl"),), chat=chat, weight=weight)
                    for number, weight in enumerate(weights))
    data = open_data(DataConfig(sources, seq_len=12, lookahead=3), TOKENIZER, tmp_path / "cache")
    order = Order(data.train.sizes, weights, True, 0)
    units = [unit for epoch in range(epochs) for unit in zip(
        *order.units(epoch, np.arange(order.length(epoch))), strict=True)]
    samples = [data.train.read(int(source), int(unit)) for source, unit in units]
    expected = Counter(sample.id for sample in samples)
    targets = sum(int((sample.labels_N != IGNORE).sum()) for sample in samples)
    assert all((sample.labels_N != IGNORE).any() for sample in samples)
    found: Counter[SampleId] = Counter()
    state: dict[str, Any] | None = None
    taken = 0
    while True:
        count, dp = splits[taken % len(splits)]
        packs, states = [], []
        for rank in range(dp):
            with DataLoader(data, count, rank, dp, epochs=epochs) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                left = loader.steps_left()
                if not left:
                    with pytest.raises(ValueError, match="epochs are over"):
                        loader.next_step()
                    continue
                packs.append(loader.next_step())
                states.append(loader.state_dict())
                assert loader.steps_left() == left - 1
        if not packs:
            break
        assert all(other == states[0] for other in states)
        state, taken = states[0], taken + 1
        row = [pack for together in zip(*packs, strict=True) for pack in together]
        full = [pack for pack in row if pack.ids]
        assert len(row) == count and row[: len(full)] == full  # blank ones are last
        assert all(pack.valid > 0 for pack in full) and not any(p.valid for p in row[len(full):])
        found.update(key for pack in full for key in pack.ids)
        targets -= sum(pack.valid for pack in full)
    assert found == expected and targets == 0


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    data = texts_data(tmp_path, some_texts(9, 30), seq_len=16)
    with DataLoader(data, 4, epochs=1) as loader:
        steps = loader.steps_left()
        row = [pack for step in steps_of(loader, steps) for pack in step]
        end = loader.state_dict()
    assert sum(1 for pack in row if not pack.ids) == -len(epochs_of(data, 1)[0]) % 4 > 0
    with DataLoader(data, 4, epochs=2) as loader:
        loader.load_state_dict(end)
        assert loader.steps_left() == steps
        second = [pack for step in steps_of(loader, steps) for pack in step if pack.ids]
    assert same(second, epochs_of(data, 2)[1])


def test_micro_batches_may_change_on_resume(tmp_path: Path) -> None:
    data = texts_data(tmp_path, some_texts(40, 30))
    with DataLoader(data, 2) as loader:
        row = [pack for step in steps_of(loader, 20) for pack in step]
    with DataLoader(data, 2) as loader, DataLoader(data, 6) as other:
        steps_of(loader, 3)
        other.load_state_dict(loader.state_dict())
        assert same(other.next_step(), row[6:12])


def test_a_place_in_other_data_is_refused(tmp_path: Path) -> None:
    data = texts_data(tmp_path, some_texts(9, 9))
    with DataLoader(data, 1) as loader:
        state = loader.state_dict()
    for changed in ({"seed": 1}, {"seq_len": 17}, {"shuffle": False}, {"eos": False}):
        with (DataLoader(texts_data(tmp_path, some_texts(9, 9), **changed), 1) as loader,
              pytest.raises(ValueError, match="saved with other data or settings")):
            loader.load_state_dict(state)
    with (DataLoader(texts_data(tmp_path, some_texts(9, 9, seed=1)), 1) as loader,
          pytest.raises(ValueError, match="saved with other data or settings")):
        loader.load_state_dict(state)


def test_micro_batches_have_to_divide(tmp_path: Path) -> None:
    data = texts_data(tmp_path, ["abc"])
    with pytest.raises(ValueError, match=r"A step of 3 micro-batches .* 2 data-parallel ranks"):
        DataLoader(data, 3, 0, 2)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        DataLoader(data, 2, 2, 2)


def test_an_error_comes_out_and_the_step_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = texts_data(tmp_path, some_texts(30, 30))
    with DataLoader(data, 2) as loader:
        whole = steps_of(loader, 6)
    with DataLoader(data, 2) as loader:
        assert same(loader.next_step(), whole[0])
        steps_of(loader, 1)
        with monkeypatch.context() as patch:
            patch.setattr(data.train, "read", lambda *_: 1 / 0)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    steps_of(loader, 9)
        state = loader.state_dict()
        with DataLoader(data, 2) as other:
            other.load_state_dict(state)
            assert same(loader.next_step(), other.next_step())


def chats(path: Path) -> Path:
    """With 80 tokens, some answers fit, some in part, and of some the first token just does not."""
    draw = random.Random(1)
    return write_jsonl(path, [{"messages": [
        {"role": "user", "content": "?" * (40 + i)},
        {"role": "assistant", "content": "x" * draw.randrange(60)}]} for i in range(40)])


@pytest.mark.parametrize("long_documents", ["split", "truncate", "drop"])
def test_conversations_are_masked_and_long_ones_counted(
    tmp_path: Path, long_documents: str
) -> None:
    path = chats(tmp_path / "c.jsonl")
    source = SourceConfig((str(path),), chat=True)
    config = DataConfig((source,), seq_len=80, long_documents=long_documents,  # type: ignore[arg-type]
                        shuffle=False)
    data = open_data(config, TOKENIZER, tmp_path / "cache")
    found = {(key.record, key.begin): (tokens, labels) for pack in epochs_of(data, 1)[0]
             for key, tokens, labels in sequences(pack)}
    assert len(found) == data.train.counts.units
    end, truncated, long, useless = TOKENIZER.encode("<|im_end|>")[0], 0, 0, 0
    without = 0
    for record, line in enumerate(path.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        ids = TOKENIZER.encode_chat(messages, add_generation_prompt=False)
        answer = len(messages[1]["content"]) + 1
        labels = [IGNORE] * (len(ids) - answer - 2) + ids[-answer - 1 : -1] + [IGNORE] * 2
        assert labels[-3] == end
        pieces = {begin: (ids[begin : begin + 80], labels[begin : begin + 80])
                  for begin in range(0, len(ids) - 1, 80)}
        if len(ids) > 80 and long_documents == "drop":
            pieces, long = {}, long + 1
        elif len(ids) > 80 and long_documents == "truncate":
            has_target = any(label != IGNORE for label in labels[:80])
            pieces = {0: pieces[0]} if has_target else {}
            truncated, useless = truncated + has_target, useless + (not has_target)
        else:  # pieces of the question alone teach nothing
            count = len(pieces)
            pieces = {begin: piece for begin, piece in pieces.items()
                      if any(label != IGNORE for label in piece[1])}
            without += count - len(pieces)
        assert {begin: found.pop((record, begin)) for begin in pieces} == pieces
    assert found == {}
    counts = data.train.counts
    assert (counts.truncated, counts.dropped_too_long, counts.dropped_without_targets) == (
        truncated, long, useless)
    assert counts.dropped_units == without and (without > 3) == (long_documents == "split")
    assert counts.documents == 40 and (long_documents == "split" or truncated + long > 3)


def test_sources_are_weighted(tmp_path: Path) -> None:
    paths = [write_texts(tmp_path / f"{n}.jsonl", [f"{n}{i:02d}" for i in range(20)])
             for n in range(2)]
    sources = (SourceConfig((str(paths[0]),), weight=2), SourceConfig((str(paths[1]),), weight=0.5))
    data = open_data(DataConfig(sources, seq_len=16), TOKENIZER, tmp_path / "cache")
    for packs in epochs_of(data, 2):
        counts = Counter(key.source for pack in packs for key in pack.ids)
        assert counts == {0: 40, 1: 10}


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    texts = some_texts(300, 20)
    copies = write_texts(tmp_path / "copies.jsonl", texts[::-1])
    path = write_texts(tmp_path / "t.jsonl", texts)
    data = open_data(text_config(path, copies, eval_fraction=0.2, seq_len=24), TOKENIZER,
                     tmp_path / "cache")
    train = {tuple(tokens) for pack in epochs_of(data, 1)[0] for _, tokens, _ in sequences(pack)}
    held = [(key, tuple(tokens)) for pack in evaluation_packs(data)
            for key, tokens, _ in sequences(pack)]
    assert train.isdisjoint(tokens for _, tokens in held)
    assert len({key for key, _ in held}) == len(held)  # each once
    assert data.held_out is not None and data.held_out.counts.units == len(held)
    assert data.held_out.counts.documents + data.train.counts.documents == 600
    assert 80 < data.held_out.counts.documents < 160
    other = open_data(text_config(path, copies, eval_fraction=0.2, seed=5, seq_len=9),
                      TOKENIZER, tmp_path / "cache")
    again = {key[:3] for pack in evaluation_packs(other) for key in pack.ids}
    assert again == {key[:3] for key, _ in held}  # whatever the order and the length


def test_documents_of_evaluation_sources_are_not_trained_on(tmp_path: Path) -> None:
    texts = some_texts(30, 20)
    path = write_texts(tmp_path / "t.jsonl", [*texts, texts[3]])
    held = write_texts(tmp_path / "h.jsonl", [texts[3], "new", texts[7], "x" * 50])
    data = open_data(text_config(path, eval_sources=(SourceConfig((str(held),)),), seq_len=24),
                     TOKENIZER, tmp_path / "cache")
    records = {key.record for pack in epochs_of(data, 1)[0] for key in pack.ids}
    assert records == set(range(30)) - {3, 7}
    assert data.train.counts.held_out == 3 and data.train.counts.documents == 28
    assert "(3 also in the evaluation sources)" in str(data) and "4 documents held out" in str(data)
    alone = open_data(text_config(path, seq_len=24), TOKENIZER, tmp_path / "cache")
    assert alone.key != data.key and alone.train.key != data.train.key
    copy = write_texts(tmp_path / "copy.jsonl", [*texts, texts[3]])
    with pytest.raises(DataError, match=r"copy\.jsonl is to be evaluated with, but is trained on"):
        open_data(text_config(path, eval_sources=(SourceConfig((str(copy),)),)), TOKENIZER,
                  tmp_path / "cache")


def test_an_epoch_of_nothing_is_refused(tmp_path: Path) -> None:
    """Else the next document would have to be looked for through any number of epochs."""
    path = write_texts(tmp_path / "t.jsonl", ["abc", "abd"])
    source = SourceConfig((str(path),), weight=1e-9)
    with pytest.raises(DataError, match="less than one sequence for an epoch, of the 2"):
        open_data(DataConfig((source,), 16), TOKENIZER, tmp_path / "cache")
    half = SourceConfig((str(path),), weight=0.5)
    assert open_data(DataConfig((half,), 16), TOKENIZER, tmp_path / "cache").train.sizes == [2]


def test_evaluation_is_shared_by_ranks_in_lockstep(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "t.jsonl", ["abc"])
    for count in (1, 7, 8):
        held = write_texts(tmp_path / f"{count}.jsonl", [f"{i:015d}" for i in range(count)])
        config = text_config(train, eval_sources=(SourceConfig((str(held),)),))
        data = open_data(config, TOKENIZER, tmp_path / "cache")
        alone = list(evaluation_packs(data))
        assert len(alone) == count
        for dp in (2, 4):
            ranks = [list(evaluation_packs(data, rank, dp)) for rank in range(dp)]
            assert {len(packs) for packs in ranks} == {-(-count // dp)}
            rounds = [pack for together in zip(*ranks, strict=True) for pack in together]
            assert same(rounds[:count], alone)
            assert all(pack.valid == 0 and pack.ids == () for pack in rounds[count:])
    assert list(evaluation_packs(texts_data(tmp_path, ["abc"]))) == []


def test_data_with_nothing_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to train on: of 1 documents 1 are too long"):
        texts_data(tmp_path, ["a" * 99], long_documents="drop")
    with pytest.raises(DataError, match="nothing to train on: of 1 documents 0 are too long and 1"):
        texts_data(tmp_path, [""])
    with pytest.raises(ValueError, match="lookahead is 3, which only packing uses"):
        texts_data(tmp_path, ["abc"], packing=False, lookahead=3)
    with pytest.raises(DataError, match="Nothing is held out for evaluation"):
        texts_data(tmp_path, ["abc"], eval_fraction=0.0001)
    with pytest.raises(DataError, match=r"t\.jsonl, line 2 is not valid JSON"):
        (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text"\n')
        open_data(text_config(tmp_path / "t.jsonl"), TOKENIZER, tmp_path / "cache")


def test_memory_is_of_lengths_only(tmp_path: Path) -> None:
    """Tokens are mapped, not read."""
    data = texts_data(tmp_path, some_texts(9, 9))
    epochs_of(data, 1)
    file = data.train._sources[0]._files[0]
    assert all(isinstance(tokens, np.memmap) for tokens, _ in file._open.values())
