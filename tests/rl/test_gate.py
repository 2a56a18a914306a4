"""The trainer gives every sampled token the probability it was sampled with, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.parallel.apply import apply
from kilter.rl.experience import Experience, Rollout
from kilter.rl.gate import Agreement, Disagreement, agreement
from kilter.rl.reshard import WeightSync, gather_holdings
from kilter.rl.reshard_layout import (
    consecutive_groups,
    rollout_formats,
    rollout_needs,
    rollout_parts,
)
from kilter.rl.reshard_plan import make_plan
from kilter.rl.rollout import Prompt, RolloutConfig, RolloutEngine, rollout_mesh
from kilter.rl.scoring import micro_batches, score
from kilter.serve.engine_config import EngineConfig
from kilter.serve.params import SamplingParams
from kilter.train.lora import LoraConfig, merge
from kilter.weights.bridge import open_model
from kilter.weights.tokenizer import open_tokenizer
from tests.ranks import RankPool
from tests.rl.tiny_policy import (
    CONTEXT,
    DTYPES,
    PARAMS,
    compared,
    config,
    parts,
    prompts,
    rollout_engine,
    spec,
    tokenizer,
    trainer,
    whole,
)


def sampled(engine: RolloutEngine, count: int = 12, n: int = 1, temperature: float = 1.0,
            **others: Any) -> list[Rollout]:
    params = dataclasses.replace(PARAMS, temperature=temperature, **others)
    return engine.generate(prompts(count, n), params, seed=3, step=1)


@cache
def sixty_four(temperature: float) -> tuple[Rollout, ...]:
    return tuple(sampled(rollout_engine(), 64, temperature=temperature))


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.5])
def test_any_micro_batches_and_any_order(temperature: float) -> None:
    rollouts, spread = list(sixty_four(temperature)), trainer()
    for budget, seed in ((CONTEXT, 0), (257, 1), (4096, 2)):
        random.Random(seed).shuffle(rollouts)
        found = compared(rollouts, spread, temperature=temperature, budget=budget)
        found.check()
        assert found.exact and found.count > 300 and found.skipped == 0


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_any_batch_of_the_engine(count: int) -> None:
    """A sample is the same in any company."""
    rollouts = sampled(rollout_engine(), count)
    for rollout, same in zip(rollouts, sixty_four(1.0), strict=False):
        assert (rollout.tokens, rollout.logprobs[-1]) == (same.tokens, same.logprobs[-1])
    compared(rollouts, trainer()).check()


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.5])
def test_a_temperature_that_only_the_sampler_knows_is_seen(temperature: float) -> None:
    found = compared(sixty_four(temperature), trainer())
    assert found.max_abs > 0.1
    with pytest.raises(Disagreement, match=r"disagree by up to .* of sample 'p\d+/0'"):
        found.check()


def test_prompts_in_chunks_between_decodes() -> None:
    engine = rollout_engine(config(scheduler={"prefill_tokens": 5, "mixed_tokens": 3}))
    rollouts = sampled(engine, 20)
    assert rollouts[:5] == list(sampled(rollout_engine(), 5))
    compared(rollouts, trainer()).check()


def test_prompts_from_the_cache() -> None:
    engine = rollout_engine(config(page_size=1))
    rollouts = sampled(engine, 6, n=8)
    assert engine.engine is not None and engine.engine.stats().hit_rate > 0.6
    compared(rollouts, trainer()).check()


def test_after_preemption() -> None:
    engine = rollout_engine(config(kv_tokens=64, ends=()))
    assert engine.engine is not None
    # Long answers where short ones were expected.
    engine.generate(prompts(8), dataclasses.replace(PARAMS, max_tokens=1), seed=0, step=0)
    rollouts = sampled(engine, 8, max_tokens=30)
    assert engine.engine.stats().preemptions > 0
    compared(rollouts, trainer()).check()


def test_after_new_weights() -> None:
    engine, made = rollout_engine(), spec()
    sampled(engine)
    engine.update(parts(engine, whole(made, 1)), version=5)
    rollouts = sampled(engine)
    assert {v for r in rollouts for v in r.versions} == {-1, 5}
    compared(rollouts, trainer(seed=1)).check()
    assert not compared(rollouts, trainer(seed=0)).exact
    # Some of the parameters only; what the engine has are copies.
    new = {name: value.clone() for name, value in whole(made, 2).items() if "norm" in name}
    engine.update([new], version=6)
    for value in new.values():
        value.zero_()
    spread = trainer(seed=1)
    spread.fill({name: value for name, value in whole(made, 2).items() if "norm" in name})
    compared(sampled(engine), spread).check()


@pytest.mark.parametrize(("precision", "kv_dtype", "products"), [
    *itertools.product(["fp32", "bf16"], ["fp32", "bf16", "fp16"], ["fp32"]),
    ("fp32", "fp32", "bf16"), ("bf16", "bf16", "bf16")])
def test_formats(precision: Any, kv_dtype: Any, products: Any) -> None:
    settings = config(precision=precision, kv_dtype=kv_dtype, products=products)
    rollouts = sampled(rollout_engine(settings), temperature=0.7)
    compared(rollouts, trainer(settings), temperature=0.7).check()
    if (precision, kv_dtype, products) != ("fp32", "fp32", "fp32"):
        assert not compared(rollouts, trainer(), temperature=0.7).exact


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_are_held_as_the_trainer_holds_them(precision: Any, dora: bool) -> None:
    lora = LoraConfig(rank=4, alpha=8.0, dora=dora)
    settings, made = config(precision=precision, lora=lora), spec()
    engine = rollout_engine(settings)
    compared(sampled(engine), trainer(settings)).check()
    # New adapters alone.
    new = {name: value for name, value in whole(made, 1, lora).items() if ".adapter." in name}
    assert engine.update(parts(engine, new), version=1) == len(new)
    rollouts = sampled(engine)
    spread = trainer(settings)
    assert not compared(rollouts, spread).exact
    spread.fill(new)
    compared(rollouts, spread).check()
    # Merged, they are the same policy only within rounding.
    merged = rollout_engine(config(precision=precision))
    merged.update([merge(made, lora, {**whole(made, 0, lora), **new})], version=1)
    found = compared(sampled(merged), spread)
    assert 0.0 < found.max_abs < (1e-3 if precision == "fp32" else 0.3)


def test_stock_kernels_do_not_pass() -> None:
    """That the gate can fail: they choose an order of summation by shape."""
    settings = config(exact=False)
    found = compared(sampled(rollout_engine(settings), 48), trainer(settings), budget=1000)
    assert 0.0 < found.max_abs < 1e-3
    with pytest.raises(Disagreement, match="exact = false"):
        found.check()


def test_rollouts_of_two_policies_are_compared_where_they_are_the_trainers() -> None:
    engine = rollout_engine(config(ends=()), version=1)
    calls: list[Rollout] = []

    def environment(rollout: Rollout) -> None:
        calls.append(rollout)
        if len(calls) == 2:
            engine.interrupt()

    params = dataclasses.replace(PARAMS, max_tokens=30, stop_token_ids=tuple(range(20)))
    begun = engine.generate(prompts(12), params, seed=3, step=1, environment=environment)
    partials = [r for r in begun if r.finish == "abort"]
    assert len(partials) > 4 and all(any(r.is_action) for r in partials)
    engine.update(parts(engine, whole(spec(), 1)), version=2)
    done = engine.resume(partials, params, seed=3, step=1)
    for before, after in zip(partials, done, strict=True):
        kept = len(before.tokens)
        assert after.tokens[:kept] == before.tokens and after.versions[:kept] == before.versions
        assert set(after.versions[kept:]) == {2} and after.finish in ("stop", "length")
    found = compared(done, trainer(seed=1), version=2)
    found.check()
    assert found.skipped > 0 and found.count > 0
    assert not compared(done, trainer(seed=1)).exact
    old = compared(done, trainer(seed=0), version=1)
    old.check()
    assert old.count == found.skipped and old.skipped == found.count
    again = engine.resume(partials, params, seed=3, step=1, in_flight="restart")
    assert {v for r in again for v in r.versions} == {-1, 2}
    compared(again, trainer(seed=1)).check()


# ---- the two lives on ranks ----

def on_ranks(layout: Layout, tp: int, settings: RolloutConfig, temperature: float
             ) -> tuple[list[Rollout], Agreement]:
    """All rollouts, and the agreement of this rank's share of them."""
    spread = trainer(settings, layout)
    engine = rollout_engine(settings, tp=tp)
    params = dataclasses.replace(PARAMS, temperature=temperature)
    mine = engine.generate(engine.share(prompts(10)), params, seed=3, step=1)
    every = engine.gather(mine)
    dp = spread.mesh.axis("dp")
    # Shares of different sizes: ranks run different numbers of micro-batches.
    share = every[:3] if dp.index == 0 and dp.size > 1 else every[3 * (dp.size > 1)::dp.size]
    found = compared(share, spread, temperature=temperature, budget=CONTEXT)
    return every, found.over(spread.mesh.axis("world"))


