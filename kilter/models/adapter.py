"""Low-rank adapters: what LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353) make of a product.

    LoRA   y = W x + s B A x                 A [r, K], B [N, r], s a constant
    DoRA   y = m / |W + s B A| (the same)    m [N]; |.| of each row, through which no gradient flows

Each projection that a fused matrix holds has an A and a B of its own, as it has where it is not
fused, so adapters come and go without being refitted:

    qkv    y [T, G, (R+2) d]  =  [ q  R d | k  d | v  d ] per KV group
                                    ▲         ▲      ▲
                                 B_q A_q x  B_k A_k x  B_v A_v x       any of them may be missing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kilter.models.linear import Linear, Use, through
from kilter.models.spec import ModelSpec
from kilter.ops.packed import PackedWeight

# What the linear layers of a `DecoderLayer` hold, in the order of their rows.
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",)}

_BLOCK = 256  # rows of W + s B A that are in memory at a time


def arrangement(spec: ModelSpec, kind: str) -> tuple[int, dict[str, int]]:
    """How the rows of a linear layer are shared out: in so many equal groups, and in each so many
    rows of each projection, in this order."""
    if kind == "qkv":
        d = spec.head_dim
        return spec.num_kv_heads, {"q_proj": spec.queries_per_kv * d, "k_proj": d, "v_proj": d}
    rows = spec.ffn_size if kind == "gate_up" else spec.hidden_size
    return 1, dict.fromkeys(PROJECTIONS[kind], rows)


class LowRank(nn.Module):
    """One projection's ``lora_a`` [r, K], ``lora_b`` [N, r] and, of DoRA, ``magnitude`` [N];
    float32, uninitialised. They pass through ``a_uses`` and ``b_uses`` (B and the magnitude) on
    their way into a product, as a weight does through `Linear.uses`."""

    magnitude: nn.Parameter | None
    a_uses: tuple[Use, ...] = ()
    b_uses: tuple[Use, ...] = ()

    def __init__(self, rows: int, columns: int, rank: int, dora: bool, device: torch.device
                 ) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        self.lora_a = parameter(rank, columns)
        self.lora_b = parameter(rows, rank)
        self.magnitude = parameter(rows) if dora else None


class Adapter(nn.Module):
    """The adapters of one linear layer; its children are `LowRank`s by projection.

    Args:
        linear: the layer; its ``adapter`` is to be set to this.
        spec, kind: what `arrangement` takes.
        targets: the projections that are adapted, all or some of the layer's.
        scale: s.

    Attributes:
        enabled: off, products are as if there were no adapter.
        norm_uses: what the squared norms of rows, float64 [N], pass through.
    """

    norm_uses: tuple[Use, ...] = ()

    def __init__(self, linear: Linear, spec: ModelSpec, kind: str, targets: Sequence[str],
                 rank: int, scale: float, dora: bool) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple: it is not a module of this one
        self.rank, self.scale = rank, scale
        self.enabled = True
        self.groups, self.widths = arrangement(spec, kind)
        weight = linear.weight
        device = torch.device("cpu") if isinstance(weight, PackedWeight) else weight.device
        for name, width in self.widths.items():
            if name in targets:
                self.add_module(name, LowRank(self.groups * width, weight.shape[1], rank, dora,
                                              device))

    def projections(self) -> Iterator[tuple[str, LowRank]]:
        """The adapted ones, in the order of rows."""
        return cast(Iterator[tuple[str, LowRank]], self.named_children())

    def forward(self, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """[T, N]: the layer's product y = W x, adapted."""
        return self.up(self.down(x_TK), y_TN) if self.enabled else y_TN

    def matrix(self) -> Tensor:
        """A of every projection, [r of each, K]."""
        return torch.cat([through(p.a_uses, p.lora_a) for _, p in self.projections()])

    def down(self, x_TK: Tensor) -> Tensor:
        """[T, r of each projection]: A x, a sum over K in the order of the layer's own product."""
        (linear,) = self._linear
        return linear.ops.linear(x_TK, self.matrix(), None, None, splits=linear.splits)

    def up(self, z_TR: Tensor, y_TN: Tensor) -> Tensor:
        """[T, N]: y changed by what `down` returned."""
        (linear,) = self._linear
        changes = dict(zip((name for name, _ in self.projections()),
                           (self.scale * z_TR).split(self.rank, dim=1), strict=True))
        adapted = dict(self.projections())
        tokens = y_TN.shape[0]
        whole_TGn = y_TN.view(tokens, self.groups, sum(self.widths.values()))
        parts = []
        for (name, width), part_TGw in zip(
                self.widths.items(), whole_TGn.split(list(self.widths.values()), dim=2),
                strict=True):
            if (projection := adapted.get(name)) is not None:
                b_Nr = through(projection.b_uses, projection.lora_b)
                change_TN = linear.ops.linear(changes[name], b_Nr, None, None)
                part_TGw = part_TGw + change_TN.view(tokens, self.groups, width)
                if projection.magnitude is not None:
                    ratio_N = (through(projection.b_uses, projection.magnitude)
                               / self.row_norms(name))
                    part_TGw = part_TGw * ratio_N.view(self.groups, width)
            parts.append(part_TGw)
        return torch.cat(parts, dim=2).view(tokens, y_TN.shape[1])

    @torch.no_grad()
    def row_norms(self, name: str) -> Tensor:
        """float32 [N]: |W + s B A| of every row of a projection, without gradient. Summed in
        double, so that the order of the sum, which differs between layouts, is rounded away."""
        (linear,) = self._linear
        projection = cast(LowRank, self.get_submodule(name))
        weight = through(linear.uses, linear.weight)
        weight = weight.dequantize() if isinstance(weight, PackedWeight) else weight
        width = self.widths[name]
        names = list(self.widths)
        first = sum(self.widths[other] for other in names[:names.index(name)])
        b_GWr = (self.scale * projection.lora_b).view(self.groups, width, self.rank)
        w_GWK = weight.view(self.groups, -1, weight.shape[1])[:, first:first + width]
        squares = []
        for w_WK, b_Wr in zip(w_GWK, b_GWr, strict=True):
            for start in range(0, width, _BLOCK):
                block = slice(start, start + _BLOCK)
                changed = linear.ops.linear(b_Wr[block], projection.lora_a.t(), None,
                                            w_WK[block].float())
                squares.append(torch.linalg.vector_norm(changed, dim=1,
                                                        dtype=torch.float64).square())
        return through(self.norm_uses, torch.cat(squares)).sqrt().float()


def adapters(model: nn.Module) -> Mapping[str, Adapter]:
    """Every adapter in a model, by the name of its linear layer."""
    return {path.rpartition(".")[0]: module for path, module in model.named_modules()
            if isinstance(module, Adapter)}
