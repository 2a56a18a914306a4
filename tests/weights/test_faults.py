"""Broken model folders and files give one full error that names every fault."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.gguf import GGUFFile
from kilter.weights.safetensors import INDEX, SafetensorsFolder
from tests.weights import gguf_files, tiny


def failure(path: Path) -> str:
    with pytest.raises(WeightsError) as error:
        open_model(path)
    message = str(error.value)
    assert str(path) in message
    return message


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save("llama-tied-mqa-yarn", tmp_path)
    return tmp_path


def test_deleted_renamed_and_reshaped_tensors_are_listed_together(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        q = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        tensors["model.layers.0.self_attn.query.weight"] = q
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name][:-1]
        tensors["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(40, 48, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    change(folder, edit)
    message = failure(folder)
    for part in ("There are 5 problems", "model.norm.weight [48] is missing.",
                 "model.layers.0.self_attn.q_proj.weight [96, 48] is missing.",
                 "model.layers.0.self_attn.query.weight [96, 48] is unexpected",
                 "model.layers.1.mlp.up_proj.weight has shape [39, 48] but the config asks for "
                 "[40, 48]", "gate_proj.weight has type I8"):
        assert part in message, message


def test_computed_buffers_are_ignored_and_said(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    (note,) = open_model(folder).notes
    assert name in note


def test_a_tied_head_that_differs(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][98, 47] += 1

    change(folder, edit)
    assert "lm_head.weight differs from model.embed_tokens.weight" in failure(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_cut_safetensors(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    message = failure(folder)
    assert "model.safetensors has" in message and "cut" in message
    assert f"{len(data[:keep]):,} bytes" in message
    if keep == -1:
        assert f"describes {len(data):,}" in message


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_a_header_escapes_as_another_error(data: st.DataObject) -> None:
    """Any bytes in the header: a clear error, or still a valid file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"a": torch.zeros(3, 5), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, 150))
            raw[at] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        try:
            opened = SafetensorsFolder(Path(folder))
        except WeightsError:
            return
        for name in opened.tensors:
            opened.read(name)


def test_config_faults(folder: Path) -> None:
    edit_config(folder, architectures=["FalconForCausalLM"])
    message = failure(folder)
    assert "FalconForCausalLM" in message and "LlamaForCausalLM, MistralForCausalLM" in message
    edit_config(folder, architectures=None)
    assert "exactly one" in failure(folder)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in failure(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in failure(folder)


def test_places_without_a_model(tmp_path: Path) -> None:
    assert "does not exist" in failure(tmp_path / "nowhere")
    assert "holds no model" in failure(tmp_path)
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert f"{tmp_path / 'run' / 'model'} is what a run wrote" in failure(tmp_path / "run")
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    assert "it holds adapters" in failure(tmp_path / "run")
    (tmp_path / "x.bin").write_text("x")
    assert "not a .gguf file" in failure(tmp_path / "x.bin")
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "2 GGUF files" in failure(tmp_path)


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = failure(folder)
    assert "pytorch_model.bin" in message and "Convert the model to safetensors" in message


def test_eos_ids(folder: Path) -> None:
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 5, 7]}))
    assert open_model(folder).eos_token_ids == (7, 5)
    generation.unlink()
    assert open_model(folder).eos_token_ids == (2,)
    edit_config(folder, eos_token_id=None)
    assert open_model(folder).eos_token_ids == ()
    edit_config(folder, eos_token_id="</s>")
    with pytest.raises(WeightsError, match=r"eos_token_id in config\.json is '</s>'"):
        open_model(folder)


def test_index_faults_are_listed_together(tmp_path: Path) -> None:
    tiny.save("qwen3-plain", tmp_path, shard="40KB")
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2

    def write(weight_map: Any) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    good = index["weight_map"]
    # A file with several tensors first, so that one can go.
    files.sort(key=lambda file: -list(good.values()).count(file))
    moved = next(n for n, f in good.items() if f == files[0])
    write(good | {moved: files[1], "ghost.weight": files[0]})
    message = failure(tmp_path)
    assert f"{files[1]} holds the tensor {moved}, but it is in {files[0]}." in message
    assert f"{files[0]} holds the tensor ghost.weight, but it is in no shard." in message
    write({n: f for n, f in good.items() if n != moved})
    assert f"{files[0]} holds the tensor {moved}, which {INDEX} does not name" in failure(tmp_path)
    write(good | {moved: "../secret.safetensors", "other": "absent.safetensors"})
    message = failure(tmp_path)
    assert "'../secret.safetensors', which is not a plain file name" in message
    assert "absent.safetensors, which is missing" in message
    write(["not a map"])
    assert "not a JSON object with a weight_map" in failure(tmp_path)
    write(good)
    tensors = load_file(tmp_path / files[0]) | load_file(tmp_path / files[1])
    save_file(tensors, tmp_path / files[0])
    low, high = sorted(files[:2])
    assert f"is in both {low} and {high}" in failure(tmp_path)
    (tmp_path / INDEX).unlink()
    assert f"no {INDEX}" in failure(tmp_path)


def test_the_text_half_of_a_multimodal_gemma(tmp_path: Path) -> None:
    """In both spellings of its tensor names; the export is a plain Gemma 3 text model."""
    from transformers import AutoModelForCausalLM

    from kilter.weights.export import export_hf

    made = tiny.save("gemma3-default-pattern", tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    text = open_model(tmp_path / "text")
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": config, "vision_config": {}}))
        tensors = load_file(tmp_path / "text" / "model.safetensors")
        tensors = {n.replace("model.", prefix, 1): t for n, t in tensors.items()}
        tower = ("model." if prefix.startswith("model") else "") + "vision_tower.x"
        save_file(tensors | {tower: torch.zeros(3)}, folder / "model.safetensors")
        source = open_model(folder)
        assert source.spec == text.spec
        assert "vision half (1 tensors) is left out" in source.notes[0]
        export_hf(source, folder / "dst")
        loaded = AutoModelForCausalLM.from_pretrained(folder / "dst")
        assert torch.equal(tiny.logits(loaded), tiny.logits(made))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    gguf_files.write(tiny.model("qwen2-plain"), path)
    return path.read_bytes()


@pytest.mark.parametrize(("keep", "said"), [
    (0, "too short"), (23, "too short"), (400, "ends inside its header"),
    (1500, "ends inside its header"), (-1, "is cut")])
def test_cut_gguf(gguf_bytes: bytes, tmp_path: Path, keep: int, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes[:keep])
    message = failure(path)
    assert said in message
    if keep == -1:
        assert f"need {len(gguf_bytes):,} bytes but the file has {len(gguf_bytes) - 1:,}" in message


def test_gguf_magic_and_version(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for head, said in ((b"GGML", "not a GGUF file"), (b"GGUF" + struct.pack("<I", 1), "version 1"),
                       (b"GGUF" + struct.pack(">I", 3), "big-endian")):
        path.write_bytes(head + gguf_bytes[len(head):])
        assert said in failure(path)


def test_a_gguf_string_longer_than_any_file(gguf_bytes: bytes, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.tokens"
    first = gguf_bytes.index(key) + len(key) + 16  # after the types and the number of strings
    damaged = struct.pack("<Q", 2**64 - 1)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes[:first] + damaged + gguf_bytes[first + 8:])
    assert "ends inside its header" in failure(tmp_path / "m.gguf")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_gguf_header_escapes_as_another_error(
        gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    raw = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
        dict(file.metadata)
        for name in file.tensors:
            file.read(name)
    except WeightsError:
        pass
