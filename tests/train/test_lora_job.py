"""A job with adapters: only they move, it resumes, and what it exports is what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kilter.job import dump
from kilter.mesh.layout import Layout
from kilter.models.batch import Batch
from kilter.train.checkpoint import CheckpointError
from kilter.train.config import ModelConfig, TrainJob
from kilter.train.inputs import open_inputs
from kilter.train.lora import LoraConfig, adapters_off
from kilter.train.peft import read_peft
from kilter.train.schedule import ScheduleConfig
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.load import load_decoder
from kilter.weights.mappings import dense
from tests.ranks import RankPool
from tests.train.tiny_run import make_job, new_run, run_rank, write_inputs

BATCH = [[3, 5, 7, 9, 2], [4, 4, 6]]


def test_dora_on_two_ranks_goes_on_and_exports(tmp_path: Path, ranks: RankPool) -> None:
    write_inputs(tmp_path)
    base = make_job(tmp_path, output=str(tmp_path / "base"), steps=2, export=True)
    run_rank(dump(base))
    job = replace(base, output=str(tmp_path / "whole"), steps=6,
                  model=ModelConfig(path=str(tmp_path / "base" / "model")),
                  lora=LoraConfig(rank=3, alpha=6.0, dora=True),
                  schedule=ScheduleConfig("constant"), layout=Layout(dp=2, zero=3))

    def trained(job: TrainJob) -> dict[str, torch.Tensor]:
        ranks.run(2, run_rank, dump(job))
        return read_peft(Path(job.output) / "adapter", source.spec).tensors

    source = open_model(tmp_path / "base" / "model")
    whole = trained(job)
    trained(replace(job, output=str(tmp_path / "halves"), steps=3))
    halves = trained(replace(job, output=str(tmp_path / "halves")))
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert all(bool(value.any()) for name, value in whole.items() if name.endswith("lora_b"))

    # What is not adapted is the base's, bit for bit; what is, computes what the adapters did.
    exported = open_model(tmp_path / "whole" / "model")
    for name in ("embed.weight", "norm.weight", "layers.0.attn_norm.weight"):
        assert torch.equal(dense(exported.read(name)), dense(source.read(name)))
    batch = Batch.of(BATCH)
    with new_run(replace(job, layout=Layout())) as run, torch.no_grad():
        assert run.step == 6
        adapted = run.spread.model(batch)
        with adapters_off(run.spread.model):
            assert torch.equal(run.spread.model(batch), load_decoder(source)(batch))
    merged = load_decoder(exported, storage="fp32")(batch)
    assert (merged - adapted).abs().max() < 1e-4
    assert (adapted - load_decoder(source)(batch)).abs().max() > 1e-3


@pytest.fixture
def first(tmp_path: Path) -> TrainJob:
    """A run of two steps that has made an adapter."""
    write_inputs(tmp_path)
    base = make_job(tmp_path, output=str(tmp_path / "base"), steps=1, export=True)
    run_rank(dump(base))
    job = replace(base, output=str(tmp_path / "first"), steps=2,
                  model=ModelConfig(path=str(tmp_path / "base" / "model")),
                  lora=LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down"), rslora=True))
    run_rank(dump(job))
    return job


def test_a_run_starts_from_an_adapter(first: TrainJob, ranks: RankPool,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """With new data, say: the model it starts as is the one that the adapter made, in any layout,
    and what it makes is an adapter of the same base."""
    assert first.lora is not None
    adapter = Path(first.output) / "adapter"
    second = replace(first, output=f"{first.output}-on", layout=Layout(tp=2), lora=replace(
        first.lora, path=str(adapter)))
    ranks.run(2, run_rank, dump(second))
    with new_run(first) as run, torch.no_grad():
        ended = run.spread.model(Batch.of(BATCH))
    alone = replace(second, output=f"{first.output}-alone", layout=Layout())
    with new_run(alone) as run, torch.no_grad():
        assert run.step == 0 and torch.equal(run.spread.model(Batch.of(BATCH)), ended)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.1}))
    capsys.readouterr()
    run_rank(dump(alone))
    said = capsys.readouterr().out
    assert f"the adapter {adapter}, which says that it was trained on {first.model.path}." in said
    assert "Its dropout of 0.1 is for training only and was left out." in said
    spec = open_model(str(first.model.path)).spec
    before, after, same = (read_peft(path, spec).tensors for path in (
        adapter, f"{second.output}/adapter", f"{alone.output}/adapter"))
    assert all(not torch.equal(before[name], after[name]) for name in before)
    for name in after:
        torch.testing.assert_close(same[name], after[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("lora", "config", "message"), [
    ({"rank": 4, "alpha": 8.0}, {}, r"of it the table says rank = 3, alpha = 6\.0\."),
    ({"targets": ("q_proj",), "rslora": False}, {},
     r'says targets = \["q_proj", "down_proj"\], rslora = true\.'),
    ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({}, {"r": 5}, "this model and rank 5 ask for"),
    ({"path": "nowhere"}, {}, "nowhere is no adapter folder")])
def test_an_adapter_that_cannot_be_started_from(first: TrainJob, lora: dict[str, Any],
                                                config: dict[str, Any], message: str) -> None:
    """Told before any rank starts."""
    assert first.lora is not None
    file = Path(first.output) / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    job = replace(first, output=f"{first.output}-on", lora=replace(
        first.lora, **{"path": str(file.parent)} | lora))
    with pytest.raises(WeightsError, match=message):
        open_inputs(job)


def test_adapters_go_on_over_their_own_base_only(first: TrainJob) -> None:
    """A checkpoint holds adapters alone, so it has to be noticed when what is under them is not
    what it was."""
    base = Path(str(first.model.path))
    weights, config = base / "model.safetensors", base / "config.json"
    told = "started from another model than .* is now: the weights under the adapters differs"
    longer = dump(replace(first, steps=3))
    tensors, text = load_file(weights), config.read_text()
    changed = tensors["model.norm.weight"].clone()
    changed[3] += 1e-6
    save_file(tensors | {"model.norm.weight": changed}, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        run_rank(longer)
    save_file(tensors, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 1e-6}))
    with pytest.raises(CheckpointError, match="is now: norm_eps differs"):
        run_rank(longer)
    config.write_text(text)
    assert run_rank(longer).step == 3