@cache
def on_one(settings: RolloutConfig, temperature: float) -> list[Rollout]:
    engine = rollout_engine(settings)
    return engine.generate(prompts(10), dataclasses.replace(PARAMS, temperature=temperature),
                           seed=3, step=1)


FP32, BF16 = config(), config(precision="bf16", kv_dtype="bf16")
ADAPTED = config(lora=LoraConfig(rank=4, dora=True))
ROUNDED = config(products="bf16")


@pytest.mark.parametrize(("layout", "tp", "settings", "temperature"), [
    (Layout(dp=2, zero=3), 1, FP32, 1.0),
    (Layout(dp=2, zero=3), 2, BF16, 0.6),
    (Layout(tp=2), 2, FP32, 1.5),
    (Layout(tp=2), 1, BF16, 0.6),
    (Layout(dp=4, zero=3), 4, FP32, 0.6),
    (Layout(dp=4, zero=3), 2, ADAPTED, 1.0),
    (Layout(dp=2, tp=2, zero=3), 4, BF16, 1.0),
    (Layout(dp=2, tp=2, zero=3), 2, FP32, 0.6),
    (Layout(dp=4, tp=2, zero=3), 2, FP32, 1.0),
    (Layout(pp=2, dp=2), 2, BF16, 0.6),
    (Layout(dp=2, tp=2, zero=1, sequence_parallel=False), 1, ADAPTED, 0.6),
    (Layout(tp=4), 2, ROUNDED, 0.6),
    (Layout(cp=2), 2, BF16, 0.6),
    (Layout(cp=2, dp=2, zero=3), 4, ADAPTED, 1.0),
], ids=lambda v: str(v) if isinstance(v, Layout | int | float) else
    "lora" if v.lora else v.precision)
