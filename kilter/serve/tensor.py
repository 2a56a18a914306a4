"""The engine over tensor-parallel ranks: one scheduler, ranks that follow.

    rank 0   HTTP, scheduler, sampler ── a step as arrays ──▶ part of the model ──┐
    rank 1   …                           (broadcast)       ▶ part of the model ──┤ logits
    rank N                                                 ▶ part of the model ──┘ to rank 0

Every rank has its own KV heads of every page, so a page number means the same everywhere and the
radix tree needs to know of no rank. On the exact path the bits are those of one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_gather_rows, broadcast
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.ops.logprob import vocab_chunk
from kilter.ops.packed import QUANT_GROUP, QuantTensor, pack
from kilter.parallel.apply import kv_sharers
from kilter.parallel.heads import vocab_chunks
from kilter.parallel.load import read_shard
from kilter.parallel.shards import Box, Shard
from kilter.parallel.tensor import apply_tensor
from kilter.serve.engine_config import EngineConfig
from kilter.serve.executor import Executor, Inputs, local_spec
from kilter.serve.pages import PagePool
from kilter.serve.update import check_same_model
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.load import Storage, check_storage, put_weight

_STOP, _STEP, _COPY, _WEIGHTS = range(4)
_ARRAYS = ("tokens_T", "positions_T", "cu_seqlens_S1", "context_S", "slots_T", "page_table_SP",
           "rows_N")
_IDLE = timedelta(days=365)  # how long followers wait for a step


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks, seen from one of them."""

    mesh: Mesh
    axis: Axis
    device: torch.device


def join(degree: int, rank: int, store: dist.Store, device: str = "cpu") -> Ranks:
    """Makes this process rank ``rank`` of ``degree`` on this machine; all have to call it."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=degree,
                            store=store, timeout=_IDLE)
    return ranks_of(degree, rank, kind)


def ranks_of(degree: int, rank: int, kind: str = "cpu") -> Ranks:
    """The default process group as tensor-parallel ranks."""
    mesh = Mesh(Layout(tp=degree, sequence_parallel=False), kind)
    # The same ranks as the mesh's tp axis, but with the default group's timeout: a group that is
    # made beside it gives up after torch's own, and an engine may have nothing to do for days.
    world = mesh.axis("world")
    return Ranks(mesh, Axis("tp", world.ranks, world.index, world.group),
                 torch.device(kind, rank) if kind == "cuda" else torch.device("cpu"))


def load_part(source: ModelSource, ranks: Ranks, *, storage: Storage = "auto", exact: bool = True,
              kv_dtype: torch.dtype = torch.float32, max_positions: int | None = None,
              progress: Callable[[int, int], None] | None = None
              ) -> tuple[Decoder, dict[str, Shard]]:
    """This rank's part of a model for inference; it reads only its own bytes. Arguments as
    `kilter.weights.load.load_decoder`.

    Raises:
        ValueError: also for a degree that the model cannot be spread over.
    """
    check_storage(storage, exact, ranks.device)
    with torch.device("meta"):
        model = Decoder(source.spec, exact=exact, kv_dtype=kv_dtype, max_positions=max_positions)
    shards = apply_tensor(model, ranks.axis, kv_sharers(model.spec, ranks.mesh), sequence=False)
    for done, name in enumerate(shards):
        _put_part(model, name, source, shards[name], storage, ranks.device)
        if progress is not None:
            progress(done + 1, len(shards))
    return model.eval(), shards


def _put_part(model: Decoder, name: str, source: ModelSource, shard: Shard, storage: Storage,
              device: torch.device) -> None:
    """Stores this rank's part of a parameter as the numbers that one rank has there. Where
    quantising takes groups of columns and the part begins or ends inside one, the whole groups are
    quantised and the part of them is held in float32."""
    box, (_, *columns) = shard.boxes[0], shard.shape
    if storage in ("int8", "int4") and columns and box.size[1] < columns[0]:
        start, stop = box.start[1], box.start[1] + box.size[1]
        low, high = start - start % QUANT_GROUP, min(stop + -stop % QUANT_GROUP, columns[0])
        if (low, high) != (start, stop):
            wide = Box((box.start[0], low), (box.size[0], high - low))
            weight = read_shard(source, name, Shard.of(shard.shape, [wide]))
            if isinstance(weight, QuantTensor) and storage != f"int{weight.bits}":
                weight = weight.dequantize()
            values = pack(weight, storage).dequantize()[:, start - low:stop - low]
            put_weight(model, name, values.contiguous(), "fp32", device)
            return
    put_weight(model, name, read_shard(source, name, shard), storage, device)


class _LeadingPool(PagePool):
    """Rank 0's pages: the others copy theirs with it."""

    ranks: Ranks

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        _send(self.ranks, _COPY, [source, target, tokens], [])
        super().copy_page(source, target, tokens)


