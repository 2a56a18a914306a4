"""A job with adapters: only they move, it resumes, and what it exports is what was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kilter.job import dump
from kilter.mesh.layout import Layout
from kilter.models.batch import Batch
from kilter.train.config import ModelConfig, TrainJob
from kilter.train.lora import LoraConfig, adapters_off
from kilter.train.peft import read_peft
from kilter.train.schedule import ScheduleConfig
from kilter.weights.bridge import open_model
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
