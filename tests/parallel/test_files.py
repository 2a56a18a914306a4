"""From files to ranks and back: each reads its own bytes, and nothing is lost or added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench.parity import tiny
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread, apply
from kilter.train.export import whole_parameters
from kilter.weights.bridge import open_model
from kilter.weights.export import State, export_hf
from tests.ranks import RankPool

# tiny(False): V 331 (11 chunks of 32, the last of 11 rows), D 32, F 64, 8 query and 4 KV heads of
# 8, 4 layers, a head of its own.
D, F, LAYERS, QKV, OUT = 32, 64, 4, 128, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of an odd vocabulary, all in bf16."""
    spec = tiny(False)
    tensors = {name: p.detach() for name, p in init_weights(Decoder(spec), 3).named_parameters()}
    return export_hf(State(spec, tensors), tmp_path_factory.mktemp("files") / "model",
                     dtype=torch.bfloat16)


def spread_of(spec: ModelSpec, layout: Layout) -> Spread:
    with torch.device("meta"):
        model = Decoder(spec)
    return apply(model, Mesh(layout) if layout.world > 1 else Mesh.single())


def load(folder: Path, layout: Layout) -> int:
    source = open_model(folder)
    return spread_of(source.spec, layout).load(source)


def layer_bytes(share: int) -> int:
    """Of a layer's matrices, of which a rank has one in so many, and its two norms; bf16."""
    return 2 * (D * (QKV + OUT + 3 * F) // share + 2 * D)


def test_ranks_read_their_own_bytes(ranks: RankPool, folder: Path) -> None:
    everything = LAYERS * layer_bytes(1) + 2 * (2 * 331 * D + D)
    assert load(folder, Layout()) == everything
    # Tensor parallel: 6 and 5 of the vocabulary's chunks; norms on both.
    rest = LAYERS * layer_bytes(2) + 2 * D
    assert ranks.run(2, load, folder, Layout(tp=2)) == [
        rest + 2 * 2 * rows * D for rows in (6 * 32, 331 - 6 * 32)]
    # ZeRO 3: halves of all rows (of 331: 166 and 165), each on one rank.
    shares = ranks.run(2, load, folder, Layout(dp=2, zero=3))
    assert shares == [everything // 2 + 2 * D, everything // 2 - 2 * D]
    # Both: of 192 and 139 rows one rank has 96 or 70.
    shares = ranks.run(4, load, folder, Layout(dp=2, tp=2, zero=3))
    half = rest - LAYERS * 2 * 2 * D - 2 * D
    norms = 2 * (2 * LAYERS + 1) * D
    assert shares == [(half + norms) // 2 + 2 * 2 * rows * D for rows in (96, 70, 96, 69)]
    assert sum(shares) == everything + norms


def resaved(folder: Path, target: Path, layout: Layout) -> None:
    source = open_model(folder)
    spread = spread_of(source.spec, layout)
    spread.load(source)
    found = {name: whole for name, whole in whole_parameters(spread, torch.bfloat16)
             if whole is not None}
    if spread.mesh.rank == 0:
        export_hf(State(source.spec, found), target, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(dp=2, tp=4, zero=3),
                                    Layout(dp=4, replicate=2, zero=3)], ids=str)
def test_an_odd_vocabulary_comes_back_exactly(ranks: RankPool, folder: Path, tmp_path: Path,
                                              layout: Layout) -> None:
    """Names, shapes, types and bytes; no row of padding in between."""
    ranks.run(layout.world, resaved, folder, tmp_path / "again", layout)
    with (safe_open(folder / "model.safetensors", "pt") as before,
          safe_open(tmp_path / "again" / "model.safetensors", "pt") as after):
        assert set(before.keys()) == set(after.keys())
        assert after.get_tensor("model.embed_tokens.weight").shape == (331, D)
        for name in before.keys():  # noqa: SIM118  # not a dict
            a, b = before.get_tensor(name), after.get_tensor(name)
            assert a.dtype == b.dtype == torch.bfloat16
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name
