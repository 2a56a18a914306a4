"""Adapters train alike in every layout, start as nothing, and go off without a trace."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.parity import MODELS, Case, Outcome, compare, data, owned_parts
from kilter.job import build, dump
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.heads import split_model
from kilter.parallel.recompute import Recompute
from kilter.parallel.tensor import placements
from kilter.train.export import whole_parameters
from kilter.train.lora import LoraConfig, adapters_off, add_adapters, init_adapters, merge
from kilter.train.optimizer import Optimizer
from kilter.train.step import train_step
from tests.parallel.boxes import covers
from tests.ranks import RankPool

LORA = LoraConfig(rank=3, alpha=5.0)
DORA = LoraConfig(rank=3, alpha=5.0, dora=True)
PARTIAL = LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "up_proj", "down"), dora=True)


def decoder(spec: ModelSpec, config: LoraConfig | None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    if config is not None:
        add_adapters(model, config)
    return model


def random_adapters(spread: Spread, seed: int = 3) -> dict[str, Tensor]:
    """Whole adapters that change much, by name, the same whatever the layout; not so much that a
    rounding error grows a hundredfold in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shard in sorted(spread.shards.items()):
        if ".adapter." in name:
            value = torch.randn(shard.shape, generator=generator) * 0.05
            found[name] = value.abs() + 0.1 if name.endswith("magnitude") else value
    return found


LAYOUTS = {
    "ddp2": Layout(dp=2), "zero1-2": Layout(dp=2, zero=1), "zero2-2": Layout(dp=2, zero=2),
    "zero3-2": Layout(dp=2, zero=3), "tp2": Layout(tp=2, sequence_parallel=False),
    "tp2+sp": Layout(tp=2), "tp2+sp overlap": Layout(tp=2, overlap_tp=True),
    "tp4+sp overlap": Layout(tp=4, overlap_tp=True),
    "tp4": Layout(tp=4, sequence_parallel=False),
    "tp2+sp zero3-2": Layout(tp=2, dp=2, zero=3),
}
PARITY = [("ddp2", LORA, "tied"), ("zero1-2", DORA, "tied"), ("zero2-2", PARTIAL, "everything"),
          ("zero3-2", LORA, "tied"), ("zero3-2", DORA, "tied"), ("tp2", LORA, "tied"),
          ("tp2", DORA, "tied"), ("tp2+sp", LORA, "tied"), ("tp2+sp", DORA, "tied"),
          ("tp4", DORA, "everything"),  # four ranks share the one KV head
          ("tp2+sp zero3-2", LORA, "tied"), ("tp2+sp zero3-2", DORA, "tied"),
          ("tp2+sp", PARTIAL, "everything"), ("tp2+sp overlap", LORA, "tied"),
          ("tp2+sp overlap", PARTIAL, "everything"), ("tp4+sp overlap", DORA, "everything")]


def train_adapters(case: Case, config: LoraConfig) -> Outcome:
    """Three steps of a case of the parity matrix with adapters, in this rank."""
    spec = MODELS[case.model]()
    mesh = Mesh(case.layout) if case.layout.world > 1 else Mesh.single()
    spread = apply(decoder(spec, config), mesh, recompute=case.recompute)
    spread.initialise(seed=1)
    spread.fill(random_adapters(spread))
    held = {h.name for h in spread.held}
    frozen = {name: p.detach().clone() for name, (p, _) in spread.local.items() if name not in held}
    optimizer = Optimizer(spread.held, case.optimizer, mesh.axis("dp_cp_tp"))
    losses, norms = [], []
    for micro_batches in data(spec.vocab_size):
        mine = micro_batches[mesh.axis("dp").index:4:mesh.axis("dp").size]
        result = train_step(spread, optimizer, mine, max_norm=0.5)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    assert held == set(random_adapters(spread)) == optimizer.states().keys()
    assert all(torch.equal(spread.local[name][0], before) for name, before in frozen.items())
    return Outcome(losses, norms, owned_parts(spread))


@cache
def alone(config: LoraConfig, model: str) -> Outcome:
    return train_adapters(Case("one", Layout(), model), config)


