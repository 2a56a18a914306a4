"""Any layout computes what one device computes: a covering part of `bench.parity`'s matrix."""

from __future__ import annotations

from functools import cache

import pytest

from bench.parity import Case, Outcome, cases, compare, train
from kilter.mesh.layout import Layout
from kilter.train.optimizer import OptimizerConfig
from tests.ranks import RankPool

# Every strategy, schedule, method and model, both optimizers, and combinations that share code.
COVERING = ["ddp4", "zero1-4", "zero2-2", "zero3-8", "hsdp 2x2 zero2", "hsdp 2x4 zero3", "tp3+sp",
            "tp4", "tp8+sp", "tp2 zero1-2", "tp2+sp zero2-2", "tp4+sp zero3-2", "recompute full",
            "recompute every 2nd zero3-2", "recompute selective tp2+sp", "muon tp2+sp zero1-2",
            "offload zero3-2", "everything tp2", "everything tp4 zero3-2", "smollm2 tp3+sp",
            "pp2 naive", "pp2 gpipe", "pp3 1f1b uneven", "pp2 interleaved", "pp4 zb-h1",
            "pp4 zb-v", "pp2 dualpipe-v", "pp2 zb-v zero2-2", "pp2 zb-h1 zero3-2",
            "pp2 zb-v hsdp 2x2", "pp2 1f1b tp2+sp zero3-2", "everything pp2 zb-h1 tp4+sp",
            "pp2 zb-v recompute selective", "cp2 ring contiguous", "cp4 ring zigzag",
            "cp3 ring striped", "cp4 ulysses", "cp4 all-gather balanced", "cp2 striped zero1-2",
            "cp4 ring zero3 over cp", "cp2 ulysses pp2 zb-v", "cp2 striped pp2 tp2+sp",
            "cp2 ring tp2+sp zero3-2", "cp2 ring pp2 tp2+sp zero3 over cp",
            "everything cp2 all-gather tp2+sp", "tp4+sp overlap zero3-2",
            "pp2 zb-v tp2+sp overlap recompute selective", "cp2 ring tp4+sp overlap"]


@cache
def one_device(model: str, optimizer: OptimizerConfig) -> Outcome:
    return train(Case("one", Layout(), model, optimizer=optimizer))


@pytest.mark.parametrize("name", COVERING)
def test_layout_equals_one_device(ranks: RankPool, name: str) -> None:
    (case,) = [c for c in cases() if c.name == name]
    outcomes = ([train(case)] if case.layout.world == 1
                else ranks.run(case.layout.world, train, case))
    plain = OptimizerConfig(**{**vars(case.optimizer), "offload": False})
    difference = compare(outcomes, one_device(case.model, plain))
    assert difference.good, difference


def test_the_comparison_sees_a_difference() -> None:
    one = one_device("tied", Case("x", Layout()).optimizer)
    other = train(Case("other", Layout(), optimizer=OptimizerConfig(lr=2e-3, eps=1e-6)))
    assert not compare([other], one).good
