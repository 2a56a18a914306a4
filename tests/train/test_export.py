"""The finished model: streamed, the same bytes from every layout, and whole or as it was before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bench.parity import tiny as tiny_spec
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.parallel.apply import Spread, apply
from kilter.train import export
from kilter.train.export import export_model, whole_parameters
from kilter.train.inputs import Start
from kilter.train.lora import LoraConfig, merge
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.mappings import dense
from kilter.weights.safetensors import INDEX
from tests.ranks import RankError, RankPool
from tests.train.data.tiny import chat_tokenizer
from tests.train.test_checkpoint import no_file_above
from tests.train.test_lora import DORA, LORA, decoder, random_adapters
from tests.weights import tiny

LAYOUTS = {"one": Layout(), "tp2": Layout(tp=2), "pp2 dp2": Layout(pp=2, dp=2, zero=1),
           "fsdp3": Layout(dp=3, zero=3), "tp2 fsdp2": Layout(tp=2, dp=2, zero=3)}


def spread_of(layout: Layout, source: Any, lora: LoraConfig | None, dtype: torch.dtype) -> Spread:
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    spread = apply(decoder(source.spec, lora), mesh, weights=dtype)
    spread.load(source)
    if lora is not None:
        spread.fill(random_adapters(spread))
    return spread


def export_as(folder: str, layout: Layout, lora: LoraConfig | None = None,
              dtype: torch.dtype = torch.float32, shard: int = 1 << 30) -> None:
    """Exports the model in ``source`` as a rank of a layout."""
    source = open_model(Path(folder) / "source")
    export_model(spread_of(layout, source, lora, dtype),
                 Start(source.spec, source, chat_tokenizer(), source.folder),
                 Path(folder) / "out", dtype, lora=lora, base="base", max_shard_bytes=shard)


def run(ranks: RankPool, function: Callable[..., Any], folder: Path, layout: Layout, *args: Any
        ) -> list[Any]:
    if layout.world == 1:
        return [function(str(folder), layout, *args)]
    return ranks.run(layout.world, function, str(folder), layout, *args)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("kind", "layout"), [
    ("llama-tied-mqa-yarn", "tp2"), ("qwen2-plain", "pp2 dp2"), ("qwen3-biases", "fsdp3")])
def test_what_comes_in_goes_out_the_same(kind: str, layout: str, tmp_path: Path, ranks: RankPool
                                         ) -> None:
    """Cases 8 and 24: an odd vocabulary, heads that are tied and not; names, shapes and bytes are
    those that transformers wrote."""
    made = tiny.save(kind, tmp_path / "source").eval()
    run(ranks, export_as, tmp_path, LAYOUTS[layout], None, torch.float32, 20_000)
    place = tmp_path / "out" / "model"
    index = json.loads((place / INDEX).read_text())["weight_map"]
    assert sorted(set(index.values())) == sorted(path.name for path in place.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in set(index.values()):
        held = load_file(place / file)
        assert held.keys() == {name for name, where in index.items() if where == file}
        assert sum(t.nbytes for t in held.values()) <= 20_000 or len(held) <= 3  # fused ones
        found |= held
    wanted = load_file(tmp_path / "source" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found_model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True)
    loaded, notes = found_model
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert torch.equal(tiny.logits(loaded.eval()), tiny.logits(made))


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
def test_every_layout_merges_to_the_same_bytes(lora: LoraConfig, tmp_path: Path, ranks: RankPool
                                               ) -> None:
    """Case 25. The sum is one of the rounded matrix, which is what was trained with."""
    tiny.save("qwen2-plain", tmp_path / "source")
    dtype = torch.bfloat16
    seen = []
    for layout in ("one", "tp2 fsdp2", "pp2 dp2"):
        run(ranks, export_as, tmp_path, LAYOUTS[layout], lora, dtype)
        seen.append(bytes_of(tmp_path / "out"))
    assert seen[0].keys() == seen[1].keys() == seen[2].keys()
    assert seen[0] == seen[1] == seen[2]
    assert {"adapter/adapter_config.json", "model/config.json"} < seen[0].keys()
    source = open_model(tmp_path / "source")
    spread = spread_of(Layout(), source, lora, dtype)
    whole = {name: value for name, value in whole_parameters(spread) if value is not None}
    rounded = {name: value.to(dtype).float() if value.dim() == 2 and ".adapter." not in name
               else value for name, value in whole.items()}
    merged = merge(source.spec, lora, rounded)
    out = open_model(tmp_path / "out" / "model")
    for name, value in merged.items():
        wanted = value.to(dtype) if value.dim() == 2 else value
        assert torch.equal(dense(out.read(name)), wanted), name


class Counted:
    """Bytes of whole parameters on this rank that are alive when another one is asked for."""

    def __init__(self) -> None:
        self.peak = self.asked = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def note(self, whole: Tensor | None) -> None:
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]
        if whole is not None:
            self._alive.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
            self.asked += 1
        self.peak = max(self.peak, sum(size for _, size in self._alive))


def counted_export(folder: str, layout: Layout, lora: LoraConfig | None) -> tuple[int, int]:
    counted = Counted()
    meet = export._Desk.meet

    def met(self: Any, name: str) -> Tensor | None:
        counted.note(None)
        whole = meet(self, name)
        counted.note(whole)
        return whole

    spec = tiny_spec(True, layers=8)
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    spread = apply(decoder(spec, lora), mesh)
    spread.initialise(seed=1)
    if lora is not None:
        spread.fill(random_adapters(spread))
    with mock.patch.object(export._Desk, "meet", met):
        export_model(spread, Start(spec, None, chat_tokenizer(), None), Path(folder),
                     torch.float32, lora=lora)
    return counted.asked, counted.peak


@pytest.mark.parametrize(("layout", "lora"), [("one", None), ("tp2", None), ("tp2", DORA)],
                         ids=["one", "tp2", "tp2 dora"])
def test_rank_0_holds_one_parameter_at_a_time(layout: str, lora: LoraConfig | None, tmp_path: Path,
                                              ranks: RankPool) -> None:
    found = run(ranks, counted_export, tmp_path, LAYOUTS[layout], lora)
    spec = tiny_spec(True)
    embedding = spec.vocab_size * spec.hidden_size * 4
    model = sum(path.stat().st_size for path in tmp_path.glob("model/*.safetensors"))
    assert model > 5 * embedding
    assert found[0][0] > 8 * 6 and found[0][1] == embedding  # the largest parameter, alone
    assert all(peak == 0 for _, peak in found[1:])


def full(folder: str, layout: Layout, lora: LoraConfig | None) -> str:
    """The disk is full on the rank that writes."""
    with no_file_above(30_000), pytest.raises(WeightsError) as error:
        export_as(folder, layout, lora)
    return str(error.value)


@pytest.mark.parametrize(("layout", "lora"), [("one", LORA), ("tp2", None)], ids=["one", "tp2"])
def test_a_full_disk_leaves_what_was_there(layout: str, lora: LoraConfig | None, tmp_path: Path,
                                           ranks: RankPool) -> None:
    tiny.save("qwen2-plain", tmp_path / "source")
    run(ranks, export_as, tmp_path, LAYOUTS[layout], lora)
    before = bytes_of(tmp_path / "out")
    marked = tmp_path / "out" / "model" / "mine.txt"
    marked.write_text("of the first one")
    said = run(ranks, full, tmp_path, LAYOUTS[layout], lora)
    assert len(set(said)) == 1  # on every rank
    assert f"{tmp_path / 'out' / 'model'} could not be written: File too large" in said[0]
    assert "checkpoints are whole: the same command exports again" in said[0]
    assert bytes_of(tmp_path / "out") == before | {"model/mine.txt": b"of the first one"}
    run(ranks, export_as, tmp_path, LAYOUTS[layout], lora)
    assert bytes_of(tmp_path / "out") == before


def killed(folder: str, layout: Layout) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch("kilter.weights.export._carry_files", die):
        export_as(folder, layout)


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path, ranks: RankPool) -> None:
    tiny.save("qwen2-plain", tmp_path / "source")
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.run(1, killed, str(tmp_path), Layout())
    (left,) = (tmp_path / "out").iterdir()
    assert left.name.startswith(".model.partial-")
    export_as(str(tmp_path), Layout())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_an_adapter_of_the_model_that_was_started_from_stays_behind(tmp_path: Path) -> None:
    """transformers would load it over the weights."""
    tiny.save("qwen2-plain", tmp_path / "source")
    for name in ("adapter_config.json", "consolidated.safetensors.index.json", "more.json"):
        (tmp_path / "source" / name).write_text("{}")
    export_as(str(tmp_path), Layout())
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert "more.json" in names
    assert not names & {"adapter_config.json", "consolidated.safetensors.index.json"}
    with safe_open(tmp_path / "out" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
