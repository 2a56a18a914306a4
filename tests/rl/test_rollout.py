"""Rollouts: what a sample depends on, when it ends, turns, interruptions, memory; and the
temperature and entropy that the trainer scores them with."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kilter.mesh.layout import Layout
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.ops.head import head_logprobs, head_loss
from kilter.ops.linear import linear
from kilter.ops.logprob import tempered, token_logprobs
from kilter.rl.experience import Experience, Rollout
from kilter.rl.rollout import Prompt, RolloutConfig, RolloutEngine, check_params, sample_seed
from kilter.serve.params import GrammarSpec, SamplingParams
from tests.ranks import RankError, RankPool
from tests.rl.tiny_policy import (
    CONTEXT,
    PARAMS,
    VOCAB,
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


def by_id(rollouts: list[Rollout]) -> dict[str, tuple[Any, ...]]:
    return {r.id: (tuple(r.tokens), tuple(map(str, r.logprobs)), r.finish) for r in rollouts}


def answer(rollout: Rollout) -> list[int]:
    return [t for t, action in zip(rollout.tokens, rollout.is_action, strict=True) if action]


# ---- what a sample depends on ----

def test_a_sample_is_a_matter_of_its_own() -> None:
    engine = rollout_engine()
    asked = prompts(9, n=3)
    every = by_id(engine.generate(asked, PARAMS, seed=3, step=1))
    assert list(every) == [f"p{i}/{k}" for i in range(9) for k in range(3)]
    assert by_id(engine.generate(asked[::-1], PARAMS, seed=3, step=1)) == every
    some = engine.generate([dataclasses.replace(p, n=2) for p in asked[4:6]], PARAMS, seed=3,
                           step=1)
    assert by_id(some).items() <= every.items()
    answers = [tokens for tokens, *_ in every.values()]
    assert len(set(answers)) == 27
    for seed, step in ((4, 1), (3, 2)):
        other = by_id(engine.generate(asked, PARAMS, seed=seed, step=step))
        assert all(other[i] != every[i] for i in every)


def test_seeds_are_apart() -> None:
    seeds = {sample_seed(run, step, f"p{i}/{k}") for run in range(4) for step in range(4)
             for i in range(30) for k in range(4)}
    assert len(seeds) == 4 * 4 * 30 * 4
    assert sample_seed(1, 1, "1/0") != sample_seed(11, 1, "/0")
    assert min(seeds) >= 0 and max(seeds) < 2**64


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.5])
def test_log_probabilities_are_of_the_tempered_distribution(temperature: float) -> None:
    """Of torch's own log-softmax in double, within rounding; the first token's too."""
    params = dataclasses.replace(PARAMS, temperature=temperature)
    rollouts = rollout_engine().generate(prompts(6), params, seed=0, step=0)
    model = trainer().model
    for rollout in rollouts:
        with torch.no_grad():
            logits_TV = model(Batch.of([rollout.tokens])).double() / temperature
        logs_TV = logits_TV.log_softmax(-1)
        for t in range(1, len(rollout.tokens)):
            if rollout.is_action[t]:
                expected = float(logs_TV[t - 1, rollout.tokens[t]])
                assert rollout.logprobs[t] == pytest.approx(expected, abs=1e-4)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """1500 first tokens at a temperature: the chi-square statistic of the likeliest dozen."""
    params = dataclasses.replace(PARAMS, max_tokens=1, temperature=0.6)
    rollouts = rollout_engine(config(scheduler={"max_running": 512})).generate(
        [Prompt([9, 8, 7], 0, "p", 1500)], params, seed=0, step=0)
    chances = {r.tokens[-1]: math.exp(r.logprobs[-1]) for r in rollouts}
    statistic = 0.0
    for token in sorted(chances, key=lambda t: -chances[t])[:12]:
        expected = 1500 * chances[token]
        count = sum(r.tokens[-1] == token for r in rollouts)
        statistic += (count - expected) ** 2 / expected
    assert statistic < 33  # 12 degrees of freedom: one run in a thousand, and the seed is fixed


# ---- how an answer ends ----

@pytest.mark.parametrize("end", [0, 2, 5, 77])
def test_every_end_token_ends_and_counts_as_sampled(end: int) -> None:
    """0 is also the token that others pad with, 2 the tokenizer's own; the rest are given."""
    engine = rollout_engine(config(ends=(0, 5, 77)))
    rollouts = engine.generate(prompts(120), dataclasses.replace(PARAMS, max_tokens=40), seed=1,
                               step=0)
    ended = [r for r in rollouts if r.finish == "stop"]
    assert {answer(r)[-1] for r in ended} == {0, 2, 5, 77}
    mine = [r for r in ended if r.tokens[-1] == end]
    experience = Experience.of(mine)
    last_S = experience.cu_seqlens_S1[1:].long() - 1
    assert bool(experience.is_action_T[last_S].all())
    assert experience.targets()[last_S - 1].tolist() == [end] * len(mine)
    for r in rollouts:
        assert (r.finish == "length") == (answer(r)[-1] not in (0, 2, 5, 77))
        assert r.finish == "stop" or len(answer(r)) == 40 or len(r.tokens) == CONTEXT


