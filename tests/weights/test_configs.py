"""config.json in every spelling gives the spec that transformers computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kilter.models.spec import ModelSpec, RopeSpec
from kilter.weights.errors import WeightsError
from kilter.weights.families import FAMILIES, gemma3
from tests.weights import tiny

transformers.logging.set_verbosity_error()


def saved(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """The config.json that transformers (5) writes for `config`."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def spelled_as_in_4(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config in the spelling of transformers 4."""
    raw = dict(raw)
    ropes = raw.pop("rope_parameters")
    if "full_attention" in ropes:
        raw["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    ropes = dict(ropes)
    raw["rope_theta"] = ropes.pop("rope_theta")
    raw["rope_scaling"] = None if ropes["rope_type"] == "default" else ropes
    if "dtype" in raw:
        raw["torch_dtype"] = raw.pop("dtype")
    return raw


def family(name: str) -> Any:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
                    "gemma3": "Gemma3"}[name.split("-")[0]]
    return FAMILIES[architecture + "ForCausalLM"]


def assert_describes(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """`spec` says what the config object of transformers says."""
    assert (spec.vocab_size, spec.hidden_size, spec.ffn_size) == (
        config.vocab_size, config.hidden_size, config.intermediate_size)
    assert (spec.num_heads, spec.num_kv_heads) == (
        config.num_attention_heads, config.num_key_value_heads)
    assert spec.head_dim == (getattr(config, "head_dim", None)
                             or config.hidden_size // config.num_attention_heads)
    assert spec.max_positions == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps and spec.tied_head == config.tie_word_embeddings
    types = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    ] * config.num_hidden_layers
    assert [layer.window for layer in spec.layers] == [
        config.sliding_window if t == "sliding_attention" else None for t in types]
    for layer, kind in zip(spec.layers, types, strict=True):
        nested = config.rope_parameters.get(kind)
        assert_same_rope(layer.rope, config, nested or config.rope_parameters,
                         kind if nested else None)


def assert_same_rope(rope: RopeSpec, config: PreTrainedConfig, theirs: dict[str, Any],
                     kind: str | None) -> None:
    assert rope.theta == theirs["rope_theta"]
    assert rope.scaling == theirs["rope_type"].replace("default", "none")
    if rope.scaling != "none":
        _, attention_factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu", layer_type=kind)
        assert rope.attention_factor == attention_factor
        assert rope.factor == theirs["factor"]
    if rope.scaling in ("llama3", "yarn"):
        assert rope.original_max_positions == theirs["original_max_position_embeddings"]
    if rope.scaling == "yarn":
        assert rope.beta_fast == (theirs.get("beta_fast") or 32)
        assert rope.truncate == theirs.get("truncate", True)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_both_spellings_give_what_transformers_computes_with(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]()
    raw = saved(config, tmp_path)
    spec = family(name).to_spec(raw)
    assert_describes(spec, config)
    assert family(name).to_spec(spelled_as_in_4(raw)) == spec


@pytest.mark.parametrize("name", tiny.NAMES)
def test_composed_configs_describe_the_same_model_to_transformers(name: str, tmp_path: Path
                                                                   ) -> None:
    spec = family(name).to_spec(saved(tiny.CONFIGS[name](), tmp_path))
    composed = family(name).to_config(spec) | {"model_type": family(name).model_type}
    (tmp_path / "config.json").write_text(json.dumps(composed))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert_describes(spec, theirs)
    # Numbers that the attention scale and the biases are made of:
    for field in ("attention_bias", "mlp_bias", "query_pre_attn_scalar"):
        if hasattr(tiny.CONFIGS[name](), field):
            assert getattr(theirs, field) == getattr(tiny.CONFIGS[name](), field)
    assert family(name).to_spec(composed) == spec
    assert family(name).to_spec(saved(theirs, tmp_path / "again")) == spec


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_fields_have_the_defaults_of_transformers(architecture: str, tmp_path: Path
                                                           ) -> None:
    """Published configs leave fields out (Gemma 3's text_config nearly all of them)."""
    needed = dict(vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=30,
                  num_attention_heads=32, model_type=FAMILIES[architecture].model_type)
    variants = [needed]
    if architecture == gemma3.ARCHITECTURE:
        variants = [{k: v for k, v in needed.items() if k in ("model_type", "num_hidden_layers")}]
    elif architecture != "MistralForCausalLM":  # where transformers refuses null
        variants.append(needed | {"num_key_value_heads": None})
    for raw in variants:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert_describes(FAMILIES[architecture].to_spec(raw), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_qwen_windows_without_layer_types(first: int, tmp_path: Path) -> None:
    raw = tiny._base(model_type="qwen2", use_sliding_window=True, sliding_window=5,
                     max_window_layers=first)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_describes(FAMILIES["Qwen2ForCausalLM"].to_spec(raw),
                     AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("scaling", [
    {"factor": 4.0}, {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8}, {"factor": 0.5},
    {"factor": 4.0, "mscale": 0.707}, {"factor": 40, "attention_factor": 1.25},
    {"factor": 4.0, "beta_fast": None, "beta_slow": 2}, {"factor": None}])
def test_yarn_attention_factor(scaling: dict[str, Any], tmp_path: Path) -> None:
    raw = tiny._base(num_attention_heads=6, model_type="llama", rope_theta=1e4, rope_scaling={
        "type": "yarn", "original_max_position_embeddings": 64, **scaling})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(tmp_path)
    rope = FAMILIES["LlamaForCausalLM"].to_spec(raw).layers[0].rope
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    assert rope.attention_factor == attention_factor
    assert (rope.beta_fast, rope.beta_slow) == (32, scaling.get("beta_slow", 1))
    assert rope.factor == (scaling["factor"] or 256 / 64)


def test_everything_unsupported_is_listed_at_once() -> None:
    raw = tiny._base(hidden_act="relu", partial_rotary_factor=0.5, final_logit_softcapping=30.0,
                     rope_scaling={"rope_type": "longrope", "factor": 2.0}, hidden_size="48",
                     quantization_config={"quant_method": "gptq"}, num_hidden_layers=0,
                     layer_types=["chunked_attention"])
    del raw["intermediate_size"]
    with pytest.raises(WeightsError) as error:
        FAMILIES["Qwen2ForCausalLM"].to_spec(raw)
    for part in ("There are 9 problems", "hidden_act is 'relu'", "partial_rotary_factor is 0.5",
                 "final_logit_softcapping is 30.0", "rope type is 'longrope'",
                 "default, linear, llama3 and yarn", "hidden_size is '48'", "gptq",
                 "num_hidden_layers is 0", "intermediate_size is missing", "chunked_attention"):
        assert part in str(error.value), part


@pytest.mark.parametrize(("architecture", "change", "said"), [
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {}}}, "one flat object"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ("LlamaForCausalLM", {"head_dim": None, "hidden_size": 50}, "not a multiple"),
    ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "must be true or false"),
    ("MistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "one window"),
    ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is off"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "one for full_attention"),
    ("LlamaForCausalLM", {"num_key_value_heads": 4}, "not a multiple of num_kv_heads"),
])
def test_unsupported_configs(architecture: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FAMILIES[architecture].to_spec(tiny._base(**change))