class TensorExecutor(Executor):
    """Rank 0's executor: the others compute every step with it."""

    def __init__(self, model: Decoder, config: EngineConfig, ranks: Ranks,
                 shards: Mapping[str, Shard]) -> None:
        pool = _LeadingPool(local_spec(model), config.num_pages, config.page_size, model.kv_dtype,
                            ranks.device)
        pool.ranks = ranks
        super().__init__(model, pool, config.context_of(model.max_positions))
        self._ranks, self._shards = ranks, shards
        self.together = True  # whether the other ranks wait for a command
        self._closed = False

    def hidden(self, inputs: Inputs) -> Tensor:
        self._part()
        _send(self._ranks, _STEP, *_pack(inputs))
        return super().hidden(inputs)

    def logits(self, hidden_TD: Tensor, inputs: Inputs) -> Tensor:
        logits_NV = _gathered(super().logits(hidden_TD, inputs), self.model.spec, self._ranks.axis)
        self.together = True
        return logits_NV

    def take_weights(self, weights: ModelSource | Mapping[str, Tensor], storage: Storage) -> None:
        if not isinstance(weights, ModelSource):
            raise ValueError("An engine over several ranks takes new weights from a folder or "
                             "GGUF file only, since each rank reads its own part.")
        check_same_model(self.model.spec, weights.spec)
        check_storage(storage, self.model.exact, self.device)
        shapes = {name: shard.shape for name, shard in self._shards.items()}
        theirs = {name: weights.info(name).shape for name in weights.names()}
        wrong = [name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)]
        if wrong:
            raise ValueError(f"These weights do not fit the model: {', '.join(wrong[:20])} are "
                             f"missing on one side or differ in shape.")
        path = np.frombuffer(f"{storage}\n{weights.path.resolve()}".encode(), np.uint8)
        self._part()
        _send(self._ranks, _WEIGHTS, [len(path)], [path.astype(np.int64)])
        _reload(self.model, self._shards, weights, storage, self._ranks)
        self.together = True

    def release(self) -> None:
        """Lets the other ranks return from `follow_steps`."""
        self._part()
        _send(self._ranks, _STOP, [], [])
        self.together = True

    def close(self) -> None:
        """Ends the other ranks; once."""
        if self._closed:
            return
        self._closed = True
        if self.together:
            with contextlib.suppress(RuntimeError):  # a rank that is gone cannot be told
                _send(self._ranks, _STOP, [], [])
        dist.destroy_process_group()

    def _part(self) -> None:
        """Until they are together again the other ranks are at work."""
        if not self.together:
            raise RuntimeError("The ranks of this engine are out of step, since a step before was "
                               "interrupted or failed in the middle; close it and start another.")
        self.together = False

    @property
    def _can_record(self) -> bool:
        return False  # a recording holds kernels, and here the ranks talk between them


def follow(model: Decoder, config: EngineConfig, ranks: Ranks, shards: Mapping[str, Shard]
           ) -> None:
    """The life of any other rank: does what rank 0 says until that ends. The configuration is
    rank 0's."""
    follow_steps(Executor.of(model, config), ranks, shards)
    dist.destroy_process_group()


def follow_steps(executor: Executor, ranks: Ranks, shards: Mapping[str, Shard]) -> None:
    """Does what rank 0 says until it releases its ranks (`TensorExecutor.release`) or ends."""
    model = executor.model
    while True:
        command, sizes, values = _receive(ranks)
        if command == _STEP:
            inputs = _unpack(sizes, values)
            local = executor.logits(executor.hidden(inputs), inputs)
            _gathered(local, model.spec, ranks.axis)
        elif command == _COPY:
            executor.pool.copy_page(*sizes[:3])
        elif command == _WEIGHTS:
            storage, _, path = values.astype(np.uint8).tobytes().decode().partition("\n")
            _reload(model, shards, open_model(Path(path)), storage, ranks)  # type: ignore[arg-type]
        else:
            return


def _reload(model: Decoder, shards: Mapping[str, Shard], source: ModelSource, storage: Storage,
            ranks: Ranks) -> None:
    for name, shard in shards.items():
        _put_part(model, name, source, shard, storage, ranks.device)


@torch.inference_mode()
def _gathered(logits_NV: Tensor, spec: ModelSpec, axis: Axis) -> Tensor:
    """[N, V] of every rank's vocabulary rows."""
    chunk = vocab_chunk(spec.vocab_size)
    rows = [count * chunk for count in vocab_chunks(spec.vocab_size, axis.size)]
    rows[-1] -= sum(rows) - spec.vocab_size
    logits_VN = all_gather_rows(logits_NV.t().contiguous(), axis, rows)
    return logits_VN.t().contiguous()


def _pack(inputs: Inputs) -> tuple[list[int], list[np.ndarray]]:
    """A step's arrays end to end, and the numbers that take them apart again."""
    arrays = [getattr(inputs, name) for name in _ARRAYS]
    sizes = [-1 if a is None else a.size for a in arrays]
    return [*sizes, inputs.page_table_SP.shape[1]], [
        a.astype(np.int64).ravel() for a in arrays if a is not None]


def _unpack(sizes: list[int], values: np.ndarray) -> Inputs:
    *sizes, width = sizes
    found: list[np.ndarray | None] = []
    at = 0
    for name, size in zip(_ARRAYS, sizes, strict=True):
        if size < 0:
            found.append(None)
            continue
        array = values[at:at + size]
        at += size
        found.append(array if name in ("tokens_T", "rows_N") else array.astype(np.int32))
    table = found[5]
    assert table is not None
    found[5] = table.reshape(-1, width)
    return Inputs(*found)  # type: ignore[arg-type]


_HEADER = len(_ARRAYS) + 3  # command, values in all, sizes


def _send(ranks: Ranks, command: int, sizes: list[int], arrays: list[np.ndarray]) -> None:
    values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[:2 + len(sizes)] = torch.tensor([command, len(values), *sizes])
    broadcast(header.to(ranks.device), ranks.axis)
    if len(values):
        broadcast(torch.from_numpy(values).to(ranks.device), ranks.axis)


def _receive(ranks: Ranks) -> tuple[int, list[int], np.ndarray]:
    header = broadcast(torch.zeros(_HEADER, dtype=torch.int64, device=ranks.device), ranks.axis)
    command, count, *sizes = header.tolist()
    values = torch.empty(count, dtype=torch.int64, device=ranks.device)
    if count:
        broadcast(values, ranks.axis)
    return command, sizes, values.cpu().numpy()