def test_stop_strings_and_the_context() -> None:
    engine = rollout_engine(config(ends=()))
    text = tokenizer().decode([40])
    params = dataclasses.replace(PARAMS, stop=(text,), max_tokens=200, ignore_eos=True)
    rollouts = engine.generate(prompts(40), params, seed=1, step=0)
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert (r.finish == "stop") == (answer(r)[-1] == 40)
        assert r.finish == "stop" or len(r.tokens) == CONTEXT
    compared(rollouts, trainer()).check()


# ---- turns ----

def test_turns_with_an_environment() -> None:
    engine = rollout_engine()
    seen: dict[str, int] = {}

    def environment(rollout: Rollout) -> list[int] | None:
        assert rollout.finish == "stop" and rollout.is_action[-1]
        seen[rollout.id] = seen.get(rollout.id, 0) + 1
        return [100, 101, 102] if seen[rollout.id] < 3 else None

    params = dataclasses.replace(PARAMS, max_tokens=40)
    rollouts = engine.generate(prompts(16), params, seed=2, step=0, environment=environment)
    alone = by_id(engine.generate(prompts(16), params, seed=2, step=0))
    assert max(seen.values()) == 3 and {r.finish for r in rollouts} == {"stop", "length"}
    for prompt, rollout in zip(prompts(16), rollouts, strict=True):
        start, turns = len(prompt.ids), 0
        first, *_ = alone[rollout.id]
        assert tuple(rollout.tokens[:len(first)]) == first
        flags = rollout.is_action[start:]
        assert flags[0]
        for t, action in enumerate(flags, start):
            assert math.isnan(rollout.logprobs[t]) is not action
            assert rollout.versions[t] == (0 if action else -1)
            if not action and rollout.is_action[t - 1]:
                turns += 1
                assert rollout.tokens[t:t + 3] == [100, 101, 102]
        assert turns == min(seen.get(rollout.id, 0), 2)
        assert len(answer(rollout)) <= 40
    compared(rollouts, trainer()).check()


def test_an_observation_that_leaves_no_room_is_not_taken() -> None:
    engine = rollout_engine()
    rollouts = engine.generate(prompts(8), dataclasses.replace(PARAMS, max_tokens=60), seed=2,
                               step=0, environment=lambda _: [1] * CONTEXT)
    assert {r.finish for r in rollouts} == {"length"}
    assert all(all(r.is_action[len(p.ids):]) for p, r in zip(prompts(8), rollouts, strict=True))


def test_an_environment_that_fails_leaves_nothing_behind() -> None:
    engine = rollout_engine()

    def environment(rollout: Rollout) -> None:
        raise OSError("the tool is gone")

    with pytest.raises(OSError, match="the tool is gone"):
        engine.generate(prompts(8), PARAMS, seed=2, step=0, environment=environment)
    assert engine.engine is not None and not engine.engine.busy
    engine.engine.check_integrity()
    assert len(engine.generate(prompts(8), PARAMS, seed=2, step=0)) == 8


# ---- interruptions ----

