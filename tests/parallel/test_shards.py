"""Boxes: every degree's parts cover every parameter, owners cover it once, cuts of cuts agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.parity import MODELS, everything, smollm2, tiny
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.heads import split_model
from kilter.parallel.load import fill
from kilter.parallel.shards import Box, Shard
from kilter.parallel.tensor import placements
from tests.parallel.boxes import covers


def spec_of(heads: int, groups: int, ffn: int, vocab: int = 300, qk_norm: bool = True) -> ModelSpec:
    return ModelSpec("LlamaForCausalLM", vocab, 16, ffn, heads, groups, 4,
                     (LayerSpec(RopeSpec()),), 32, qk_norm=qk_norm, qkv_bias=True, out_bias=True,
                     mlp_bias=True)


@settings(deadline=None, max_examples=60)
@given(groups=st.integers(1, 8), queries=st.integers(1, 6), ffn=st.integers(1, 12),
       degree=st.integers(1, 8))
def test_owned_boxes_cover_every_parameter_once(groups: int, queries: int, ffn: int, degree: int
                                                ) -> None:
    spec = spec_of(groups * queries, groups, ffn * 8)
    with torch.device("meta"):
        model = Decoder(spec)
    try:
        parts = split_model(spec, degree)
    except ValueError as error:
        assert "Degrees that work: 1" in str(error)
        assert degree > 1
        return
    for name, parameter in model.named_parameters():
        shards = [placements(model, part, rank)[name] for rank, part in enumerate(parts)]
        owned = [box for s in shards for box, own in zip(s.boxes, s.owned, strict=True) if own]
        assert covers(tuple(parameter.shape), owned), name
    assert sum(part.leaves for part in parts) == spec.virtual_shards
    for rank, part in enumerate(parts):
        assert rank in part.sharers
        held = {group for group, *_ in part.groups}
        for other, theirs in enumerate(parts):  # who shares a KV head with whom, by definition
            shares = bool(held & {group for group, *_ in theirs.groups})
            assert shares == (other in part.sharers)
        assert len(part.sharers) == 1 or len(part.groups) == 1
    assert sum(part.spec.num_heads for part in parts) == spec.num_heads


@pytest.mark.parametrize("spec", [tiny(True), everything(), smollm2()], ids=["tiny", "all", "smol"])
def test_every_degree_up_to_the_virtual_shards_works(spec: ModelSpec) -> None:
    for degree in range(1, spec.virtual_shards + 1):
        assert len(split_model(spec, degree)) == degree


def test_a_degree_that_cannot_be_names_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"over 4 tensor-parallel ranks.*that work: 1, 2, 3\."):
        split_model(MODELS["smollm2"](), 4)


@pytest.mark.parametrize(("spec", "degree", "said"), [
    (spec_of(3, 3, 9), 2, None), (spec_of(3, 1, 7), 2, "3 query and 1 KV heads and 7 feed-forward"),
    (spec_of(4, 2, 6), 3, "its sums have 2 parts, fewer than ranks"),
    (spec_of(8, 8, 64, vocab=5), 6, "vocabulary of 5 tokens is cut in 5 chunks"),
    (spec_of(6, 3, 12), 2, "2 and 1 query heads of 2 KV groups of 2"),
    (spec_of(6, 3, 12), 4, "1 and 1 query heads of 2 KV groups of 2")],
    ids=["fits", "feed-forward", "heads", "vocabulary", "uneven groups", "even parts of groups"])
def test_every_reason_is_said_before_anything_starts(spec: ModelSpec, degree: int,
                                                     said: str | None) -> None:
    if said is None:
        assert len(split_model(spec, degree)) == degree
        return
    with pytest.raises(ValueError, match=f"{said}.*Degrees that work: 1"):
        split_model(spec, degree)


@settings(deadline=None)
@given(st.data())
def test_rows_of_a_shard_are_rows_of_its_local_tensor(data: st.DataObject) -> None:
    whole = torch.arange(12 * 5).view(12, 5)
    boxes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1,
                               max_size=4))
    shard = Shard.of((12, 5), [Box((row, 1), (count, 3)) for row, count in boxes])
    local = torch.empty(shard.local_shape, dtype=whole.dtype)
    fill(local, whole, shard)
    assert torch.equal(local, torch.cat([whole[r:r + n, 1:4] for r, n in boxes]))
    rows = local.shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    part = shard.rows(start, stop)
    cut = torch.empty(part.local_shape, dtype=whole.dtype)
    fill(cut, whole, part)
    assert torch.equal(cut.view(-1), local[start:stop].reshape(-1))
