"""One `apply`: a plain decoder on the meta device and a mesh in, this rank's trainable part out.

    with torch.device("meta"):
        model = Decoder(spec)
    spread = apply(model, mesh)                 # cut, wrapped, memory taken
    spread.load(source)                         # or spread.initialise(seed)
    ...
    spread.backward_all(batches, loss, phase); spread.finish()
    norm = gradient_norm(spread.held, mesh.axis("world"))
    optimizer.step(); spread.updated()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.mesh.mesh import Mesh
from kilter.models.adapter import PROJECTIONS, arrangement
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import initial
from kilter.models.linear import Embedding, Linear
from kilter.models.rounding import rounded
from kilter.models.spec import ModelSpec
from kilter.models.value import ValueModel
from kilter.parallel.context.plan import ContextConfig, check_context
from kilter.parallel.data import (
    DataParallel,
    FullyShardedStates,
    Held,
    Replicated,
    ShardedStates,
)
from kilter.parallel.heads import split_model
from kilter.parallel.load import fill, load_shards
from kilter.parallel.pipeline.executor import (
    Part,
    Phase,
    Pipeline,
    PipelineConfig,
    Score,
    lanes,
)
from kilter.parallel.pipeline.stage import TIED, DeferredGrads, Stage, cut
from kilter.parallel.pipeline.tied import TiedCopy
from kilter.parallel.recompute import Recompute, apply_recompute
from kilter.parallel.shards import Shard
from kilter.parallel.shared import SharedGrads, may_differ
from kilter.parallel.tensor import apply_tensor
from kilter.weights.bridge import ModelSource


@dataclass
class Spread:
    """A rank's part of a model, ready to train.

    Attributes:
        model: the decoder with this rank's tensors; in a pipeline, with the modules of its stages
            only, so that it cannot be run.
        shards: what of every parameter a rank's place on the tensor axis has, of all stages and
            before data parallelism cuts it further.
        local: every parameter's elements on this rank, and whether it counts for them: of ranks
            that hold the same ones, one does.
        parts: its stages, one where there is no pipeline.
        context: how attention works where sequences are spread over ranks.
        pipeline: what runs the stages, where there is one.
    """

    mesh: Mesh
    model: Decoder
    shards: dict[str, Shard]
    local: dict[str, tuple[nn.Parameter, Shard]]
    parts: list[Part] = field(repr=False)
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: Pipeline | None = field(default=None, repr=False)
    _tied: TiedCopy | None = field(default=None, repr=False)
    _shared: SharedGrads | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if may_differ(self.mesh.layout):
            self._shared = SharedGrads(self.held, self.shards, self.mesh)

    @property
    def held(self) -> list[Held]:
        """What the optimizer steps (trainable parameters only)."""
        return [held for part in self.parts for held in part.data.held
                if self._tied is None or held is not self._tied.copy]

    @property
    def forward(self) -> Callable[..., Tensor]:
        """(batch, targets_T) -> log-probabilities [T], with counts a loss: see `TokenLogprobs`.
        Of a model with a value head: (batch) -> values [T], see `token_values`.

        Raises:
            ValueError: in a pipeline, where no rank has the whole model: `backward_all` and
                `forward_all` go through its stages.
        """
        if self.pipeline is not None:
            raise ValueError("In a pipeline no rank has the whole model to run; use forward_all or "
                             "backward_all, which go through all stages.")
        return self.parts[0].stage

    def backward_all(self, batches: Sequence[Batch], loss: Score, phase: Phase) -> Tensor:
        """Forward and backward of a step's micro-batches; gradients are whole after `finish`.

        Args:
            batches: this rank's, the same on all ranks of a pipeline and of a tensor axis.
            loss: (forward, number of the micro-batch) -> the scalar to go back from. ``forward``
                takes what `TokenLogprobs.forward` takes. In a pipeline, asked on the ranks of its
                last stage only.
            phase: entered around parts of the work.

        Returns:
            float64: the sum of the losses; 0 where none was asked for.
        """
        if self.pipeline is not None:
            return self.pipeline.run(batches, loss, phase)
        (part,) = self.parts
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type)
        for k in range(len(batches)):
            with phase("forward"):
                value = loss(part.stage, k)
                total += value.detach()
            with phase("backward"):
                part.data.begin(last=k == len(batches) - 1)
                value.backward()
        return total

    @torch.no_grad()
    def forward_all(self, batches: Sequence[Batch], score: Score) -> list[Tensor | None]:
        """``score(forward, k)`` of every micro-batch, without gradients; in a pipeline None but on
        the ranks of its last stage. All its ranks take part."""
        if self.pipeline is not None:
            return self.pipeline.forward(batches, score)
        return [score(self.parts[0].stage, k) for k in range(len(batches))]

    def finish(self) -> None:
        """After the step's last backward: gradients in `held` are sums over all ranks."""
        for part in self.parts:
            part.data.finish()
        if self._tied is not None:
            self._tied.add_grads()
        if self._shared is not None:
            self._shared.agree()

    def updated(self) -> None:
        """After the optimizer's step, or another change of what is held."""
        if self._tied is not None:
            self._tied.step()
        for part in self.parts:
            part.data.updated()

    def load(self, source: ModelSource) -> int:
        """Fills the model from a source; every rank reads only its own bytes. What the source does
        not have stays as it is: a value head is zero from the start.

        Returns:
            Bytes this rank took from the files.
        """
        named = {name: parameter for name, (parameter, _) in self.local.items()
                 if name in source.maps}
        taken = load_shards(named, {name: shard for name, (_, shard) in self.local.items()}, source)
        self._share()
        return taken

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Random weights: the numbers of a model that is initialised whole (`init_weights`)."""
        for name, (parameter, shard) in self.local.items():
            module = self.model.get_submodule(name.rpartition(".")[0])
            fill(parameter, initial(module, name, shard.shape, seed, std), shard)
        self._share()

    @torch.no_grad()
    def fill(self, whole: Mapping[str, Tensor]) -> None:
        """Takes parameters from whole tensors in memory; in a pipeline, those of this rank."""
        for name in whole.keys() & self.local.keys():
            parameter, shard = self.local[name]
            fill(parameter, whole[name], shard)
        self._share()

    def _share(self) -> None:
        if self._tied is not None:
            self._tied.share()


def apply(model: Decoder, mesh: Mesh, *, recompute: Recompute | None = None,
          weights: torch.dtype = torch.float32, pipeline: PipelineConfig | None = None,
          context: ContextConfig | None = None) -> Spread:
    """Spreads a decoder over the ranks of a mesh.

    Args:
        model: on the meta device; adapters already in place, frozen parameters without
            ``requires_grad``.
        weights: the format that large matrices are rounded to when they are used; the parameters
            themselves stay float32 and gradients pass straight through.
        pipeline: how the stages work, where the layout has several.
        context: how attention works, where the layout has cp.

    Raises:
        ValueError: if the model cannot be spread so.
    """
    layout = mesh.layout
    tensor = mesh.axis("tp")
    sequence = bool(layout.sequence_parallel) and tensor.size > 1
    context = context or ContextConfig()
    check_context(model.spec, layout, context)
    shards = apply_tensor(model, tensor, kv_sharers(model.spec, mesh), sequence, layout.overlap_tp)
    if weights != torch.float32:
        round_weights(model, weights)
    if recompute is not None:
        apply_recompute(model, recompute)
    config = pipeline or PipelineConfig()
    axis = mesh.axis("pp")
    if axis.size == 1:
        whole = cut(model, range(model.spec.num_layers), True, True)
        part, local = _make_part(whole, mesh, shards, tensor, sequence, True, False)
        return Spread(mesh, model, shards, local, [part], context)
    schedule, cuts = config.layers_of(model.spec, axis.size)
    last = schedule.num_stages - 1
    parts: dict[int, Part] = {}
    local = {}
    copied = None
    # All cuts before anything is wrapped: a tied head's copy is made from the plain embedding.
    decoders = {stage: cut(model, cuts[stage], stage == 0, stage == last)
                for stage in schedule.stages_of(axis.index)}
    for stage, decoder in decoders.items():
        parts[stage], elements = _make_part(decoder, mesh, shards, tensor, sequence, stage == last,
                                            schedule.splits_backward)
        if stage == last and model.spec.tied_head:
            copied = elements.pop(TIED)
        local |= elements
    tied = None
    if model.spec.tied_head:
        tied = TiedCopy(axis, schedule.rank_of(0), schedule.rank_of(last),
                        local.get(TIED), copied,
                        parts[0].data.held if 0 in parts else (),
                        parts[last].data.held if last in parts else ())
    width = model.spec.hidden_size

    def rows(batch: Batch) -> int:
        return batch.num_tokens // tensor.size if sequence else batch.num_tokens

    ways = None
    if mesh.device_type != "cpu":
        ways = lanes(mesh, schedule.placement)
    runner = Pipeline(parts, schedule.placement, config, axis, width, rows, ways)
    return Spread(mesh, _union(model, parts), shards, local, list(parts.values()), context,
                  runner, tied)


def _make_part(decoder: Decoder, mesh: Mesh, shards: dict[str, Shard], tensor: Axis, sequence: bool,
               last: bool, deferred: bool
               ) -> tuple[Part, dict[str, tuple[nn.Parameter, Shard]]]:
    """A stage with memory and data parallelism, and its parameters' elements on this rank."""
    stage = Stage(decoder, tensor, sequence, last)
    axis, replicate = mesh.axis("dp_shard_cp"), mesh.axis("replicate")
    zero = mesh.layout.zero if axis.size > 1 else 0
    if zero == 3:
        _fully_shard(stage, mesh)
    stage.to_empty(device=torch.device(mesh.device_type))
    if isinstance(decoder, ValueModel) and decoder.value is not None:
        nn.init.zeros_(decoder.value.weight)  # type: ignore[arg-type]
    every = dict(decoder.named_parameters())
    trained = {name: p for name, p in every.items() if p.requires_grad}
    split = DeferredGrads(decoder) if deferred else None
    data: DataParallel
    if zero == 0:
        data = Replicated(trained, shards, mesh.axis("dp_cp"))
    elif zero < 3:
        data = ShardedStates(trained, shards, axis, replicate, zero)
    else:
        data = FullyShardedStates(stage, trained, shards, axis, replicate, deferred)
    for held in data.held:
        held.fused = _fused(decoder.spec, held.name)
    if zero == 3:
        frozen = FullyShardedStates(stage, {n: p for n, p in every.items() if n not in trained},
                                    shards, axis, replicate, deferred)
        return Part(stage, data, split), {h.name: (h.tensor, h.shard)
                                          for h in data.held + frozen.held}
    counts = mesh.axis("dp_cp").index == 0  # of data-parallel ranks, which have the same elements
    return Part(stage, data, split), {name: (p, shards[name].owned_by(counts))
                                      for name, p in every.items()}