@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_an_interrupted_answer_is_the_one_it_would_have_been(in_flight: Any) -> None:
    """As long as the weights are the same."""
    engine = rollout_engine()
    params = dataclasses.replace(PARAMS, max_tokens=30)
    expected = by_id(engine.generate(prompts(10), params, seed=3, step=4))
    left, rounds, done = prompts(10), 0, {}

    def environment(rollout: Rollout) -> None:
        engine.interrupt()

    found = engine.generate(left, params, seed=3, step=4, environment=environment)
    while partials := [r for r in found if r.finish == "abort"]:
        rounds += 1
        done |= by_id([r for r in found if r.finish != "abort"])
        if rounds == 4:
            environment = None  # type: ignore[assignment]
        found = engine.resume(partials, params, seed=3, step=4, environment=environment,
                              in_flight=in_flight)
    assert rounds >= 2 and done | by_id(found) == expected
    with pytest.raises(ValueError, match="are finished"):
        engine.resume(found, params, seed=3, step=4)
    assert engine.engine is not None and not engine.engine.busy
    engine.engine.check_integrity()


# ---- memory and weights ----

def test_sleep_gives_the_cache_back_and_wake_takes_it_again() -> None:
    made = spec()

    def caches() -> int:
        gc.collect()
        return sum(type(t) is Tensor and t.dim() == 3
                   and t.shape == (4096, made.num_kv_heads, made.head_dim)
                   for t in gc.get_objects())

    others = caches()
    engine = rollout_engine()
    held = engine.kv_bytes
    assert caches() > others
    assert held == 4096 * made.kv_elements_per_token * 4
    expected = by_id(engine.generate(prompts(6), PARAMS, seed=0, step=0))
    for _ in range(4):
        pool = engine._executor.pool
        engine.sleep()
        assert engine.kv_bytes == 0 and not pool.keys
        assert caches() <= others
        with pytest.raises(RuntimeError, match=r"call wake\(\)"):
            engine.generate(prompts(1), PARAMS, seed=0, step=0)
        engine.wake()
        assert engine.kv_bytes == held
        assert by_id(engine.generate(prompts(6), PARAMS, seed=0, step=0)) == expected
    engine.sleep(weights=True)
    engine.wake()
    with pytest.raises(RuntimeError, match="not complete"):
        engine.generate(prompts(1), PARAMS, seed=0, step=0)
    with pytest.raises(ValueError, match="no weights yet"):
        engine.update([{"norm.weight": torch.ones(32)}], 1)
    engine.update(parts(engine, whole(made, 0)), 0)
    assert by_id(engine.generate(prompts(6), PARAMS, seed=0, step=0)) == expected


def test_what_update_refuses() -> None:
    engine = RolloutEngine(spec(), tokenizer(), config())
    with pytest.raises(RuntimeError, match="not complete"):
        engine.generate(prompts(1), PARAMS, seed=0, step=0)
    with pytest.raises(ValueError, match="no weights yet"):
        engine.update([{"norm.weight": torch.ones(32)}], 0)
    engine = rollout_engine()
    for part, message in (({"nobody.weight": torch.ones(VOCAB, 32)}, "is not a parameter"),
                          ({"norm.weight": torch.ones(31)}, r"\[31\].*\[32\]"),
                          ({"norm.weight": torch.ones(32).bfloat16()}, "in float32"),
                          ({"embed.weight": torch.ones(VOCAB, 32).bfloat16()}, "in float32")):
        with pytest.raises(ValueError, match=message):
            engine.update([part], 1)
        with pytest.raises(RuntimeError, match="not complete"):
            engine.generate(prompts(1), PARAMS, seed=0, step=0)
        engine.update(parts(engine, whole(spec(), 0)), 1)
    with pytest.raises(ValueError, match="0 or more"):
        engine.update([], -1)
    assert len(engine.generate(prompts(1), PARAMS, seed=0, step=0)) == 1


@pytest.mark.parametrize(("setting", "value"), [
    ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 1.0),
    ("frequency_penalty", 1.0), ("repetition_penalty", 1.1), ("logit_bias", {3: 1.0}),
    ("min_tokens", 2), ("grammar", GrammarSpec("regex", "a+")), ("temperature", 0.0),
    ("max_tokens", 0), ("n", 2), ("best_of", 2), ("seed", 1), ("logprobs", 0)])