@pytest.mark.parametrize(("layout", "config", "model"), PARITY)
def test_adapters_train_alike_in_every_layout(ranks: RankPool, layout: str, config: LoraConfig,
                                              model: str) -> None:
    case = Case(layout, LAYOUTS[layout], model)
    one = alone(config, model)
    difference = compare(ranks.run(case.layout.world, train_adapters, case, config), one)
    assert difference.good, difference


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_changes_nothing(mode: Any) -> None:
    parts = ("attention", "mlp") if mode == "selective" else Recompute.parts
    recompute = Recompute(mode, parts=parts)
    again = train_adapters(Case("recompute", Layout(), recompute=recompute), DORA)
    one = alone(DORA, "tied")
    assert again.losses == one.losses and again.norms == one.norms


def test_every_adapter_moves() -> None:
    spread = apply(decoder(MODELS["tied"](), DORA), Mesh.single())
    before = random_adapters(spread)
    after = {name: part for name, ((_, part),) in alone(DORA, "tied").parts.items()}
    assert all(not torch.equal(after[name], before[name]) for name in before)


# ---- exactness, starting, switching off

def merged_and_scored(config: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Of two tensor-parallel ranks: whole parameters, merged, and adapted log-probabilities."""
    spec = MODELS["everything"]()
    spread = apply(decoder(spec, config), Mesh(Layout(tp=2)))
    spread.initialise(seed=1)
    spread.fill(random_adapters(spread))
    whole = {name: value for name, value in whole_parameters(spread) if value is not None}
    tokens = torch.arange(18) * 7
    with torch.no_grad():
        scores = spread.forward(Batch.of([tokens.tolist()]), tokens.roll(-1))
    return whole, merge(spec, config, whole), scores


@pytest.mark.parametrize("config", [LORA, DORA, PARTIAL], ids=["lora", "dora", "partial"])
def test_tensor_parallel_ranks_merge_to_the_same_model(ranks: RankPool, config: LoraConfig) -> None:
    (whole, merged, scores), _ = ranks.run(2, merged_and_scored, config)
    plain = apply(decoder(MODELS["everything"](), None), Mesh.single())
    plain.fill(merged)
    wanted = random_adapters(apply(decoder(MODELS["everything"](), config), Mesh.single()))
    assert all(torch.equal(whole[name], value) for name, value in wanted.items())
    tokens = torch.arange(18) * 7
    with torch.no_grad():
        found = plain.forward(Batch.of([tokens.tolist()]), tokens.roll(-1))
    assert (found - scores).abs().max() < 1e-4


def facts_of(layout: Layout, model: str, config: LoraConfig) -> dict[str, Tensor]:
    """Log-probabilities at the start, with changed adapters, and with those off."""
    spec = MODELS[model]()
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    sequences = [[i * 5 % spec.vocab_size for i in range(17)], [3, 1, 4, 1, 5, 9, 2]]
    targets = torch.tensor([*sequences[0][1:], -100, *sequences[1][1:], -100])
    plain, spread = (apply(decoder(spec, c), mesh) for c in (None, config))
    score = partial(torch.no_grad()(lambda s: s.forward(Batch.of(sequences), targets)))
    plain.initialise(seed=1)
    spread.initialise(seed=1)
    init_adapters(spread, config)
    found = {"plain": score(plain), "start": score(spread)}
    found |= {name: p.detach().clone() for name, (p, shard) in spread.local.items()
              if name.endswith("layers.0.attn.qkv.adapter.q_proj.lora_a")}
    if layout.zero < 3:
        spread.fill(random_adapters(spread))
        found["changed"] = score(spread)
    with adapters_off(spread.model):
        found["off"] = score(spread)
    if layout.zero < 3:
        assert torch.equal(score(spread), found["changed"])
    return found


@pytest.mark.parametrize("config", [LORA, DORA], ids=["lora", "dora"])
def test_adapters_start_as_nothing_and_go_off_without_a_trace(config: LoraConfig) -> None:
    found = facts_of(Layout(), "tied", config)
    assert torch.equal(found["start"], found["plain"])
    assert torch.equal(found["off"], found["plain"])
    assert (found["changed"] - found["plain"]).abs().max() > 0.01


def test_adapters_start_as_nothing_on_rounded_weights_and_stock_kernels() -> None:
    spec = MODELS["tied"]()
    scores = []
    for config in (None, DORA):
        with torch.device("meta"):
            model = Decoder(spec, exact=False)
        if config is not None:
            add_adapters(model, config)
        spread = apply(model, Mesh.single(), weights=torch.bfloat16)
        spread.initialise(seed=1)
        if config is not None:
            init_adapters(spread, config)
        with torch.no_grad():
            scores.append(spread.forward(Batch.of([[5, 6, 7]]), torch.tensor([6, 7, -100])))
    assert torch.equal(*scores)


@pytest.mark.parametrize(("layout", "model"), [
    (Layout(tp=2, sequence_parallel=False), "tied"), (Layout(tp=4, sequence_parallel=False),
                                                      "everything"), (Layout(tp=2), "tied")])
def test_the_forward_has_the_bits_of_one_rank(ranks: RankPool, layout: Layout, model: str) -> None:
    one = facts_of(Layout(), model, DORA)
    for found in ranks.run(layout.world, facts_of, layout, model, DORA):
        for name, value in one.items():
            assert torch.equal(found[name], value), name


def test_adapters_start_alike_under_zero3(ranks: RankPool) -> None:
    one = facts_of(Layout(), "tied", DORA)
    found = ranks.run(2, facts_of, Layout(dp=2, zero=3), "tied", DORA)
    (name,) = [name for name in one if name.endswith("lora_a")]
    assert torch.equal(torch.cat([f[name] for f in found]), one[name])
    assert all(torch.equal(f["start"], one["start"]) for f in found)


def test_a_starts_as_in_peft() -> None:
    """Uniform within sqrt(6 / ((1 + 5) K)), B zero, magnitudes the norms of rows."""
    spec = MODELS["untied"]()
    spread = apply(decoder(spec, DORA), Mesh.single())
    spread.initialise(seed=1)
    init_adapters(spread, DORA)
    tensors = {name: p for name, (p, _) in spread.local.items()}
    a = torch.cat([p.flatten() for name, p in tensors.items()
                   if name.endswith("lora_a") and p.shape[1] == 32])
    assert 0.99 < a.abs().max() * 32 ** 0.5 <= 1.0 and abs(a.mean()) < 0.01
    assert all(not p.any() for name, p in tensors.items() if name.endswith("lora_b"))
    up = tensors["layers.0.mlp.gate_up.weight"][spec.ffn_size:]
    torch.testing.assert_close(tensors["layers.0.mlp.gate_up.adapter.up_proj.magnitude"],
                               up.norm(dim=1))


@pytest.mark.parametrize("degree", range(1, 9))
def test_owned_boxes_cover_every_adapter_once(degree: int) -> None:
    for name in ("tied", "everything"):
        spec = MODELS[name]()
        try:
            parts = split_model(spec, degree)
        except ValueError:
            continue
        model = decoder(spec, DORA)
        every = [placements(model, part, rank) for rank, part in enumerate(parts)]
        for parameter in random_adapters(apply(model, Mesh.single())):
            boxes = [box for shards in every for box, own in
                     zip(shards[parameter].boxes, shards[parameter].owned, strict=True) if own]
            assert covers(every[0][parameter].shape, boxes), parameter


def test_an_initialised_decoder_takes_adapters_too() -> None:
    """Without ranks: a model in memory, adapters added and loaded by name."""
    spec = MODELS["tied"]()
    model = init_weights(Decoder(spec), 1)
    batch = Batch.of([[1, 2, 3]])
    before = model(batch).detach()
    add_adapters(model, LORA)
    spread = apply(decoder(spec, LORA), Mesh.single())
    model.load_state_dict(random_adapters(spread), strict=False)
    assert not torch.equal(model(batch), before)
    with adapters_off(model):
        assert torch.equal(model(batch), before)
    with pytest.raises(ValueError, match="has adapters already"):
        add_adapters(model, LORA)


# ---- what cannot be

@pytest.mark.parametrize(("settings", "message"), [
    ({"rank": 0}, "rank is 0"), ({"alpha": 0.0}, "alpha is 0.0"),
    ({"targets": ()}, "must be some of qkv, out"), ({"targets": ("query",)}, "query"),
    ({"path": "a", "seed": 3}, "seed is 3, but with path nothing is drawn")])
def test_a_wrong_config_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**settings)


def test_a_config_is_a_table_of_a_job() -> None:
    config = LoraConfig(8, 16.0, ("qkv", "down_proj"), dora=True)
    assert build(LoraConfig, dump(config)) == config
    assert config.projections == ("q_proj", "k_proj", "v_proj", "down_proj")
    assert LoraConfig(4, 8.0).scale == 2.0 and LoraConfig(4, 8.0, rslora=True).scale == 4.0
