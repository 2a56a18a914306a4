"""The optimizers against torch and against the singular value decomposition."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kilter.comm.axis import Axis
from kilter.job import build, dump
from kilter.parallel.data import Held
from kilter.parallel.shards import Shard
from kilter.train.config import TrainJob
from kilter.train.optimizer import Optimizer, OptimizerConfig, orthogonalise
from tests.ranks import RankPool
from tests.train.tiny_run import folder, make_job, new_run

__all__ = ["folder"]

ALONE = Axis("dp_cp_tp", (0,), 0)


def held(**shapes: tuple[int, ...]) -> list[Held]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        found.append(Held(name.replace("_", ".", 2), parameter, Shard.whole(shape)))
    return found


def gradients(parts: list[Held], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        part.tensor.grad = torch.randn(part.tensor.shape, generator=generator)


@pytest.mark.parametrize("offload", [False, True])
def test_adamw_is_torchs_with_decay_on_matrices_alone(offload: bool) -> None:
    ours, theirs = held(embed_weight=(7, 3), norm_weight=(3,)), held(embed_weight=(7, 3),
                                                                     norm_weight=(3,))
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, offload=offload)
    optimizer = Optimizer(ours, config, ALONE)
    reference = torch.optim.AdamW([{"params": [theirs[0].tensor], "weight_decay": 0.3},
                                   {"params": [theirs[1].tensor], "weight_decay": 0.0}],
                                  lr=0.1, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step, factor in enumerate((0.5, 1.0, 0.25)):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step(factor)
        for group in reference.param_groups:
            group["lr"] = 0.1 * factor
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.tensor, other.tensor)


def test_states_can_be_asked_for_before_the_first_step() -> None:
    parts = held(embed_weight=(4, 2))
    optimizer = Optimizer(parts, OptimizerConfig(), ALONE)
    state = optimizer.states()["embed.weight"]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(value.any() for value in state.values())
    gradients(parts, 0)
    optimizer.step(1.0)
    assert optimizer.states()["embed.weight"]["step"].item() == 1.0
    assert state["exp_avg"].any()  # the optimizer's own tensor, not a copy


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_muons_matrix_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    got = orthogonalise(matrix) / scale
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.5 and values.max() < 1.3  # what five steps promise
    assert torch.nn.functional.cosine_similarity(got.flatten(), (u @ vt).flatten(), dim=0) > 0.95


def test_muon_steps_matrices_of_layers_and_adamw_the_rest() -> None:
    parts = held(layers_0_out=(6, 6), embed_weight=(6, 6), norm_weight=(6,))
    optimizer = Optimizer(parts, OptimizerConfig("muon"), ALONE)
    keys = {name: set(state) for name, state in optimizer.states().items()}
    assert keys["layers.0.out"] == {"momentum"}
    assert keys["embed.weight"] == keys["norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}


def test_replicated_parameters_stay_equal_on_all_tensor_ranks(folder: Path, ranks: RankPool
                                                              ) -> None:
    """Case 26: norms are held whole by every tensor-parallel rank and never exchanged."""
    job = make_job(folder, layout={"tp": 2}, steps=50, log={"every": 50})
    found = ranks.run(2, norms_after, dump(job))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 5
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def norms_after(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's norm weights at the end of a run."""
    with new_run(build(TrainJob, job)) as made:
        made.go(threading.Event())
        return {h.name: h.tensor.detach().clone() for h in made.spread.held
                if h.tensor.dim() == 1}


@pytest.mark.parametrize("wrong", [
    {"name": "sgd"}, {"lr": -1e-3}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1.0},
    {"muon_momentum": 1.0}])
def test_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="optimizer cannot be so"):
        OptimizerConfig(**wrong)
