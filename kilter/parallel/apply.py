"""One `apply`: a plain decoder on the meta device and a mesh in, this rank's trainable part out.

    with torch.device("meta"):
        model = Decoder(spec)
    spread = apply(model, mesh)                 # cut, wrapped, memory taken
    spread.load(source)                         # or spread.initialise(seed)
    ...
    logprobs_T = spread.forward(batch, targets_T)
    spread.begin(last=True); loss.backward(); spread.finish()
    norm = gradient_norm(spread.held, mesh.axis("world"))
    optimizer.step(); spread.updated()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import initial
from kilter.models.linear import Embedding, Linear
from kilter.models.spec import ModelSpec
from kilter.parallel.data import (
    DataParallel,
    FullyShardedStates,
    Held,
    Replicated,
    ShardedStates,
)
from kilter.parallel.heads import split_model
from kilter.parallel.load import fill, load_shards
from kilter.parallel.logprobs import TokenLogprobs
from kilter.parallel.recompute import Recompute, apply_recompute
from kilter.parallel.shards import Shard
from kilter.parallel.tensor import apply_tensor
from kilter.weights.bridge import ModelSource


@dataclass
class Spread:
    """A rank's part of a model, ready to train.

    Attributes:
        model: the decoder with this rank's tensors.
        forward: (batch, targets_T) -> log-probabilities [T], with counts a loss: see
            `TokenLogprobs`; every forward of training goes through it.
        held: what the optimizer steps (trainable parameters only).
        shards: what of every parameter the decoder has (before data parallelism cuts it further).
    """

    mesh: Mesh
    model: Decoder
    forward: Callable[..., Tensor]
    shards: dict[str, Shard]
    local: dict[str, tuple[nn.Parameter, Shard]]  # every parameter's elements on this rank
    data: DataParallel = field(repr=False)

    @property
    def held(self) -> list[Held]:
        return self.data.held

    def begin(self, last: bool) -> None:
        """Before a micro-batch's backward; ``last`` if it is the step's last."""
        self.data.begin(last)

    def finish(self) -> None:
        """After the step's last backward: gradients in `held` are sums over all ranks."""
        self.data.finish()

    def updated(self) -> None:
        """After the optimizer's step."""
        self.data.updated()

    def load(self, source: ModelSource) -> int:
        """Fills the model from a source; every rank reads only its own bytes.

        Returns:
            Bytes this rank took from the files.
        """
        named = {name: parameter for name, (parameter, _) in self.local.items()
                 if name in source.maps}
        return load_shards(named, {name: shard for name, (_, shard) in self.local.items()}, source)

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Random weights: the numbers of a model that is initialised whole (`init_weights`)."""
        for name, (parameter, shard) in self.local.items():
            module = self.model.get_submodule(name.rpartition(".")[0])
            fill(parameter, initial(module, name, shard.shape, seed, std), shard)

    @torch.no_grad()
    def fill(self, whole: dict[str, Tensor]) -> None:
        """Takes parameters from whole tensors in memory."""
        for name, value in whole.items():
            parameter, shard = self.local[name]
            fill(parameter, value, shard)


def apply(model: Decoder, mesh: Mesh, *, recompute: Recompute | None = None,
          weights: torch.dtype = torch.float32) -> Spread:
    """Spreads a decoder over the ranks of a mesh.

    Args:
        model: on the meta device; adapters already in place, frozen parameters without
            ``requires_grad``.
        weights: the format that large matrices are rounded to when they are used; the parameters
            themselves stay float32 and gradients pass straight through.

    Raises:
        ValueError: if the model cannot be spread so.
    """
    layout = mesh.layout
    tensor = mesh.axis("tp")
    sequence = bool(layout.sequence_parallel) and tensor.size > 1
    shards = apply_tensor(model, tensor, kv_sharers(model.spec, mesh), sequence)
    if weights != torch.float32:
        round_weights(model, weights)
    if recompute is not None:
        apply_recompute(model, recompute)
    scorer = TokenLogprobs(model, tensor, sequence)
    axis, replicate = mesh.axis("dp_shard_cp"), mesh.axis("replicate")
    device = torch.device(mesh.device_type)
    zero = layout.zero if axis.size > 1 else 0
    if zero == 3:
        _fully_shard(scorer, mesh)
    scorer.to_empty(device=device)
    every = dict(model.named_parameters())
    trained = {name: p for name, p in every.items() if p.requires_grad}
    data: DataParallel
    if zero == 0:
        data = Replicated(trained, shards, mesh.axis("dp_cp"))
    elif zero < 3:
        data = ShardedStates(trained, shards, axis, replicate, zero)
    else:
        data = FullyShardedStates(scorer, trained, shards, axis, replicate)
    local = {name: (p, shards[name]) for name, p in every.items()}
    if zero == 3:
        frozen = FullyShardedStates(scorer, {n: p for n, p in every.items() if n not in trained},
                                    shards, axis, replicate)
        local = {h.name: (h.tensor, h.shard) for h in data.held + frozen.held}
    return Spread(mesh, model, scorer, shards, local, data)


class _Round(torch.autograd.Function):
    """Values of a narrower format, held in float32; gradients pass as they are."""

    @staticmethod
    def forward(ctx, weight: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        return weight.to(dtype).to(weight.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        return grads[0], None


def round_weights(model: Decoder, dtype: torch.dtype) -> None:
    """Makes every large matrix enter its product rounded to a format, as an engine holds it."""

    def use(weight: Tensor) -> Tensor:
        return _Round.apply(weight, dtype)

    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.uses = (*module.uses, use)


def _fully_shard(scorer: TokenLogprobs, mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    names = (["replicate"] if mesh.axis("replicate").size > 1 else []) + ["dp_shard_cp"]
    device_mesh = mesh.device_mesh(*names)
    for module in [*scorer.decoder.layers, scorer]:
        fully_shard(module, mesh=device_mesh)
        module.set_gradient_divide_factor(1.0)  # sums, not means
        module.set_force_sum_reduction_for_comms(True)
    scorer.register_forward_hook(_reshard)


def _reshard(scorer: nn.Module, *_: object) -> None:
    """FSDP keeps the root's parameters whole for backward. Where none comes, they would stay, and
    weights that are then put into the rows would not be seen."""
    if not torch.is_grad_enabled():
        scorer.reshard()  # type: ignore[operator]


def kv_sharers(spec: ModelSpec, mesh: Mesh) -> Axis:
    """The ranks that hold the same KV head as this one, as an axis of their own."""
    tensor = mesh.axis("tp")
    runs = sorted({part.sharers for part in split_model(spec, tensor.size)})
    mine = Axis("tp_kv", (mesh.rank,), 0)
    for ranks in mesh.layout.groups("tp"):
        for run in runs:
            members = [ranks[i] for i in run]
            if len(members) > 1:  # made by all ranks of the world, theirs or not
                group = dist.new_group(members, timeout=mesh.timeout, group_desc="tp_kv")
                if mesh.rank in members:
                    mine = Axis("tp_kv", tuple(members), members.index(mesh.rank), group)
    return mine
