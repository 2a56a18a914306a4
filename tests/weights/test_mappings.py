"""Mappings are exact inverses, agree with a brute-force fusion, and can be read in row slices."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.ops.packed import QuantTensor
from kilter.weights.mappings import (
    FusedQKV,
    GatedMLP,
    ParameterMap,
    PlusOne,
    Quant,
    Rename,
    Weight,
    common_format,
    concatenate,
    convert,
    dense,
    format_of,
    rows,
)

sizes = st.integers(1, 4)


def random_weight(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Weight:
    """A Tensor of dtype `kind`, or a random quantised matrix such as "4m32" (bits, min, group)."""
    if kind in ("float32", "bfloat16", "float16"):
        return torch.randn(shape, generator=generator).to(getattr(torch, kind))
    bits, low, group = int(kind[0]), kind[1] == "m", int(kind[2:])
    n, k = shape
    q = torch.randint(0, 16, (n, k), generator=generator) if bits == 4 else torch.randint(
        -128, 128, (n, k), generator=generator)
    groups = (n, k // group)
    return QuantTensor(q.to(torch.int8), torch.randn(groups, generator=generator),
                       torch.randn(groups, generator=generator) if low else None, bits, group)


def bits_equal(a: Weight, b: Weight) -> bool:
    """Same format, same bits."""
    if format_of(a) != format_of(b):
        return False
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor):
        lows = a.min is None or (b.min is not None and bits_equal(a.min, b.min))
        return torch.equal(a.q, b.q) and bits_equal(a.scale, b.scale) and lows
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8),
                                              b.contiguous().view(torch.uint8))


KINDS = ["float32", "bfloat16", "4m32", "8-32", "8m32", "8-16"]


@st.composite
def fused_qkv(draw: st.DrawFn) -> tuple[FusedQKV, dict[str, Weight], tuple[int, int, int]]:
    g, r, half = draw(sizes), draw(sizes), draw(sizes)
    d, kind = 2 * half, draw(st.sampled_from(KINDS))
    mapping = FusedQKV("qkv", "q", "k", "v", groups=g, queries=r, head_dim=d, tail=(64,),
                       interleaved=draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {name: random_weight(shape, kind, generator)
               for name, shape in mapping.sources.items()}
    return mapping, tensors, (g, r, d)


@settings(max_examples=40, deadline=None)
@given(fused_qkv())
def test_fused_qkv_inverts_bit_for_bit(
        case: tuple[FusedQKV, dict[str, Weight], tuple[int, int, int]]) -> None:
    mapping, tensors, _ = case
    fused = mapping.to_kilter(tensors)
    assert tuple(fused.shape) == mapping.shape
    back = mapping.to_source(fused)
    assert all(bits_equal(back[name], tensors[name]) for name in tensors)


@settings(max_examples=40, deadline=None)
@given(fused_qkv())
def test_fused_qkv_is_queries_then_key_then_value_per_group(
        case: tuple[FusedQKV, dict[str, Weight], tuple[int, int, int]]) -> None:
    mapping, tensors, (g, r, d) = case
    q, k, v = (dense(tensors[name]) for name in "qkv")
    if len(mapping.pieces()) != 3 * g:  # interleaved: undo ggml's neighbour pairs by hand
        def split(w: Tensor) -> Tensor:
            pairs = w.view(-1, d // 2, 2, w.shape[1])  # head, pair, which half, column
            return pairs.transpose(1, 2).reshape(w.shape)
        q, k = split(q), split(k)
    expected = torch.cat([q.view(g, r, d, -1), k.view(g, 1, d, -1), v.view(g, 1, d, -1)], 1)
    assert bits_equal(dense(mapping.to_kilter(tensors)), expected.reshape(mapping.shape))


def test_gated_mlp_is_gate_above_up() -> None:
    mapping = GatedMLP("p", "gate", "up", ffn=3, tail=())
    fused = mapping.to_kilter({"up": torch.arange(3), "gate": torch.arange(10, 13)})
    assert dense(fused).tolist() == [10, 11, 12, 0, 1, 2]
    assert dense(mapping.to_source(fused)["up"]).tolist() == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reading_rows_equals_slicing_the_whole(data: st.DataObject) -> None:
    """Also when the parts' formats differ, and asking for no other rows than those needed."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    g, r, half = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    mapping: ParameterMap = data.draw(st.sampled_from([
        FusedQKV("p", "a", "b", "c", groups=g, queries=r, head_dim=2 * half, tail=(64,),
                 interleaved=data.draw(st.booleans())),
        GatedMLP("p", "a", "b", ffn=g * r, tail=(64,)), Rename("p", "a", (g * r, 64))]))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3))
    tensors = {name: random_weight(shape, kind, generator)
               for (name, shape), kind in zip(mapping.sources.items(), kinds, strict=False)}
    start = data.draw(st.integers(0, mapping.shape[0]))
    stop = data.draw(st.integers(start, mapping.shape[0]))
    asked = 0

    def read(name: str, index: slice) -> Weight:
        nonlocal asked
        part = rows(tensors[name], index)
        asked += part.shape[0]
        return part

    got = mapping.read(read, start, stop)
    assert bits_equal(got, rows(mapping.to_kilter(tensors), slice(start, stop)))
    assert asked == stop - start


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(0, 2**31))
def test_common_format_keeps_every_value(kinds: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [random_weight((3, 64), kind, generator) for kind in kinds]
    to = common_format([format_of(w) for w in weights])
    together = dense(concatenate([convert(w, to) for w in weights])).float()
    assert bits_equal(together, torch.cat([dense(w).float() for w in weights]))


def test_four_bit_and_eight_bit_meet_in_eight_bits() -> None:
    four, eight = Quant(4, 32, True), Quant(8, 32, False)
    assert common_format([four, eight]) == Quant(8, 32, True)
    assert common_format([eight, Quant(8, 16, False)]) == Quant(8, 16, False)
    assert common_format([four, Quant(8, 16, False)]) == torch.float32
    assert common_format([four, four]) == four
    assert common_format([four, torch.bfloat16]) == torch.float32
    assert common_format([torch.bfloat16, torch.float16]) == torch.float32


@given(st.lists(st.floats(-0.5, 100, width=16), min_size=1, max_size=50))
def test_plus_one_returns_weights_of_16_bits(values: list[float]) -> None:
    """fp16 and bf16 weights of at least -0.5 survive 1 + w when they are not finer than 2**-23."""
    w = (torch.tensor(values) * 2**14).round() / 2**14
    mapping = PlusOne("norm", "stored", w.shape)
    assert torch.equal(mapping.to_kilter({"stored": 1.0 + w}), w)
    assert torch.equal(dense(mapping.to_source(w)["stored"]), 1.0 + w)
