"""The optimizers against torch's own and against the singular value decomposition."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bench.parity import everything
from kilter.comm.axis import Axis
from kilter.job import build, dump
from kilter.mesh import Layout, Mesh
from kilter.models.decoder import Decoder
from kilter.parallel.apply import apply
from kilter.parallel.data import Held
from kilter.parallel.load import fill
from kilter.parallel.shards import Shard
from kilter.train.config import TrainJob
from kilter.train.muon import Adjustment, orthogonalise
from kilter.train.optimizer import Optimizer, OptimizerConfig
from tests.parallel.gradients import spread_model
from tests.ranks import RankPool
from tests.train.tiny_run import folder, make_job, new_run

__all__ = ["folder"]

ALONE = Axis("dp_cp_tp", (0,), 0)


def held(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> list[Held]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        found.append(Held(name.replace("_", ".", 2), parameter, Shard.whole(shape)))
    return found


def gradients(parts: list[Held], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        part.tensor.grad = torch.randn(part.tensor.shape, generator=generator,
                                       dtype=part.tensor.dtype)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_adamw_is_torchs_with_decay_on_matrices_alone(kind: str, offload: bool) -> None:
    """The fused one's bits; of the others, which round in another order, the numbers."""
    shapes = {"embed_weight": (7, 3), "norm_weight": (3,)}
    ours, theirs = held(**shapes), held(**shapes)
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, offload=offload)
    optimizer = Optimizer(ours, config, ALONE)
    reference = torch.optim.AdamW([{"params": [theirs[0].tensor], "weight_decay": 0.3},
                                   {"params": [theirs[1].tensor], "weight_decay": 0.0}],
                                  lr=0.1, betas=(0.8, 0.9), eps=1e-6,
                                  **{name: name == kind for name in ("fused", "foreach")})
    for step in range(20):
        factor = (0.5, 1.0, 0.25)[step % 3]
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step(factor)
        for group in reference.param_groups:
            group["lr"] = 0.1 * factor
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        if kind == "fused":
            assert torch.equal(mine.tensor, other.tensor)
        torch.testing.assert_close(mine.tensor, other.tensor, rtol=1e-6, atol=1e-7)


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
    got = orthogonalise(matrix)
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.5 and values.max() < 1.3  # what five steps promise
    assert torch.nn.functional.cosine_similarity(got.flatten(), (u @ vt).flatten(), dim=0) > 0.95
    assert not orthogonalise(torch.zeros(shape)).any()


def projections(fused: Tensor, groups: int, widths: tuple[int, ...]) -> list[Tensor]:
    """The matrices that a fused one is made of, by their rows, one after the other."""
    rows: list[list[int]] = [[] for _ in widths]
    for row in range(fused.shape[0]):
        within = row % sum(widths)
        rows[next(i for i in range(len(widths)) if within < sum(widths[:i + 1]))].append(row)
    assert groups * sum(widths) == fused.shape[0]
    return [fused[some] for some in rows]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs_on_every_projection_by_itself(adjust: Adjustment) -> None:
    """Twenty steps, in double: torch's own rounds to bfloat16 on the way, which is left out."""
    parts = held(torch.float64, layers_0_qkv=(24, 6), layers_0_up=(10, 6), layers_0_down=(6, 5))
    parts[0].fused, parts[1].fused = (2, (8, 2, 2)), (1, (5, 5))
    config = OptimizerConfig("muon", weight_decay=0.3, muon_lr=0.05, muon_momentum=0.9,
                             muon_adjust_lr=adjust)

    def separate(get: Callable[[Held], Tensor]) -> list[Tensor]:
        return [x for h in parts
                for x in (projections(get(h), *h.fused) if h.fused else [get(h)])]

    theirs = [nn.Parameter(x.detach().clone()) for x in separate(lambda h: h.tensor)]
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.3, momentum=0.9,
                                 adjust_lr_fn=adjust)
    optimizer = Optimizer(parts, config, ALONE)
    for step in range(20):
        gradients(parts, step)
        for parameter, grad in zip(theirs, separate(lambda h: h.tensor.grad), strict=True):  # type: ignore[arg-type,return-value]
            parameter.grad = grad
        optimizer.step(factor := 1.0 - step / 40)
        reference.param_groups[0]["lr"] = 0.05 * factor
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            reference.step()
    for mine, other in zip(separate(lambda h: h.tensor), theirs, strict=True):
        torch.testing.assert_close(mine, other.data, rtol=1e-11, atol=1e-12)


def test_a_models_fused_matrices_are_known_to_muon() -> None:
    """Rows of qkv are grouped by KV head, those of gate_up are [gate; up]."""
    spec = everything()  # 4 query heads and 1 KV head of 8, F 48
    with torch.device("meta"):
        spread = apply(Decoder(replace(spec, num_kv_heads=2)), Mesh.single())
    known = {h.name: h.fused for h in spread.held if h.name.startswith("layers.0.") and h.fused}
    assert {name: fused for name, fused in known.items() if name.endswith("weight")} == {
        "layers.0.attn.qkv.weight": (2, (16, 8, 8)), "layers.0.mlp.gate_up.weight": (1, (48, 48))}


def muon_steps(layout: Layout, steps: int = 2) -> dict[str, list[tuple[Any, Tensor]]]:
    """What this rank has of the matrices after some steps, with their places."""
    spread = spread_model(replace(everything(), layers=everything().layers[:1]), layout)
    optimizer = Optimizer(spread.held, OptimizerConfig("muon"), spread.mesh.axis("dp_cp_tp"))
    for step in range(steps):
        for h in spread.held:  # the same gradient on all layouts
            whole = torch.randn(h.shard.shape, generator=torch.Generator().manual_seed(step))
            h.tensor.grad = torch.empty_like(h.tensor)
            fill(h.tensor.grad, whole, h.shard)
        optimizer.step(1.0)
    return {h.name: [(box.slices, part.detach().clone()) for box, _, part in
                     h.shard.parts(h.tensor)] for h in spread.held if h.tensor.dim() == 2}


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(dp=5, zero=3), Layout(tp=4),
                                    Layout(dp=2, tp=2, zero=1)], ids=str)
def test_muon_works_on_whole_matrices_wherever_their_elements_are(ranks: RankPool, layout: Layout
                                                                  ) -> None:
    """More ranks than matrices, matrices that every rank has, and a KV head that all share: the
    bits of one device."""
    one = muon_steps(Layout())
    assert len(one) == 5
    for found in ranks.run(layout.world, muon_steps, layout):
        for name, [(_, whole)] in one.items():
            assert all(torch.equal(part, whole[place]) for place, part in found[name]), name


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
    {"name": "muon", "muon_momentum": 1.0}, {"name": "muon", "muon_adjust_lr": "rms"},
    {"name": "muon", "muon_lr": math.nan}, {"weight_decay": math.nan}, {"lr": math.inf},
    {"eps": math.inf}])
def test_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="optimizer cannot be so"):
        OptimizerConfig(**wrong)
