"""`kilter inspect`: its figures against published ones, torch's FLOP counter and brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kilter.cli import main
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.ops.packed import pack
from kilter.verbs.inspect import layer_kinds, spec_facts
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.decoder import decoder_mappings, hugging_face
from tests.models import tiny


def spec_of(layers: int | tuple[LayerSpec, ...], hidden: int, heads: int, kv_heads: int, ffn: int,
            vocab: int, **other: Any) -> ModelSpec:
    if isinstance(layers, int):
        layers = (LayerSpec(RopeSpec()),) * layers
    return ModelSpec("LlamaForCausalLM", vocab, hidden, ffn, heads, kv_heads, hidden // heads,
                     layers, max_positions=8192, **other)


def facts_of(spec: ModelSpec, context: int | None = None) -> dict[str, Any]:
    shapes = {m.name: m.shape for m in decoder_mappings(spec, hugging_face(spec))}
    return spec_facts(spec, shapes, context)


# Parameters and embedding parameters as published (the totals of the safetensors files), and
# bytes of the KV cache per token in 16 bits: 2 · layers · KV heads · head_dim · 2.
PUBLISHED = {
    "smollm2-135m": (spec_of(30, 576, 9, 3, 1536, 49152, tied_head=True),
                     134_515_008, 28_311_552, 23_040),
    "llama-2-7b": (spec_of(32, 4096, 32, 32, 11008, 32000), 6_738_415_616, 131_072_000, 524_288),
    "llama-2-70b": (spec_of(80, 8192, 64, 8, 28672, 32000),
                    68_976_648_192, 262_144_000, 327_680),
    "llama-3.1-8b": (spec_of(32, 4096, 32, 8, 14336, 128256),
                     8_030_261_248, 525_336_576, 131_072),
    "llama-3.1-405b": (spec_of(126, 16384, 128, 8, 53248, 128256),
                       405_853_388_800, 2_101_346_304, 516_096),
    "qwen2.5-7b": (spec_of(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
                   7_615_616_512, 544_997_376, 57_344),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    spec, total, embedding, kv_bytes = PUBLISHED[name]
    facts = facts_of(spec)
    parts = facts["parameters"]
    assert parts["total"] == total
    assert parts["embedding"] == embedding
    assert parts["head"] == (0 if spec.tied_head else embedding)
    assert sum(parts.values()) == 2 * total
    assert facts["kv_bytes_per_token"] == {"fp32": 2 * kv_bytes, "16-bit": kv_bytes}


def test_parts_of_smollm2_by_hand() -> None:
    assert facts_of(PUBLISHED["smollm2-135m"][0])["parameters"] == {
        "embedding": 49152 * 576,
        "attention": 30 * (576 * (9 + 3 + 3) * 64 + 9 * 64 * 576),
        "mlp": 30 * 3 * 576 * 1536,
        "norms": (2 * 30 + 1) * 576,
        "head": 0,
        "total": 134_515_008,
    }


def test_bytes_by_hand() -> None:
    """A test below compares them with what the packer really allocates."""
    norms = (2 * 30 + 1) * 576
    matrices = 134_515_008 - norms
    assert facts_of(PUBLISHED["smollm2-135m"][0])["bytes"] == {
        "fp32": 4 * 134_515_008, "bf16": 2 * matrices + 4 * norms,
        "int8": matrices + matrices // 32 * 2 + 4 * norms,
        "int4": matrices // 2 + matrices // 32 * 4 + 4 * norms}


@pytest.mark.parametrize("name", ["llama-linear-biases", "mistral-no-window", "qwen2-tied-mqa",
                                  "qwen3-plain", "gemma3-mqa-tied"])
def test_parameters_and_flops_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Eager attention multiplies every token with every other, which is what each token costs
    that sees them all; windows only mask there, so they are widened here."""
    oracle = tiny.make(name, tmp_path)
    source = open_model(tmp_path)
    infos = [source.info(n) for n in source.names()]
    shapes = {info.name: info.shape for info in infos}
    wide = [LayerSpec(layer.rope) for layer in source.spec.layers]
    spec = ModelSpec(**{**vars(source.spec), "layers": tuple(wide)})
    tokens = 13
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        oracle(torch.zeros(1, tokens, dtype=torch.int64))
    facts = spec_facts(spec, shapes, context=tokens)
    assert facts["parameters"]["total"] == sum(p.numel() for p in oracle.parameters())
    assert facts["flops_per_token"]["total"] * tokens == counter.get_total_flops()
    assert sum(info.nbytes for info in infos) == 4 * facts["parameters"]["total"]


