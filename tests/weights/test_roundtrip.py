"""Hugging Face -> Kilter's parameters -> Hugging Face gives the same bytes, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.export import State, export_hf
from kilter.weights.mappings import dense
from kilter.weights.safetensors import INDEX, SafetensorsFolder
from tests.weights import tiny


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", tiny.NAMES)
def test_round_trip_is_byte_identical_and_loads(name: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if tiny.NAMES.index(name) % 2 else torch.float32
    # One in three sources is sharded, and one in two exports.
    tiny.save(name, tmp_path / "src", dtype, "60KB" if len(name) % 3 == 0 else "5GB")
    source = open_model(tmp_path / "src")
    shard = 50_000 if len(name) % 2 else 5_000_000_000
    export_hf(source, tmp_path / "dst", max_shard_bytes=shard)
    assert_same_bytes(tensors_of(tmp_path / "src"), tensors_of(tmp_path / "dst"))
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "dst" / file).read_text()) == json.loads(
            (tmp_path / "src" / file).read_text())
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dst", dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "src", dtype=dtype)
    assert torch.equal(tiny.logits(loaded), tiny.logits(original))


@pytest.mark.parametrize("name", ["llama-tied-mqa-yarn", "gemma3-own-pattern"])
def test_state_in_memory_exports_with_a_composed_config(name: str, tmp_path: Path) -> None:
    """What a GGUF import and a training run need: config.json from the `ModelSpec` alone."""
    made = tiny.save(name, tmp_path / "src")
    source = open_model(tmp_path / "src")
    state = State(source.spec, {n: source.read(n) for n in source.names()})
    export_hf(state, tmp_path / "dst")
    assert_same_bytes(tensors_of(tmp_path / "src"), tensors_of(tmp_path / "dst"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert loaded.dtype == torch.float32
    assert torch.equal(tiny.logits(loaded), tiny.logits(made))
    assert open_model(tmp_path / "dst").spec == source.spec


def test_parameters_are_the_ones_the_decoder_has(tmp_path: Path) -> None:
    tiny.save("qwen3-biases", tmp_path)
    source = open_model(tmp_path)
    spec = source.spec
    shapes = {name: tuple(source.read(name).shape) for name in source.names()}
    assert shapes == {name: source.info(name).shape for name in source.names()}
    assert shapes["layers.1.attn.qkv.weight"] == (spec.qkv_rows, spec.hidden_size)
    assert shapes["layers.1.attn.qkv.bias"] == (spec.qkv_rows,)
    assert shapes["layers.0.mlp.gate_up.weight"] == (2 * spec.ffn_size, spec.hidden_size)
    assert "head.weight" not in shapes  # tied
    total = sum(source.info(name).nbytes for name in source.names())
    assert total == sum(t.nbytes for t in tensors_of(tmp_path).values())


def test_rows_of_a_parameter(tmp_path: Path) -> None:
    tiny.save("llama-biases-llama3", tmp_path, torch.bfloat16)
    source = open_model(tmp_path)
    for name in ("layers.0.attn.qkv.weight", "layers.0.attn.qkv.bias", "head.weight"):
        whole = dense(source.read(name))
        assert torch.equal(dense(source.read(name, slice(13, 45))), whole[13:45])
        assert dense(source.read(name, slice(0, 0))).shape == (0, *whole.shape[1:])


def test_a_shard_above_the_limit_gets_its_own_file_and_an_index(tmp_path: Path) -> None:
    tiny.save("llama-biases-llama3", tmp_path / "src")
    calls: list[tuple[int, int]] = []
    export_hf(open_model(tmp_path / "src"), tmp_path / "dst", max_shard_bytes=1,
              progress=lambda done, total: calls.append((done, total)))
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    tensors = tensors_of(tmp_path / "dst")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(set(index["weight_map"].values())) == len(calls) > 5
    assert calls[-1] == (index["metadata"]["total_size"],) * 2


def test_export_in_another_dtype(tmp_path: Path) -> None:
    tiny.save("qwen2-plain", tmp_path / "src")
    export_hf(open_model(tmp_path / "src"), tmp_path / "dst", dtype=torch.bfloat16)
    before, after = tensors_of(tmp_path / "src"), tensors_of(tmp_path / "dst")
    assert_same_bytes({n: t.bfloat16() for n, t in before.items()}, after)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype="auto"
                                                ).dtype == torch.bfloat16


def test_mixed_dtypes_survive(tmp_path: Path) -> None:
    """q in bf16 beside k in fp32 is fused in fp32 and comes out as it was, aligned to its size
    although biases of 41 bf16 numbers are around."""
    config = LlamaConfig(**tiny._base(intermediate_size=41, mlp_bias=True))
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    tensors = tensors_of(tmp_path / "src")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.bias"):
        tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    source = open_model(tmp_path / "src")
    assert dense(source.read("layers.1.attn.qkv.weight")).dtype == torch.float32
    export_hf(source, tmp_path / "dst")
    assert_same_bytes(tensors, tensors_of(tmp_path / "dst"))
    for entry in SafetensorsFolder(tmp_path / "dst").tensors.values():
        assert entry.offset % {"F32": 4, "BF16": 2}[entry.dtype] == 0


def test_a_stored_copy_of_the_tied_head_is_kept(tmp_path: Path) -> None:
    tiny.save("qwen2-window", tmp_path / "src")
    tensors = tensors_of(tmp_path / "src")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    export_hf(open_model(tmp_path / "src"), tmp_path / "dst")
    assert_same_bytes(tensors, tensors_of(tmp_path / "dst"))


def test_tokenizer_files_go_along_but_no_code_and_no_other_weights(tmp_path: Path) -> None:
    src = tmp_path / "src"
    tiny.save("qwen2-plain", src)
    for file in ("tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE", "evil.py",
                 "pytorch_model.bin", "training_args.pt"):
        (src / file).write_text(file)
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates" / "rag.jinja").write_text("rag")
    export_hf(open_model(src), tmp_path / "dst")
    files = {str(p.relative_to(tmp_path / "dst")) for p in (tmp_path / "dst").rglob("*")
             if p.is_file()}
    assert files == {"model.safetensors", "config.json", "generation_config.json",
                     "tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE",
                     "additional_chat_templates/rag.jinja"}


def test_a_destination_is_refused_replaced_or_untouched(tmp_path: Path) -> None:
    tiny.save("qwen2-plain", tmp_path / "src")
    source, dst = open_model(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    export_hf(source, dst)  # an empty folder is no obstacle
    (dst / "mine.txt").write_text("keep")
    with pytest.raises(WeightsError, match="already exists"):
        export_hf(source, dst)

    def interrupt(folder: Path) -> None:
        assert not (folder / "config.json").exists()  # a half folder is no model
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_hf(source, dst, overwrite=True, before_rename=interrupt)
    assert (dst / "mine.txt").read_text() == "keep"
    export_hf(source, dst, overwrite=True)
    assert not (dst / "mine.txt").exists() and (dst / "config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]


def test_a_state_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    tiny.save("qwen2-plain", tmp_path / "src")
    source = open_model(tmp_path / "src")
    tensors = {n: source.read(n) for n in source.names()} | {"extra": torch.zeros(1)}
    tensors["norm.weight"] = torch.zeros(3)
    del tensors["layers.1.mlp.down.weight"]
    with pytest.raises(WeightsError) as error:
        export_hf(State(source.spec, tensors), tmp_path / "dst")
    for part in ("layers.1.mlp.down.weight is missing", "extra is unexpected",
                 "norm.weight has shape [3] instead of [48]"):
        assert part in str(error.value)
    assert not (tmp_path / "dst").exists()