def test_settings_that_would_not_be_on_policy_are_refused(setting: str, value: Any) -> None:
    params = SamplingParams(**{setting: value})
    name = "temperature" if setting == "temperature" else setting
    with pytest.raises(ValueError, match=name):
        check_params(params)
    with pytest.raises(ValueError, match="cannot be sampled so"):
        rollout_engine().generate(prompts(1), params, seed=0, step=0)
    check_params(PARAMS)


def test_log_probabilities_of_a_certain_token_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        SamplingParams(tempered_logprobs=True, temperature=0.0)


def test_prompts_and_configs_that_cannot_be() -> None:
    engine = rollout_engine()
    for ids, message in (([], "is empty"), ([VOCAB], f"token id {VOCAB}"),
                         ([1] * CONTEXT, "no room for an answer")):
        with pytest.raises(ValueError, match=message):
            engine.generate([Prompt(ids, 0, "p")], PARAMS, seed=0, step=0)
    with pytest.raises(ValueError, match="comes twice"):
        engine.generate([*prompts(2), *prompts(1)], PARAMS, seed=0, step=0)
    with pytest.raises(ValueError, match=r"precision is 'int8'.*kv_dtype is 'int8'"):
        RolloutConfig(precision="int8", kv_dtype="int8")  # type: ignore[arg-type]


def failing(tp: int) -> str:
    """What this rank says where the environment fails, after which the engine goes on."""
    engine = rollout_engine(tp=tp)

    def environment(rollout: Rollout) -> None:
        raise OSError("the tool is gone")

    try:
        engine.generate(prompts(8), PARAMS, seed=2, step=0, environment=environment)
    except (OSError, RuntimeError) as error:
        assert by_id(engine.generate(prompts(3), PARAMS, seed=2, step=0))
        engine.sleep()
        assert engine.kv_bytes == 0
        engine.wake()
        engine.update(parts(engine, whole(spec(), 0)), 1)
        assert len(engine.generate(prompts(3), PARAMS, seed=2, step=0)) == 3
        return f"{type(error).__name__}: {error}"
    return "nothing"


def too_many() -> None:
    rollout_engine(tp=3)


def test_a_failure_on_the_first_rank_is_everybodys(ranks: RankPool) -> None:
    first, second = ranks.run(2, failing, 2)
    assert first == "OSError: the tool is gone"
    assert second.startswith("RuntimeError: The first rank") and "the tool is gone" in second
    with pytest.raises(RankError, match="must divide their number"):
        ranks.run(2, too_many)


# ---- temperature and entropy in the trainer's log-probabilities ----

def case(tokens: int = 9, dim: int = 24, vocab: int = 131) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, dim, generator=generator, requires_grad=True)
                 for n in (tokens, vocab))
    return (x, weight, torch.randint(vocab, (tokens,), generator=generator),
            torch.rand(tokens, generator=generator))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("block", [None, 4])
