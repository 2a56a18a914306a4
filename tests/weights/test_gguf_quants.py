"""Every GGUF type we read gives the gguf library's values, bit for bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kilter.ops.packed import QuantTensor
from kilter.weights.gguf_quants import BLOCKS, SUPPORTED, unpack
from kilter.weights.mappings import dense

# Byte positions of the fp16 fields of each block type.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208]}
QUANTISED = {kind: name for kind, name in SUPPORTED.items() if name in HALVES}


def random_blocks(kind: int, count: int, seed: int) -> np.ndarray:
    """Every byte random; the fp16 fields are any finite number: zeros, subnormals, the largest."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    for at in HALVES[SUPPORTED[kind]]:
        bits = rng.integers(0, 0x7C00, count).astype(np.uint16)
        bits[:6] = [0, 1, 0x3FF, 0x400, 0x7BFF, 0x3C00]
        bits |= (rng.integers(0, 2, count) << 15).astype(np.uint16)
        raw[:, at:at + 2] = bits.view(np.uint8).reshape(count, 2)
    return raw


@pytest.mark.parametrize("kind", QUANTISED, ids=QUANTISED.values())
def test_blocks_equal_the_reference(kind: int) -> None:
    raw = random_blocks(kind, 6 * 96, seed=kind)
    per_block = BLOCKS[kind][0]
    weight = unpack(kind, raw.reshape(-1), (96, 6 * per_block))
    assert isinstance(weight, QuantTensor)
    ours = weight.dequantize().numpy()
    theirs = gguf.quants.dequantize(raw.reshape(96, -1), gguf.GGMLQuantizationType(kind))
    if QUANTISED[kind] == "Q4_0":
        # As q * scale - 8 * scale, a zero is +0.0 where the reference's may be -0.0.
        theirs = theirs + np.float32(0)
        ours = ours + np.float32(0)
    np.testing.assert_array_equal(ours.view(np.int32), theirs.view(np.int32))


@pytest.mark.parametrize("kind", QUANTISED, ids=QUANTISED.values())
def test_the_product_with_the_scale_is_exact(kind: int) -> None:
    """So fma(q, scale, min) rounds once, and equals the reference."""
    weight = unpack(kind, random_blocks(kind, 512, seed=kind + 100).reshape(-1),
                    (512, BLOCKS[kind][0]))
    assert isinstance(weight, QuantTensor)
    q = weight.q.view(512, -1, weight.group).double()
    scale = weight.scale.double()[:, :, None]
    assert torch.equal((q * scale).float().double(), q * scale)
    low, high = (0, 15) if weight.bits == 4 else (-128, 127)
    assert low <= int(weight.q.min()) and int(weight.q.max()) <= high


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_the_same_bytes(name: str) -> None:
    kind = {v: k for k, v in SUPPORTED.items()}[name]
    raw = np.random.default_rng(0).integers(0, 256, 60 * BLOCKS[kind][1], dtype=np.uint8)
    tensor = dense(unpack(kind, raw, (5, 12)))
    assert tensor.shape == (5, 12)
    assert bytes(tensor.view(torch.uint8).numpy().reshape(-1)) == raw.tobytes()


def test_sizes_agree_with_the_library() -> None:
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == sizes
