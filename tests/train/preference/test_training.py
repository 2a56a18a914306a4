"""Training on pairs: what is computed, against transformers, and what is learned."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from kilter.job import JobError
from kilter.train.checkpoint import CheckpointError
from kilter.train.metrics import forward_flops
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.load import load_decoder
from tests.train.preference.pairs_run import folder, inputs, pairs_job, rows
from tests.train.tiny_run import losses, metrics, new_run, run, tensors

__all__ = ["folder", "inputs"]


# What is computed


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_packing_changes_nothing(folder: Path, kind: str) -> None:
    """The same pairs in packs of several or one by one."""
    packed = pairs_job(folder, kind, output=str(folder / "packed"), data={"lookahead": 1}, steps=1)
    run(None, packed)
    [one] = metrics(packed)
    assert one["targets"] > 4
    alone = pairs_job(folder, kind, output=str(folder / "alone"), micro_batches=one["targets"],
                      data={"packing": False, "lookahead": 256}, steps=1)
    run(None, alone)
    [other] = metrics(alone)
    assert other["tokens"] == one["tokens"]
    for name in ("loss", "grad_norm", "margin"):
        assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_first_step_of_dpo_is_known(folder: Path, loss: str, lora: bool) -> None:
    """Policy = reference, bit for bit: log 2, and (1 / 2β)² of IPO."""
    more = {"lora": {"rank": 2}} if lora else {}
    job = pairs_job(folder, "dpo", dpo={"beta": 0.25, "loss": loss}, steps=2, **more)
    run(None, job)
    assert losses(job)[1] == {"sigmoid": math.log(2.0), "ipo": 4.0}[loss]
    assert metrics(job)[0]["margin"] == 0.0 == metrics(job)[0]["chosen_reward"]
    assert losses(job)[2] != losses(job)[1]


def test_mfu_counts_the_forward_pass_of_a_reference(folder: Path) -> None:
    """Which is the model's own without its adapters, once for three times all of it."""
    job = pairs_job(folder, "dpo", lora={"rank": 2}, steps=1)
    run(None, job)
    [line] = metrics(job)
    with new_run(pairs_job(folder, "dpo", steps=1, output=str(folder / "other"))) as made:
        spec, shards = made.inputs.spec, made.spread.shards
        packs = made.loader.next_step()
    lengths = [n for pack in packs for n in pack.cu_seqlens_S1.diff().tolist()]
    base = sum(shard.shape[0] * shard.shape[1] for name, shard in shards.items()
               if len(shard.shape) == 2 and (spec.tied_head or name != "embed.weight"))
    d, f = spec.hidden_size, spec.ffn_size
    kv, q = spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
    adapters = spec.num_layers * 2 * sum(
        a + b for a, b in [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d)])
    flops = 3 * forward_flops(spec, base + adapters, lengths) + forward_flops(spec, base, lengths)
    assert line["tokens"] == sum(lengths)
    assert line["mfu"] * 1e9 / line["tokens_per_second"] * sum(lengths) == pytest.approx(flops)


def conversations(folder: Path) -> list[list[tuple[torch.Tensor, int]]]:
    """Of every held-out pair, (ids [1, N], tokens of the prompt) of both sides, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    found = []
    for row in rows(30, 1):
        sides = []
        for side in ("chosen", "rejected"):
            prompt = [{"role": "user", "content": row["prompt"]}]
            before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True,
                                                   tokenize=True, return_dict=True)["input_ids"]
            whole = tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": row[side]}], tokenize=True,
                return_dict=True)["input_ids"]
            assert tokenizer.decode(whole[-1]) == "\n"  # not the answer's any more
            sides.append((torch.tensor([whole[:-1]]), len(before)))
        found.append(sides)
    return found


def log_odds(x: float) -> float:
    """−log σ(x)."""
    return math.log1p(math.exp(-x))


def test_dpo_is_the_written_out_formula(folder: Path) -> None:
    """In float64 by transformers, from the models' files: the evaluation after the last step."""
    job = pairs_job(folder, "dpo", dpo={"beta": 0.3, "label_smoothing": 0.1}, export=True, steps=4)
    run(None, job)

    def logprob(model: Any, ids: torch.Tensor, prompt: int) -> float:
        logs = model(ids).logits[0, :-1].log_softmax(-1)
        return float(logs.gather(1, ids[0, 1:, None])[prompt - 1:].sum())

    with torch.no_grad():
        policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                             for path in (folder / "run/model", folder / "start"))
        gained = [[0.3 * (logprob(policy, *side) - logprob(reference, *side)) for side in pair]
                  for pair in conversations(folder)]
    expected = [0.9 * log_odds(a - b) + 0.1 * log_odds(b - a) for a, b in gained]
    [found] = metrics(job, "eval")
    assert found["loss"] == pytest.approx(sum(expected) / 30, rel=1e-5)
    assert found["accuracy"] == sum(a > b for a, b in gained) / 30
    assert found["chosen_reward"] == pytest.approx(sum(a for a, _ in gained) / 30, rel=1e-4)
    assert found["margin"] == pytest.approx(sum(a - b for a, b in gained) / 30, rel=1e-4)


