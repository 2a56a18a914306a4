"""Training of adapters only: LoRA (arXiv 2106.09685), rsLoRA (2312.03732) and DoRA (2402.09353).

    with torch.device("meta"):
        model = Decoder(spec)
    add_adapters(model, config)             # everything else is frozen
    spread = apply(model, mesh)
    spread.load(source)
    init_adapters(spread, config)           # or spread.fill(read_peft(folder, spec).tensors)
    ...
    with adapters_off(spread.model):        # the model that was started from
        reference_T = spread.forward(batch, targets_T)
    ...
    merged = merge(spec, config, tensors)   # plain weights

The modules are in `kilter.models.adapter`; folders of PEFT in `kilter.train.peft`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilter.comm.collectives import all_reduce_sum
from kilter.job import FilePath
from kilter.models.adapter import PROJECTIONS, Adapter, adapters, arrangement
from kilter.models.decoder import Decoder
from kilter.models.init import initial
from kilter.models.linear import Linear, through
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread
from kilter.parallel.load import fill

_KNOWN = (*PROJECTIONS, *(name for names in PROJECTIONS.values() for name in names
                          if name not in PROJECTIONS))


@dataclass(frozen=True)
class LoraConfig:
    """What adapters a model gets.

    Attributes:
        rank: r, the columns of B and rows of A.
        alpha: the update B A is scaled by alpha / rank.
        targets: the linear layers that are adapted: ``qkv``, ``out``, ``gate_up``, ``down``, or
            single projections, ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``gate_proj``,
            ``up_proj``, ``down_proj``.
        dora: learn the magnitude of each row beside its direction.
        rslora: scale by alpha / sqrt(rank) instead.
        seed: of A.
        path: an adapter's folder to start from instead (`kilter.train.peft`), which all of the
            above has to describe; ``seed`` then has nothing to do.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    dora: bool = False
    rslora: bool = False
    seed: int = 0
    path: FilePath | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        problems = []
        if self.rank < 1:
            problems.append(f"rank is {self.rank} but must be at least 1")
        if not self.alpha > 0.0:
            problems.append(f"alpha is {self.alpha} but must be positive")
        unknown = [name for name in self.targets if name not in _KNOWN]
        if unknown or not self.targets:
            problems.append(f"targets are {list(self.targets)} but must be some of "
                            f"{', '.join(_KNOWN)}")
        if self.path is not None and self.seed != 0:
            problems.append(f"seed is {self.seed}, but with path nothing is drawn; leave it out")
        if problems:
            raise ValueError(f"Adapters cannot be so: {'; '.join(problems)}.")

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (self.rank ** 0.5 if self.rslora else self.rank)

    @property
    def projections(self) -> tuple[str, ...]:
        """The single projections that ``targets`` names, in the order of the computation."""
        return tuple(name for kind, names in PROJECTIONS.items() for name in names
                     if kind in self.targets or name in self.targets)


def add_adapters(model: Decoder, config: LoraConfig) -> None:
    """Gives a decoder (whole, on any device, meta too) adapters, uninitialised, and freezes all
    else. To be called before `kilter.parallel.apply.apply`.

    Raises:
        ValueError: if the model has adapters already.
    """
    if adapters(model):
        raise ValueError("This model has adapters already; start from one without.")
    model.requires_grad_(False)
    targets = config.projections
    for path, linear in list(model.named_modules()):
        kind = path.rpartition(".")[2]
        if isinstance(linear, Linear) and set(PROJECTIONS.get(kind, ())) & set(targets):
            linear.adapter = Adapter(linear, model.spec, kind, targets, config.rank, config.scale,
                                     config.dora)