def test_any_layout_of_either(ranks: RankPool, layout: Layout, tp: int, settings: RolloutConfig,
                              temperature: float) -> None:
    expected = on_one(settings, temperature)
    answers = ranks.run(layout.world, on_ranks, layout, tp, settings, temperature)
    for every, found in answers:
        assert [(r.id, r.tokens) for r in every] == [(r.id, r.tokens) for r in expected]
        assert Experience.of(every).logprobs_T.nan_to_num().equal(
            Experience.of(expected).logprobs_T.nan_to_num())
        found.check()
        assert found.count > 0 and found == answers[0][1]


def after_updates(layout: Layout, tp: int, settings: RolloutConfig) -> list[bool]:
    """Whether all agrees after each of two updates by the least bytes."""
    made = spec()
    spread = trainer(settings, layout)
    engine = RolloutEngine(made, tokenizer(), settings, rollout_mesh(tp))
    world = spread.mesh.axis("world")
    with torch.device("meta"):
        model = Decoder(made)
    plan = make_plan(gather_holdings(spread.local, world),
                     rollout_needs(rollout_parts(model, tp), consecutive_groups(world.size, tp)),
                     rollout_formats(model, DTYPES[settings.precision]))
    sync = WeightSync(plan, world)
    found = []
    for version in (1, 2):
        spread.fill(whole(made, version))
        spread.updated()
        engine.sleep(weights=True)
        engine.update(sync.send(spread.local, version), version)
        engine.wake()
        rollouts = engine.gather(sampled_share(engine))
        found.append(compared(rollouts, spread, version=version).over(world).exact)
        assert sync.report is not None and sync.report.changed > 0
    return found


def sampled_share(engine: RolloutEngine) -> list[Rollout]:
    return engine.generate(engine.share(prompts(10)), PARAMS, seed=3, step=1)


@pytest.mark.parametrize(("layout", "tp", "settings"), [
    (Layout(dp=2, tp=2, zero=3), 2, FP32), (Layout(pp=2, tp=2), 4, BF16),
    (Layout(dp=4, zero=1), 2, BF16)], ids=str)
def test_after_updates_from_the_trainers_shards(ranks: RankPool, layout: Layout, tp: int,
                                                settings: RolloutConfig) -> None:
    assert ranks.run(4, after_updates, layout, tp, settings) == [[True, True]] * 4


# ---- the real model ----