def test_a_reward_model_is_transformers_classifier(folder: Path) -> None:
    """Scores of the exported folder there, and here after reading it back; margins count."""
    job = pairs_job(folder, "reward", export=True, steps=6)
    run(None, job)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "run/model", dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and type(model).__name__ == "LlamaForSequenceClassification"
    with torch.no_grad():
        scores = [[float(model(ids).logits) for ids, _ in pair] for pair in conversations(folder)]
    margins = [row.get("margin", 0.0) for row in rows(30, 1)]
    expected = [log_odds(a - b - m) for (a, b), m in zip(scores, margins, strict=True)]
    [found] = metrics(job, "eval")
    assert found["loss"] == pytest.approx(sum(expected) / 30, rel=1e-5)
    assert found["accuracy"] == sum(a > b for a, b in scores) / 30
    again = pairs_job(folder, "reward", model={"path": str(folder / "run/model")}, steps=1,
                      optimizer={"lr": 1e-30, "weight_decay": 0.0}, output=str(folder / "again"))
    run(None, again)
    assert metrics(again, "eval")[0]["loss"] == found["loss"]


def test_a_reward_model_is_no_language_model(folder: Path) -> None:
    job = pairs_job(folder, "reward", export=True, steps=1)
    run(None, job)
    with pytest.raises(WeightsError, match=r"holds a reward model \(LlamaForSequence"):
        open_model(folder / "run/model")
    with pytest.raises(WeightsError, match="scores texts and writes none"):
        run(None, pairs_job(folder, "dpo", model={"path": str(folder / "run/model")},
                            output=str(folder / "dpo")))
    source = open_model(folder / "run/model", reward=True)
    assert source.is_reward and source.names()[-1] == "value.weight"
    assert not open_model(folder / "start", reward=True).is_reward
    load_decoder(open_model(folder / "start"))
    config = json.loads((folder / "run/model/config.json").read_text())
    assert config["pad_token_id"] is None  # it was the token that ends answers


# What is learned


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_a_tiny_model_learns_a_preference(folder: Path, kind: str) -> None:
    job = pairs_job(folder, kind, steps=30, optimizer={"lr": 3e-3}, log={"every": 30})
    run(None, job)
    [last] = metrics(job, "eval")
    assert last["accuracy"] > 0.95 and last["loss"] < 0.5 and last["margin"] > 0.5
    assert last["chosen_reward"] > last["rejected_reward"]


def test_adapters_learn_too(folder: Path) -> None:
    """A reward model's head is trained beside them; they come out merged."""
    job = pairs_job(folder, "reward", steps=20, lora={"rank": 4}, optimizer={"lr": 1e-2},
                    export=True, log={"every": 20})
    run(None, job)
    assert metrics(job, "eval")[0]["accuracy"] > 0.8
    assert {name.split(".")[-1] for name in tensors(job, 20) if name.startswith("model.")} == {
        "lora_a", "lora_b", "weight"}
    assert not (folder / "run/adapter").exists()
    assert open_model(folder / "run/model", reward=True).is_reward


# Resuming


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_a_resume_is_bitwise_the_run(folder: Path, kind: str) -> None:
    whole = pairs_job(folder, kind, steps=5, output=str(folder / "whole"))
    run(None, whole)
    for steps in (2, 5):
        parts = pairs_job(folder, kind, steps=steps)
        run(None, parts)
    assert losses(parts) == losses(whole)
    one, other = tensors(parts, 5), tensors(whole, 5)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert metrics(parts, "eval")[-1] == metrics(whole, "eval")[-1]


def test_a_reference_of_something_else_is_refused(folder: Path) -> None:
    run(None, pairs_job(folder, "dpo", steps=1))
    (folder / "pairs.jsonl").unlink()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(120, 5)))
    with pytest.raises(CheckpointError, match="reference of another starting model, precision or"):
        run(None, pairs_job(folder, "dpo", steps=2))
    (folder / "run/reference.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(None, pairs_job(folder, "dpo", steps=2))


# Jobs that cannot be


@pytest.mark.parametrize(("kind", "changes", "sentence"), [
    ("dpo", {"dpo": {"beta": 0.0}}, "beta is 0.0 but must be positive"),
    ("dpo", {"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "but ipo has none"),
    ("reward", {"dpo": {"beta": 0.5}}, "dpo is set, but kind is reward"),
    ("sft", {}, "kind is sft, but a data source has pairs"),
    ("reward", {"data": {"sources": [{"paths": ["x.jsonl"], "chat": True}]}}, "has no pairs"),
    ("reward", {"data": {"long_documents": "split"}}, 'Set it to "drop"'),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_said(inputs: Path, kind: str, changes: dict[str, Any], sentence: str
                                ) -> None:
    with pytest.raises(JobError) as error:
        pairs_job(inputs, kind, **changes)
    assert sentence in str(error.value)