@torch.no_grad()
def init_adapters(spread: Spread, config: LoraConfig) -> None:
    """Adapters that change nothing yet: A uniform within 1 / sqrt(K), from a stream of its own by
    name and so the same in every layout; B zero; DoRA's magnitudes the norms of the rows of W.
    To be called when the weights are there. Collective.
    """
    for path, adapter in adapters(spread.model).items():
        for projection, module in adapter.projections():
            for leaf, _ in module.named_parameters():
                name = f"{path}.adapter.{projection}.{leaf}"
                parameter, shard = spread.local[name]
                if leaf != "magnitude":
                    fill(parameter, initial(module, name, shard.shape, config.seed), shard)
    if config.dora:
        spread.fill(_magnitudes(spread))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes what it would without adapters, bit for bit: the model that
    training started from, which is the reference of preference and RL losses."""
    switched = [adapter for adapter in adapters(model).values() if adapter.enabled]
    for adapter in switched:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in switched:
            adapter.enabled = True


@torch.no_grad()
def merge(spec: ModelSpec, config: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights that compute what the adapted ones do, within the rounding of W + s B A.

    Args:
        tensors: whole parameters by name, those of adapters among them; float32 if the sum is not
            to be rounded twice.

    Returns:
        The parameters of ``Decoder(spec)``; those without adapters are the same tensors.
    """
    return {name: merged(spec, config, name, weight, tensors)
            for name, weight in tensors.items() if ".adapter." not in name}


@torch.no_grad()
def merged(spec: ModelSpec, config: LoraConfig, name: str, weight: Tensor,
           tensors: Mapping[str, Tensor]) -> Tensor:
    """One parameter of `merge`: ``weight`` itself where it has no adapter in ``tensors``."""
    path = name.removesuffix(".weight")
    kind = path.rpartition(".")[2]
    found = [p for p in PROJECTIONS.get(kind, ()) if f"{path}.adapter.{p}.lora_a" in tensors]
    if not found or path == name:
        return weight
    groups, widths = arrangement(spec, kind)
    changed = weight.clone()
    rows_GWK = changed.view(groups, -1, weight.shape[1]).split(list(widths.values()), dim=1)
    for projection, part_GWK in zip(widths, rows_GWK, strict=True):
        if projection in found:
            a_rK, b_Nr = (tensors[f"{path}.adapter.{projection}.{leaf}"].float()
                          for leaf in ("lora_a", "lora_b"))
            new_GWK = part_GWK.float() + (config.scale * b_Nr @ a_rK).view_as(part_GWK)
            magnitude = tensors.get(f"{path}.adapter.{projection}.magnitude")
            if magnitude is not None:
                norms_GW = torch.linalg.vector_norm(new_GWK, dim=2, dtype=torch.float64).float()
                new_GWK *= (magnitude.float().view_as(norms_GW) / norms_GW)[..., None]
            part_GWK.copy_(new_GWK)
    return changed


def _magnitudes(spread: Spread) -> dict[str, Tensor]:
    """The norms of the rows of the adapted weights, as they are used, by magnitudes' names."""
    mesh = spread.mesh
    found = adapters(spread.model)
    squares = []
    for path in found:
        linear = spread.model.get_submodule(path)
        assert isinstance(linear, Linear)
        local, shard = spread.local[f"{path}.weight"]
        own_N = torch.zeros(shard.shape[0], dtype=torch.float64, device=local.device)
        used = through(linear.uses, local)
        for box, own, part in shard.parts(used):
            if own and part.numel():
                own_N[box.slices[0]] += torch.linalg.vector_norm(
                    part, dim=1, dtype=torch.float64).square()
        squares.append(own_N)
    norms = all_reduce_sum(torch.cat(squares), mesh.axis("dp_cp_tp")).sqrt().float()
    magnitudes = {}
    for (path, adapter), norms_N in zip(
            found.items(), norms.split([part.numel() for part in squares]), strict=True):
        groups, widths = arrangement(spread.model.spec, path.rpartition(".")[2])
        adapted = dict(adapter.projections())
        for name, part in zip(widths, norms_N.view(groups, -1).split(list(widths.values()), dim=1),
                              strict=True):
            if name in adapted:
                magnitudes[f"{path}.adapter.{name}.magnitude"] = part.reshape(-1)
    return magnitudes
