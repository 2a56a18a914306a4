"""Reading columns equals slicing the whole, whatever the file and its format."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kilter.ops.packed import QuantTensor
from kilter.weights.gguf import GGUFFile
from kilter.weights.mappings import Weight, dense
from kilter.weights.safetensors import SafetensorsFolder

ROWS, COLUMNS = 6, 768
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of every type, in both formats."""
    folder = tmp_path_factory.mktemp("columns")
    generator = torch.Generator().manual_seed(0)
    save_file({str(dtype): torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
               for dtype in FLOATS}, folder / "model.safetensors")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        # Bytes below 64 make scales that are numbers, in every format.
        raw = torch.randint(64, (ROWS, COLUMNS // per_block * size), generator=generator)
        writer.add_tensor(name, raw.numpy().astype(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@cache
def files(folder: Path) -> tuple[SafetensorsFolder, GGUFFile]:
    return SafetensorsFolder(folder), GGUFFile(folder / "m.gguf")


ranges = st.tuples(st.integers(0, COLUMNS), st.integers(0, COLUMNS)).map(sorted)
aligned = st.tuples(st.integers(0, COLUMNS // 32), st.integers(0, COLUMNS // 32)).map(
    lambda pair: [32 * n for n in sorted(pair)])


def same(part: Weight, whole: Weight, rows: slice, columns: slice) -> bool:
    return torch.equal(dense(part), dense(whole)[rows, columns])


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from([*map(str, FLOATS), *TYPES]), columns=ranges | aligned,
       rows=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted))
def test_columns_of_a_file(folder: Path, name: str, columns: list[int], rows: list[int]) -> None:
    safetensors, ggufs = files(folder)
    file = ggufs if name in TYPES else safetensors
    whole = file.read(name)
    picked, kept = slice(*columns), slice(*rows)
    part = file.read(name, kept, picked)
    assert same(part, whole, kept, picked)
    assert same(file.read(name, None, picked), whole, slice(None), picked)
    if isinstance(whole, QuantTensor):
        fits = columns[0] % whole.group == columns[1] % whole.group == 0
        assert isinstance(part, QuantTensor) == fits  # blocks stay blocks where they can
    else:
        assert part.dtype == whole.dtype


@pytest.mark.parametrize("picked", [slice(None), slice(700, None), slice(None, -100),
                                    slice(760, 9999)])
def test_columns_are_said_as_for_a_list(folder: Path, picked: slice) -> None:
    for name, file in (("torch.bfloat16", files(folder)[0]), ("Q6_K", files(folder)[1])):
        assert same(file.read(name, None, picked), file.read(name), slice(None), picked)
