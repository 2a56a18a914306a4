"""Folders of PEFT: the same function, gradients and bytes; merged models; what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread, apply
from kilter.train.lora import LoraConfig, merge
from kilter.train.peft import CONFIG, WEIGHTS, read_peft, write_peft
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.export import State, export_hf
from tests.train.test_lora import LORA, decoder
from tests.weights import tiny

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = [i * 7 % 99 for i in range(20)]

# PEFT's own settings, and a model of each family; all with grouped queries or biases.
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama-biases-llama3", {"target_modules": ALL}),
    "dora": ("llama-biases-llama3", {"target_modules": ALL, "use_dora": True}),
    "rslora q v": ("qwen2-plain", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "dora k up o": ("qwen3-plain", {"target_modules": ["k_proj", "up_proj", "o_proj"],
                                    "use_dora": True}),
    "gemma": ("gemma3-default-pattern", {"target_modules": ALL, "lora_dropout": 0.1}),
}


def trained_by_peft(name: str, folder: Path) -> tuple[peft.PeftModel, Path]:
    """A model of transformers with random adapters, and where both are."""
    kind, settings = FOLDERS[name]
    base = tiny.save(kind, folder / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            noise = torch.randn_like(parameter) * 0.2
            parameter.data = noise if parameter.dim() == 2 else parameter.data + noise
    model.save_pretrained(folder / "adapter")
    return model.eval(), folder / "adapter"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def read_into(folder: Path, adapter: Path) -> tuple[Spread, LoraConfig, dict[str, Tensor]]:
    source = open_model(folder)
    found = read_peft(adapter, source.spec)
    spread = apply(decoder(source.spec, found.config), Mesh.single())
    spread.load(source)
    spread.fill(found.tensors)
    return spread, found.config, found.tensors


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_peft_means_the_same_here(tmp_path: Path, name: str) -> None:
    theirs, folder = trained_by_peft(name, tmp_path)
    spread, config, tensors = read_into(tmp_path / "base", folder)
    batch = Batch.of([TOKENS])
    with torch.no_grad():
        assert (spread.model(batch) - logits(theirs)).abs().max() < 1e-4

    targets = torch.tensor([*TOKENS[1:], -100])
    spread.backward_all([batch], lambda forward, _: forward(batch, targets).sum(),
                        lambda _: nullcontext())
    spread.finish()
    chosen = theirs(torch.tensor([TOKENS])).logits[0].log_softmax(-1)[:-1].gather(
        1, targets[:-1, None])
    chosen.sum().backward()
    wanted = {key.replace(".default", "").removesuffix(".weight"): p.grad
              for key, p in theirs.named_parameters() if "lora_" in key}
    assert {h.name for h in spread.held} == set(tensors)
    for held in spread.held:
        _, layer, block, _, _, projection, leaf = held.name.split(".")
        key = (f"base_model.model.model.layers.{layer}.{block.replace('attn', 'self_attn')}."
               f"{projection}.") + {"lora_a": "lora_A", "lora_b": "lora_B",
                                    "magnitude": "lora_magnitude_vector"}[leaf]
        torch.testing.assert_close(held.tensor.grad, wanted.pop(key), rtol=1e-3, atol=2e-4)
    assert not wanted

    write_peft(tmp_path / "again", spread.model.spec, config, tensors)
    before, after = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "again").eval()
    assert torch.equal(logits(again), logits(theirs))


@pytest.mark.parametrize("name", FOLDERS)
def test_the_merged_model_equals_the_adapted_one(tmp_path: Path, name: str) -> None:
    theirs, folder = trained_by_peft(name, tmp_path)
    spread, config, _ = read_into(tmp_path / "base", folder)
    spec = spread.model.spec
    whole = {key: parameter.detach() for key, (parameter, _) in spread.local.items()}
    merged = merge(spec, config, whole)
    with torch.no_grad():
        adapted = spread.model(Batch.of([TOKENS]))
    plain = apply(decoder(spec, None), Mesh.single())
    plain.fill(merged)
    with torch.no_grad():
        assert (plain.model(Batch.of([TOKENS])) - adapted).abs().max() < 1e-4
    export_hf(State(spec, merged, tmp_path / "base", open_model(tmp_path / "base").config),
              tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (logits(loaded) - adapted).abs().max() < 1e-4
    by_peft = dict(theirs.merge_and_unload().named_parameters())
    for key, value in loaded.named_parameters():
        torch.testing.assert_close(value, by_peft[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("change", "message"), [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"bias": "all"}, "adapts matrices only"),
    ({"init_lora_weights": "pissa"}, "pissa"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"r": 4}, "ask for"),
    ({"use_dora": True}, r"magnitude .* is missing"), ({"r": "many"}, "no usable adapter")])
def test_a_folder_that_asks_for_more_is_refused(tmp_path: Path, change: dict[str, Any],
                                                message: str) -> None:
    _, folder = trained_by_peft("rslora q v", tmp_path)
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | change))
    with pytest.raises(WeightsError, match=message):
        read_peft(folder, open_model(tmp_path / "base").spec)


def test_a_folder_that_is_damaged_is_refused(tmp_path: Path) -> None:
    _, folder = trained_by_peft("rslora q v", tmp_path)
    spec = open_model(tmp_path / "base").spec
    tensors = load_file(folder / WEIGHTS)
    first = next(iter(tensors))
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": tensors[first].clone()},
              folder / WEIGHTS)
    with pytest.raises(WeightsError, match=r"lm_head.*not a tensor of an adapter"):
        read_peft(folder, spec)
    save_file({key: value for key, value in tensors.items() if key != first}, folder / WEIGHTS)
    with pytest.raises(WeightsError, match="is missing"):
        read_peft(folder, spec)
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="damaged"):
        read_peft(folder, spec)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match="pickle"):
        read_peft(folder, spec)
    with pytest.raises(WeightsError, match="is no adapter folder"):
        read_peft(tmp_path / "base", spec)
    with pytest.raises(WeightsError, match="already exists"):
        write_peft(folder, spec, LORA, {})
    with pytest.raises(WeightsError, match="not a whole adapter"):
        write_peft(tmp_path / "new", spec, LORA, {})