def test_bytes_are_those_of_packed_weights() -> None:
    spec = spec_of(2, 64, 4, 2, 96, 160)  # sizes of whole panels: no padding
    shapes = {m.name: m.shape for m in decoder_mappings(spec, hugging_face(spec))}
    for storage, nbytes in spec_facts(spec, shapes)["bytes"].items():
        assert nbytes == sum(pack(torch.zeros(shape), storage).nbytes if len(shape) == 2
                             else 4 * shape[0] for shape in shapes.values())


def test_windows_limit_attention_and_the_cache() -> None:
    local, everything = LayerSpec(RopeSpec(), window=512), LayerSpec(RopeSpec(theta=1e6))
    spec = spec_of((*[local] * 5, everything), 64, 4, 1, 128, 100)
    for context in (1, 511, 512, 513, 4096):
        facts = facts_of(spec, context)
        seen = sum(1 for layer in spec.layers for k in range(context)
                   if layer.window is None or context - 1 - k < layer.window)
        assert facts["flops_per_token"]["attention"] == 4 * 4 * 16 * seen
        assert facts["kv_bytes_inside_windows"]["fp32"] == 2 * 16 * 4 * seen
        assert facts["kv_bytes_at_context"]["fp32"] == 2 * 16 * 4 * 6 * context


def test_layers_of_a_kind_are_listed_together() -> None:
    local, everything = LayerSpec(RopeSpec(), window=512), LayerSpec(RopeSpec(theta=1e6))
    spec = spec_of((everything, *[local] * 5, everything, local), 64, 4, 1, 128, 100)
    assert layer_kinds(spec) == {everything: "0, 6", local: "1-5, 7"}


@pytest.mark.parametrize("context", [0, -1, 8193])
def test_a_context_the_model_does_not_have_is_an_error(context: int) -> None:
    with pytest.raises(ValueError, match=f"--context is {context}; this model takes 1 to 8192"):
        facts_of(PUBLISHED["llama-2-7b"][0], context)


def test_the_command_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    oracle = tiny.make("llama-mqa-wide-head", tmp_path)

    def read(*_: object) -> None:
        raise AssertionError("inspect read a weight")

    monkeypatch.setattr(ModelSource, "read", read)
    assert main(["inspect", str(tmp_path), "--json", "--context", "7"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == sum(p.numel() for p in oracle.parameters())
    assert facts["bytes"]["in the file"] == facts["bytes"]["fp32"]
    assert facts["context"] == 7
    assert main(["inspect", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert f"{facts['parameters']['total']:,}" in page and "0-2     all     theta 10,000" in page


def test_a_reward_model_has_a_value_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                         ) -> None:
    """Tied or not, its embedding is multiplied with nothing."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    oracle = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_labels=1, pad_token_id=0,
        tie_word_embeddings=True, attn_implementation="eager"))
    oracle.save_pretrained(tmp_path)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        oracle(torch.ones(1, 5, dtype=torch.int64))
    assert main(["inspect", str(tmp_path), "--json", "--context", "5"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForSequenceClassification"
    assert facts["parameters"]["total"] == sum(p.numel() for p in oracle.parameters())
    assert facts["parameters"]["head"] == 32
    assert facts["flops_per_token"]["total"] * 5 == counter.get_total_flops()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "context 2048, a value head, which scores texts" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                        ) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for target in ("x.gguf", "empty", "missing"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main(["inspect", str(tmp_path / target)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("kilter: error: ") and target in err
        assert "Traceback" not in err and err.count("\n") == 1


def test_the_real_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2-135m", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == 134_515_008
    # Q4_1 holds 32 weights in 20 bytes, Q8_0 in 34.
    norms, embedding = (2 * 30 + 1) * 576, 49152 * 576
    assert facts["bytes"]["in the file"] == (
        (134_515_008 - norms - embedding) // 32 * 20 + embedding // 32 * 34 + 4 * norms)
    assert facts["stored_as"] == {"Q8_0": 1, "F32": 61, "Q4_1": 120}