def test_the_heads_temperature(temperature: float, block: int | None) -> None:
    x, weight, targets, grad = case()
    out = head_logprobs(x, weight, targets, block=block, temperature=temperature)
    loss, logprobs = head_loss(x, weight, targets, grad, block=block, temperature=temperature)
    with torch.no_grad():
        logits = linear(x, weight)
        assert torch.equal(out, token_logprobs(logits / temperature, targets))
        assert torch.equal(tempered(logits, torch.full((9, 1), temperature)),
                           tempered(logits, temperature))
        assert torch.equal(out, logprobs)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    dense = ((x64 @ weight64.t()) / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad(dense, (x64, weight64), grad.double())
    for got, sign in ((torch.autograd.grad(out, (x, weight), grad), 1),
                      (torch.autograd.grad(loss, (x, weight)), -1)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(sign * a.double(), b, atol=1e-4, rtol=1e-4)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite and above"):
            head_logprobs(x, weight, targets, temperature=bad)


def scored(layout: Layout, temperature: float) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and the gradient of a sum of both, by this rank's boxes put
    into whole parameters."""
    spread = trainer(layout=layout)
    sequences = [p.ids for p in prompts(6)]
    batch = Batch.of([*sequences, [0] * (-sum(map(len, sequences)) % 8 or 8)])
    targets_T = batch.tokens_T.roll(-1)
    targets_T[::5] = -100
    weights_2T = torch.rand(2, len(targets_T), generator=torch.Generator().manual_seed(0))
    found: dict[str, Tensor] = {}
    # Every data-parallel rank does the same work; gradients are sums over them.
    share = 1 / spread.mesh.axis("dp").size

    def loss(forward: Any, k: int) -> Tensor:
        logprobs_T, entropy_T = forward(batch, targets_T, temperature=temperature,
                                        with_entropy=True)
        found.update(logprobs=logprobs_T.detach(), entropy=entropy_T.detach())
        total: Tensor = share * (weights_2T[0] * logprobs_T + weights_2T[1] * entropy_T).sum()
        return total

    spread.backward_all([batch], loss, lambda _: contextlib.nullcontext())
    spread.finish()
    with torch.no_grad():
        plain_T = spread.forward(batch, targets_T, temperature=temperature)
        assert torch.equal(plain_T, found["logprobs"])
    for held in spread.held:
        assert held.tensor.grad is not None
        whole_grad = torch.full(held.shard.shape, torch.nan)
        for box, _, view in held.shard.parts(held.tensor.grad):
            whole_grad[box.slices] = view
        found[held.name] = whole_grad
    return found


def dense(temperature: float) -> dict[str, Tensor]:
    """The same by torch's own functions on the logits."""
    model = Decoder(spec())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole(spec(), 0)[name])
    sequences = [p.ids for p in prompts(6)]
    batch = Batch.of([*sequences, [0] * (-sum(map(len, sequences)) % 8 or 8)])
    targets_T = batch.tokens_T.roll(-1)
    targets_T[::5] = -100
    weights_2T = torch.rand(2, len(targets_T), generator=torch.Generator().manual_seed(0))
    logs_TV = (model(batch).double() / temperature).log_softmax(-1)
    kept_T = targets_T >= 0
    logprobs_T = logs_TV.gather(1, targets_T.clamp(min=0)[:, None])[:, 0] * kept_T
    entropy_T = -(logs_TV.exp() * logs_TV).sum(-1) * kept_T
    (weights_2T[0] * logprobs_T + weights_2T[1] * entropy_T).sum().backward()
    return {"logprobs": logprobs_T.detach(), "entropy": entropy_T.detach(),
            **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(("layout", "temperature"), [
    (Layout(), 0.6), (Layout(), 1.0), (Layout(tp=2), 0.6), (Layout(tp=4), 1.5),
    (Layout(dp=2, zero=3), 0.6)], ids=str)
def test_entropies_and_gradients_at_a_temperature(ranks: RankPool, layout: Layout,
                                                  temperature: float) -> None:
    want = dense(temperature)
    answers = ([scored(layout, temperature)] if layout.world == 1
               else ranks.run(layout.world, scored, layout, temperature))
    one = scored(Layout(), temperature)
    covered = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in want.items()}
    for found in answers:
        assert torch.equal(found["logprobs"], one["logprobs"])
        assert found.keys() == want.keys()
        for name, value in found.items():
            here = ~value.isnan()
            covered[name] |= here
            torch.testing.assert_close(value[here].double(), want[name][here].double(), atol=2e-4,
                                       rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert all(bool(c.all()) for c in covered.values())


def test_the_losses_temperature_and_what_does_not_go_together() -> None:
    spread = trainer()
    batch = Batch.of([[5, 6, 7, 8, 9, 10]])
    targets_T, counts_T = batch.tokens_T.roll(-1), torch.full((6,), 0.25)
    loss = spread.forward(batch, targets_T, counts_T, temperature=0.6)
    rows_T = spread.forward(batch, targets_T, temperature=0.6)
    torch.testing.assert_close(loss, -(0.25 * rows_T).sum())
    with pytest.raises(ValueError, match="leave one of the two out"):
        spread.forward(batch, targets_T, counts_T, with_entropy=True)
    with pytest.raises(ValueError, match="above 1e-4"):
        spread.forward(batch, targets_T, temperature=0.0)
