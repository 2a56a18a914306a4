"""What a rank holds between steps, byte for byte: parameters, gradients and optimizer states are
these closed forms, with the padding that FSDP adds to rows that do not divide.

    zero  parameters     gradients      states (AdamW: two of them; Muon: one)
    0     all            all            all
    1, 2  all            own rows       own rows
    3     padded rows    padded rows    own rows          fp32, so 4 bytes each
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bench.parity import MODELS, Rows
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.parallel.apply import Spread, apply
from kilter.parallel.pipeline.stage import TIED
from kilter.train.optimizer import Optimizer, OptimizerConfig
from tests.parallel.gradients import backward, document
from tests.ranks import RankPool

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bytes:
    """Of one rank."""

    parameters: int
    gradients: int
    states: int


@dataclass(frozen=True)
class Share:
    """Which of the ranks that share a state this is."""

    zero: int
    ranks: int
    index: int

    def own(self, shape: Shape) -> int:
        """Elements of a tensor that this rank steps."""
        rows, n, i = shape[0], self.ranks, self.index
        if self.zero == 0 or n == 1:
            mine = rows
        elif self.zero < 3:
            mine = rows // n + (i < rows % n)
        else:
            mine = max(0, min(rows, (i + 1) * -(-rows // n)) - i * -(-rows // n))
        return mine * _row(shape)

    def padded(self, shape: Shape) -> int:
        return -(-shape[0] // self.ranks) * _row(shape)


def _row(shape: Shape) -> int:
    return shape[1] if len(shape) > 1 else 1


def closed_form(share: Share, trained: dict[str, Shape], frozen: list[Shape], copied: list[Shape],
                config: OptimizerConfig) -> Bytes:
    """
    Args:
        trained, frozen: the parameters of a rank's place on the tensor and pipeline axes.
        copied: of a tied head in a pipeline, which the optimizer does not see.
    """
    with_gradient = [*trained.values(), *copied]
    if share.zero == 3 and share.ranks > 1:
        parameters = sum(share.padded(shape) for shape in [*with_gradient, *frozen])
        gradients = sum(share.padded(shape) for shape in with_gradient)
    else:
        parameters = sum(shape[0] * _row(shape) for shape in [*with_gradient, *frozen])
        gradients = sum(share.own(shape) for shape in with_gradient)
    states = 0
    for name, shape in trained.items():
        muon = config.name == "muon" and name.startswith("layers.") and len(shape) == 2
        states += share.own(shape) * ((1 if muon else 2) + config.offload) + (not muon)  # the step
    return Bytes(4 * parameters, 4 * gradients, 4 * states)


def more_bytes(before: int, expected: int) -> int:
    """Live bytes that there are more than before. Gloo's threads drop the tensors of a collective
    some time after it has ended, so what is more than expected is counted again."""
    deadline = time.monotonic() + 60.0
    while (more := live_bytes() - before) > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return more


def live_bytes() -> int:
    """Of all tensors' storages in this process."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def work(vocab: int) -> list[Rows]:
    return [document([(m + 3 * i) % vocab for i in range(8)]) for m in range(2)]


def made(model: str, mesh: Mesh, frozen: str) -> Spread:
    with torch.device("meta"):
        decoder = Decoder(replace(MODELS[model](), layers=MODELS[model]().layers[:2]))
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return apply(decoder, mesh)


def held(model: str, layout: Layout, config: OptimizerConfig, frozen: str) -> tuple[Bytes, Bytes]:
    """(what there is more after each: the model, a step's gradients, the step; its closed form)."""
    mesh = Mesh(layout)
    if layout.zero == 3:  # torch's mesh has a tensor of ranks
        mesh.device_mesh(*(["replicate"] if layout.replicate > 1 else []), "dp_shard_cp")
    before = live_bytes()
    spread = made(model, mesh, frozen)
    spread.initialise(seed=1)
    decoders = [part.stage.decoder for part in spread.parts]
    axis = mesh.axis("dp_shard_cp")
    shapes = {name: spread.shards[name].local_shape for name in spread.local}
    trained = {h.name: shapes[h.name] for h in spread.held}
    names = [name for d in decoders for name, _ in d.named_parameters()]
    copied = [spread.shards[TIED].local_shape] * (names.count(TIED) - (TIED in shapes))
    form = closed_form(Share(layout.zero, axis.size, axis.index), trained,
                       [shapes[n] for n in shapes.keys() - trained.keys()], copied, config)

    model_bytes = more_bytes(before, form.parameters)
    tables = [t for d in decoders for pair in d.rope_tables(torch.device("cpu")).values()
              for t in pair]
    packs = work(MODELS[model]().vocab_size)
    before = live_bytes()
    backward(spread, packs, 14 * layout.dp)
    gradient_bytes = more_bytes(before, form.gradients)
    optimizer = Optimizer(spread.held, config, mesh.axis("dp_cp_tp"))
    optimizer.step(1.0)
    spread.updated()  # gradients are dropped
    found = Bytes(model_bytes, gradient_bytes, more_bytes(before, form.states))
    assert len(tables) == 2 * len(decoders)
    return found, form


ADAMW, MUON = OptimizerConfig(), OptimizerConfig("muon")


@pytest.mark.parametrize(("model", "layout", "config", "frozen"), [
    ("untied", Layout(dp=4), ADAMW, ""),
    ("untied", Layout(dp=4, zero=1), ADAMW, ""),
    ("untied", Layout(dp=3, zero=2), MUON, ""),
    ("untied", Layout(dp=3, zero=3), ADAMW, "layers.0"),
    ("tied", Layout(dp=4, replicate=2, zero=2), OptimizerConfig(offload=True), "layers.0"),
    ("tied", Layout(dp=4, replicate=2, zero=3), MUON, ""),
    ("everything", Layout(tp=2, dp=2, zero=1), ADAMW, ""),
    ("everything", Layout(tp=2, cp=2, zero=3), ADAMW, ""),
    ("tied", Layout(pp=2, dp=2, zero=3), ADAMW, ""),
    ("tied", Layout(pp=2, dp=2, zero=2), ADAMW, "")], ids=str)
def test_ranks_hold_their_closed_form(ranks: RankPool, model: str, layout: Layout,
                                      config: OptimizerConfig, frozen: str) -> None:
    found = ranks.run(layout.world, held, model, layout, config, frozen)
    for rank, (there, form) in enumerate(found):
        assert there == form, f"rank {rank}"
    whole = 4 * sum(p.numel() for p in made(model, Mesh.single(), "").model.parameters())
    if (layout.pp, layout.tp, layout.zero) == (1, 1, 3):
        assert found[0][0].parameters < 1.02 * whole / layout.shard