def test_the_real_model(smollm2: Path) -> None:
    source = open_model(smollm2)
    with torch.device("meta"):
        model = Decoder(source.spec, max_positions=128)
    spread = apply(model, Mesh.single())
    spread.load(source)
    words = open_tokenizer(source)
    engine = RolloutEngine(source.spec, words, RolloutConfig(engine=EngineConfig(
        512, max_context=128, eos_token_ids=source.eos_token_ids)))
    engine.update(({name: parameter} for name, (parameter, _) in spread.local.items()), version=0)
    asked = [Prompt(words.encode(text), i, f"p{i}", 2) for i, text in enumerate(
        ("The capital of France is", "def fibonacci(n):\n"))]
    rollouts = engine.generate(asked, SamplingParams(max_tokens=16, temperature=0.7), seed=0,
                               step=0)
    found = compared(rollouts, spread, temperature=0.7)
    found.check()
    assert found.count > 40
    said = [r.logprobs[i] for r in rollouts for i, a in enumerate(r.is_action) if a]
    assert sum(said) / len(said) > -3.0  # it is a language model and this is language


# ---- the gate by itself ----

def by_hand(logprobs: list[float], versions: list[int]) -> Experience:
    count = len(logprobs)
    return Experience.of([
        Rollout([1] * (count + 1), [False] + [True] * count, [math.nan, *logprobs],
                [-1, *versions], 0, "stop", "a"),
        Rollout([1, 2], [False, True], [math.nan, -3.0], [-1, 1], 1, "stop", "b")])


def test_agreement_by_hand() -> None:
    experience = by_hand([-1.0, -2.0], [0, 1])
    nan = math.nan
    theirs = torch.tensor([nan, -1.5, -2.25, nan, -3.0])
    found = agreement(experience, theirs)
    assert found == Agreement(0.5, 0.75, 3, 0, ("a", 1, -1.0, -1.5))
    assert found.mean_abs == 0.25 and not found.exact
    assert agreement(experience, theirs, version=1) == Agreement(0.25, 0.25, 2, 1,
                                                                ("a", 2, -2.0, -2.25))
    assert agreement(experience, theirs, version=9) == Agreement(0.0, 0.0, 0, 3)
    broken = agreement(experience, torch.tensor([0.0, -1.0, nan, 0.0, -3.0]))
    assert broken.max_abs == math.inf and broken.worst is not None
    assert broken.worst[:3] == ("a", 2, -2.0)
    both = Agreement.of([Agreement(0.0, 0.0, 2, 1), found, broken])
    assert (both.max_abs, both.count, both.skipped) == (math.inf, 8, 1)
    assert both.worst == broken.worst
    with pytest.raises(ValueError, match="one per token"):
        agreement(experience, theirs[1:])


def test_micro_batches_hold_every_sequence_once() -> None:
    experience = Experience.of(sixty_four(1.0))
    lengths = experience.lengths
    for budget, at_least in ((int(lengths.max()), 1), (100, 1), (100, 40), (5000, 70)):
        found = micro_batches(experience, budget, at_least=at_least)
        assert sorted(i for m in found for i in m.sequences) == list(range(64))
        assert len(found) >= at_least
        for m in found:
            assert int(lengths[list(m.sequences)].sum()) <= budget
            assert m.num_tokens == m.batch().num_tokens == len(m.targets_T)
            assert m.valid == int((m.targets_T >= 0).sum())
        blank = [m for m in found if m.experience is None]
        assert len(blank) == max(0, at_least - 64)
    lower = -(-int(lengths.sum()) // 100)
    assert len(micro_batches(experience, 100)) <= lower * 1.5
    with pytest.raises(ValueError, match="never split"):
        micro_batches(experience, int(lengths.max()) - 1)


def blanks(layout: Layout) -> bool:
    """Ranks with nothing in common but the number of forwards."""
    spread = trainer(layout=layout)
    rollouts = on_one(FP32, 1.0)
    share = rollouts[:1] if dist.get_rank() == 0 else rollouts[1:]
    experience = Experience.of(share)
    scores = score(spread, experience, token_budget=CONTEXT, with_entropy=True)
    assert scores.entropy_T is not None
    inside = experience.is_action_T
    assert bool((scores.entropy_T[inside] > 0).all() and scores.entropy_T[~inside].isnan().all())
    return agreement(experience, scores.logprobs_T).exact


def test_ranks_with_less_to_score_stay_in_step(ranks: RankPool) -> None:
    assert ranks.run(2, blanks, Layout(dp=2, zero=3)) == [True, True]
