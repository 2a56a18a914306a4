"""GGUF files of every family become the spec, the weights and the export of their model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kilter.models.spec import ModelSpec
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.export import export_hf
from kilter.weights.gguf import GGUFFile
from kilter.weights.mappings import dense
from tests.weights import gguf_files, tiny
from tests.weights.test_roundtrip import tensors_of

MODELS = ["llama-biases-llama3", "llama-tied-mqa-yarn", "mistral-window", "mistral-no-window",
          "qwen2-plain", "qwen3-plain", "gemma3-default-pattern"]


def comparable(spec: ModelSpec) -> ModelSpec:
    """Without the class name: a GGUF llama without window may have been a Mistral."""
    return replace(spec, architecture="")


@pytest.mark.parametrize("name", MODELS)
def test_gguf_describes_and_holds_the_same_model(name: str, tmp_path: Path) -> None:
    made = tiny.save(name, tmp_path / "hf")
    if name.startswith("llama-biases"):  # GGUF cannot say where Llama 3's scaling starts: 8192
        made.config.rope_parameters["original_max_position_embeddings"] = 8192
        made.config.save_pretrained(tmp_path / "hf")
    if name.startswith("gemma3"):  # GGUF has no key for it, llama.cpp takes head_dim
        made.config.query_pre_attn_scalar = made.config.head_dim
        made.config.save_pretrained(tmp_path / "hf")
    gguf_files.write(made, tmp_path / "m.gguf")
    ours, theirs = open_model(tmp_path / "m.gguf"), open_model(tmp_path / "hf")
    assert comparable(ours.spec) == comparable(theirs.spec)
    assert ours.names() == theirs.names() and ours.eos_token_ids == (2,)
    for parameter in ours.names():
        a, b = dense(ours.read(parameter)), dense(theirs.read(parameter))
        if ours.spec.norm_zero_centred and "norm" in parameter:
            torch.testing.assert_close(a, b, rtol=0, atol=2**-24)  # stored as fp32(1 + w)
            assert torch.equal(1 + a, 1 + b)
        else:
            assert torch.equal(a, b), parameter


@pytest.mark.parametrize("name", ["llama-tied-mqa-yarn", "qwen2-plain", "qwen3-plain",
                                  "gemma3-default-pattern"])
def test_exported_gguf_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    made = tiny.model(name)
    if name.startswith("gemma3"):
        made.config.query_pre_attn_scalar = made.config.head_dim
        made = type(made)(made.config)
        made.load_state_dict(tiny.model(name).state_dict())
    gguf_files.write(made.eval(), tmp_path / "m.gguf")
    export_hf(open_model(tmp_path / "m.gguf"), tmp_path / "dst")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst",
                                                        output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is type(made)
    torch.testing.assert_close(tiny.logits(loaded), tiny.logits(made), rtol=0, atol=2e-6)
    assert loaded.generation_config.eos_token_id == 2 == loaded.config.eos_token_id


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_export_equals_the_reference_dequantisation(quant: str, tmp_path: Path) -> None:
    """Through the fused and permuted parameters, and back out under Hugging Face names."""
    config = LlamaConfig(vocab_size=70, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    expected = gguf_files.write(made, tmp_path / "m.gguf", quant=quant)
    export_hf(open_model(tmp_path / "m.gguf"), tmp_path / "dst")
    found = tensors_of(tmp_path / "dst")
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(found[tensor].float().numpy(), values)
        plain = quant if quant in ("F16", "BF16") and values.ndim == 2 else "F32"
        assert found[tensor].dtype == {"F16": torch.float16, "BF16": torch.bfloat16,
                                       "F32": torch.float32}[plain]


def test_transformers_reads_the_same_llama_tensors(tmp_path: Path) -> None:
    """Its own GGUF loader undoes the row order independently."""
    config = LlamaConfig(vocab_size=3, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2)
    made = LlamaForCausalLM(config)
    gguf_files.write(made, tmp_path / "m.gguf", extra={"llama.rope.dimension_count": 16,
                                                       "llama.vocab_size": 3})
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True,
                                  model_to_load=made)["tensors"]
    export_hf(open_model(tmp_path / "m.gguf"), tmp_path / "dst")
    for name, tensor in tensors_of(tmp_path / "dst").items():
        assert torch.equal(tensor, theirs[name]), name


def test_rows_of_quantised_and_permuted_parameters(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=70, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    gguf_files.write(LlamaForCausalLM(config), tmp_path / "m.gguf", quant="Q4_1")
    source = open_model(tmp_path / "m.gguf")
    for name in ("layers.0.attn.qkv.weight", "layers.0.mlp.gate_up.weight", "embed.weight"):
        whole = dense(source.read(name))
        for rows in (slice(0, 5), slice(13, 61), slice(60, None), slice(7, 7)):
            assert torch.equal(dense(source.read(name, rows)), whole[rows])


def test_metadata_agrees_with_the_library(tmp_path: Path) -> None:
    values = {"a.string": "né", "a.bool": True, "an.int": -5, "a.float": 1.5,
              "strings": ["x", "", "yz"], "ints": [1, 2, 3], "floats": [0.5, 2.0]}
    gguf_files.write(tiny.model("qwen2-plain"), tmp_path / "m.gguf", extra=values)
    file = GGUFFile(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(file.metadata) == theirs
    assert {k: file.metadata[k] for k in values} == values
    assert {t.name: (tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
            for t in reader.tensors} == {
                t.name: (t.shape, t.offset, t.nbytes) for t in file.tensors.values()}


def test_linear_scaling_of_gemma_is_for_its_global_layers(tmp_path: Path) -> None:
    gguf_files.write(tiny.model("gemma3-default-pattern"), tmp_path / "m.gguf", extra={
        "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0,
        "gemma3.attention.sliding_window_pattern": 3, "gemma3.rope.freq_base_swa": 5000.0})
    layers = open_model(tmp_path / "m.gguf").spec.layers
    assert [layer.window for layer in layers] == [5, 5, None, 5, 5, None, 5]
    assert (layers[0].rope.scaling, layers[0].rope.theta) == ("none", 5000.0)
    assert (layers[2].rope.scaling, layers[2].rope.factor) == ("linear", 8.0)


@pytest.mark.parametrize(("extra", "said"), [
    ({"llama.expert_count": 8}, "expert_count is 8"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8 but heads have 16"),
    ({"llama.logit_scale": 0.25}, "logit_scale is 0.25"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
     "rope.scaling.original_context_length is missing"),
])
def test_headers_that_ask_for_something_else_are_refused(
        extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = LlamaConfig(**tiny._base(vocab_size=3))
    gguf_files.write(LlamaForCausalLM(config), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(WeightsError, match=said):
        open_model(tmp_path / "m.gguf")


def test_unknown_frequency_tables_are_refused(tmp_path: Path) -> None:
    made = tiny.model("llama-biases-llama3")
    made.config.rope_parameters |= {"high_freq_factor": 1.5,
                                    "original_max_position_embeddings": 8192}
    gguf_files.write(made, tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match="not Llama 3's scaling"):
        open_model(tmp_path / "m.gguf")


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match="'falcon'; Kilter supports llama, qwen2, qwen3, gemma3"):
        open_model(tmp_path / "m.gguf")