def _fused(spec: ModelSpec, name: str) -> tuple[int, tuple[int, ...]] | None:
    """See `Held.fused`."""
    kind = name.split(".")[-2]
    if len(PROJECTIONS.get(kind, ())) < 2:
        return None
    groups, widths = arrangement(spec, kind)
    return groups, tuple(widths.values())


def _union(model: Decoder, parts: Mapping[int, Part]) -> Decoder:
    """The modules of this rank's stages under their names in the whole model."""
    union = cut(model, range(0), False, False)
    for stage, part in parts.items():
        decoder = part.stage.decoder
        assert isinstance(union.layers, nn.ModuleDict)
        union.layers.update(dict(decoder.layers.named_children()))
        if stage == 0:
            union.embed = decoder.embed
        if part.stage.last:
            union.norm, union.head = decoder.norm, decoder.head
            if isinstance(union, ValueModel) and isinstance(decoder, ValueModel):
                union.value = decoder.value
    return union


def round_weights(model: Decoder, dtype: torch.dtype) -> None:
    """Makes every large matrix enter its product rounded to a format, as an engine holds it."""

    def use(weight: Tensor) -> Tensor:
        return rounded(weight, dtype)

    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.uses = (*module.uses, use)


def _fully_shard(scorer: Stage, mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    names = (["replicate"] if mesh.axis("replicate").size > 1 else []) + ["dp_shard_cp"]
    device_mesh = mesh.device_mesh(*names)
    for module in [*scorer.decoder.layers.children(), scorer]:
        fully_shard(module, mesh=device_mesh)
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # sums, not means
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    scorer.register_forward_hook(_reshard)


def _reshard(scorer: nn.Module, _: object, out: Tensor | tuple[Tensor, ...]) -> None:
    """FSDP keeps the root's parameters whole for backward. Where none comes, they would stay, and
    weights that are then put into the rows would not be seen."""
    made = (out,) if isinstance(out, Tensor) else out
    if not any(tensor.requires_grad for tensor in made):
        scorer.reshard()  # type: ignore[operator]


def make_groups(spec: ModelSpec, mesh: Mesh, pipeline: PipelineConfig | None = None) -> None:
    """Makes all process groups that `apply`, an optimizer and a step ask a mesh for: for a mesh of
    some ranks only, which all ranks of the default group have to make before its own go on."""
    for name in ("dp_cp_tp", "world"):
        mesh.axis(name)
    kv_sharers(spec, mesh)
    if mesh.layout.pp > 1 and mesh.device_type != "cpu":
        schedule, _ = (pipeline or PipelineConfig()).layers_of(spec, mesh.layout.pp)
        lanes(mesh, schedule.placement)


def kv_sharers(spec: ModelSpec, mesh: Mesh) -> Axis:
    """The ranks that hold the same KV head as this one, as an axis of their own."""
    tensor = mesh.axis("tp")
    runs = sorted({part.sharers for part in split_model(spec, tensor.size)})
    return mesh.make_axis("tp_kv", [[ranks[i] for i in run] for ranks in mesh.layout.groups("tp")
                                    for run in runs if len(run) > 1])
