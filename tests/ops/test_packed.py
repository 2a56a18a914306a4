"""Packing keeps every value it promises to keep, in the bytes it promises to use."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.ops.packed import PackedWeight, QuantTensor, pack
from tests.ops import runnable_isas, use_library

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = [(4, 32, True), (8, 32, False), (8, 32, True), (8, 16, False), (4, 16, True),
         (4, 32, False)]  # bits, group, min


def quantised(n: int, groups: int, bits: int, group: int, has_min: bool,
              digits: int = 11) -> QuantTensor:
    """Random numbers whose scales and mins have `digits` significant bits."""
    low, high = (0, 16) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (n, groups * group)).to(torch.int8)

    def numbers(power: float) -> Tensor:
        whole = torch.randint(-(1 << digits) + 1, 1 << digits, (n, groups)).float()
        return whole * 2.0 ** (power - digits)

    return QuantTensor(q, numbers(-3), numbers(1) if has_min else None, bits, group)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 150), name=st.sampled_from(sorted(DTYPES)),
       transposed=st.booleans())
def test_float_storages_keep_every_bit(n: int, k: int, name: str, transposed: bool) -> None:
    weight = (torch.randn(k, n).t() if transposed else torch.randn(n, k)).to(DTYPES[name])
    packed = pack(weight)
    assert packed.storage == name and packed.shape == (n, k)
    assert torch.equal(packed.dequantize(), weight.float())
    assert packed.nbytes == -(-n // 16) * 16 * k * weight.element_size()
    assert packed.data.data_ptr() % 64 == 0


def test_floats_can_be_rounded_to_a_narrower_storage() -> None:
    weight = torch.randn(33, 50)
    for name, dtype in DTYPES.items():
        assert torch.equal(pack(weight, name).dequantize(), weight.to(dtype).float())


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), groups=st.integers(1, 5), kind=st.sampled_from(KINDS),
       digits=st.sampled_from([11, 17]))
def test_quantised_tensors_keep_every_value(n: int, groups: int, kind: tuple[int, int, bool],
                                            digits: int) -> None:
    weight = quantised(n, groups, *kind, digits)
    packed = pack(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_scales_take_two_bytes_only_where_fp16_holds_them(kind: tuple[int, int, bool]) -> None:
    bits, group, has_min = kind
    numbers = 2 if has_min or bits == 4 else 1
    weight = quantised(16, 3, bits, group, has_min, digits=11)
    assert pack(weight).nbytes == 16 * 3 * (group * bits // 8 + 2 * numbers)
    weight.scale[5, 1] = 1.0 + 2.0 ** -12
    assert pack(weight).nbytes == 16 * 3 * (group * bits // 8 + 4 * numbers)
    assert torch.equal(pack(weight).dequantize(), weight.dequantize())


def test_int8_from_floats_is_nearest_on_the_stored_scale() -> None:
    weight = torch.randn(20, 80) * torch.logspace(-4, 3, 20)[:, None]
    weight[3, 32:64] = 0.0
    blocks = torch.nn.functional.pad(weight, (0, 16)).view(20, 3, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    q = torch.where(scale == 0, torch.zeros(()), blocks / scale).round().clamp(-127, 127)
    assert torch.equal(pack(weight, "int8").dequantize(), (q * scale).view(20, 96)[:, :80])


def test_int4_from_floats_is_nearest_on_the_stored_scale_and_min() -> None:
    weight = torch.randn(20, 64) * torch.logspace(-4, 3, 20)[:, None]
    weight[3, 32:64] = 0.5
    blocks = weight.view(20, 2, 32)
    low = blocks.amin(-1, keepdim=True)
    scale = ((blocks.amax(-1, keepdim=True) - low) / 15).half().float()
    low = low.half().float()
    q = torch.where(scale == 0, torch.zeros(()), (blocks - low) / scale).round().clamp(0, 15)
    assert torch.equal(pack(weight, "int4").dequantize(), (q * scale + low).view(20, 64))


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
def test_gated_packing_pads_each_half(storage: str) -> None:
    weight = torch.randn(2 * 23, 64)
    gated = pack(weight, storage, gated=True)
    assert torch.equal(gated.dequantize(), pack(weight, storage).dequantize())
    assert gated.nbytes == pack(torch.randn(64, 64), storage).nbytes


def test_a_memory_mapped_file_is_packed_in_place(tmp_path: Path) -> None:
    values = np.arange(48 * 40, dtype=np.float32)
    values.tofile(tmp_path / "w")
    mapped = torch.from_numpy(np.memmap(tmp_path / "w", np.float32, "c", shape=(48, 40)))
    assert torch.equal(pack(mapped).dequantize(), torch.from_numpy(values).view(48, 40))


def test_every_instruction_set_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 77)
    sources: list[tuple[Tensor | QuantTensor, str]] = [
        (weight, name) for name in ("fp32", "bf16", "fp16", "int8", "int4")]
    sources += [(quantised(37, 3, *kind), "auto") for kind in KINDS]
    seen: dict[int, list[PackedWeight]] = {}
    for isa in runnable_isas():
        use_library(monkeypatch, isa)
        for i, (source, storage) in enumerate(sources):
            seen.setdefault(i, []).append(pack(source, storage))
    for versions in seen.values():
        for a, b in itertools.pairwise(versions):
            assert torch.equal(a.data, b.data)


def test_rows_of_a_quant_tensor_are_exact() -> None:
    weight = quantised(10, 2, 4, 32, True)
    index = torch.tensor([7, 0, 3])
    assert torch.equal(weight.rows(index).dequantize(), weight.dequantize()[index])


def test_errors_say_everything_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"float64.*shape \(3,\)"):
        pack(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="storage is 'q4'"):
        pack(torch.zeros(3, 3), "q4")
    with pytest.raises(ValueError, match="5 is odd"):
        pack(torch.zeros(5, 3), gated=True)
    with pytest.raises(ValueError, match="8-bit tensor is stored as int8, not int4"):
        pack(quantised(4, 1, 8, 32, False), "int4")
    wrong = QuantTensor(torch.zeros(4, 40, dtype=torch.int8), torch.zeros(4, 2), None, 8, 32)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 2\)"):
        pack(wrong)
    digits = quantised(4, 2, 8, 32, True)
    digits.scale[1, 1] = 1.0 + 2.0 ** -23
    with pytest.raises(ValueError, match="1 of its scales"):
        pack(digits)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_values_without_a_scale_are_refused(storage: str, value: float) -> None:
    weight = torch.randn(20, 64)
    weight[17, 40] = value
    with pytest.raises(ValueError, match=r"1 group\(s\)"):
        pack(weight, storage)
