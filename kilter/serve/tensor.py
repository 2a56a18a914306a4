"""The engine over tensor-parallel ranks: one scheduler, ranks that follow.

    rank 0   HTTP, scheduler, sampler ── a step as arrays ──▶ part of the model ──┐
    rank 1   …                           (broadcast)       ▶ part of the model ──┤ logits
    rank N                                                 ▶ part of the model ──┘ to rank 0

Every rank has its own KV heads of every page, so a page number means the same everywhere and the
radix tree needs to know of no rank. On the exact path the bits are those of one rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import broadcast, gather
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
from kilter.serve.executor import Executor, Inputs, RanksLost, local_spec
from kilter.serve.pages import PagePool
from kilter.serve.update import check_same_model
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.load import Storage, check_products, check_storage, put_weight

_STOP, _STEP, _COPY, _WEIGHTS = range(4)
_ARRAYS = ("tokens_T", "positions_T", "cu_seqlens_S1", "context_S", "slots_T", "page_table_SP",
           "rows_N")
_IDLE = timedelta(days=365)  # how long followers wait for a step
_FIRST = 2048  # numbers of a command's first message, which is the only one for most
_HEADER = len(_ARRAYS) + 3  # command, values in all, sizes


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks, seen from one of them."""

    mesh: Mesh
    axis: Axis
    device: torch.device


def join(degree: int, rank: int, store: dist.Store, device: str = "cpu",
         timeout: timedelta = _IDLE) -> Ranks:
    """Makes this process rank ``rank`` of ``degree`` on this machine; all have to call it.

    Args:
        timeout: how long this rank waits for the others.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(rank)
    with _loopback():
        # Commands go over gloo with any device: who waits for one in NCCL keeps its GPU busy.
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", rank=rank,
                                world_size=degree, store=store, timeout=timeout)
        return ranks_of(degree, rank, kind)


def leave() -> None:
    """Undoes `join`, also one that did not come to its end: torch would then give this process's
    next group another name than in ranks that make their first, so one is made that has an end."""
    if not dist.is_initialized():
        with _loopback():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Gloo listens on this machine's own interface, not where its name leads; unless told to."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def ranks_of(degree: int, rank: int, kind: str = "cpu") -> Ranks:
    """The default process group as tensor-parallel ranks."""
    mesh = Mesh(Layout(tp=degree, sequence_parallel=False), kind)
    # The same ranks as the mesh's tp axis, but with the default group's timeout: a group that is
    # made beside it gives up after torch's own, and an engine may have nothing to do for days.
    world = mesh.axis("world")
    return Ranks(mesh, Axis("tp", world.ranks, world.index, world.group),
                 torch.device(kind, rank) if kind == "cuda" else torch.device("cpu"))


def load_part(source: ModelSource, ranks: Ranks, *, storage: Storage = "auto", exact: bool = True,
              kv_dtype: torch.dtype = torch.float32, products: str = "fp32",
              max_positions: int | None = None,
              progress: Callable[[int, int], None] | None = None
              ) -> tuple[Decoder, dict[str, Shard]]:
    """This rank's part of a model for inference; it reads only its own bytes. Arguments as
    `kilter.weights.load.load_decoder`.

    Raises:
        ValueError: also for a degree that the model cannot be spread over.
    """
    check_storage(storage, exact, ranks.device)
    check_products(products, ranks.device)
    with torch.device("meta"):
        model = Decoder(source.spec, exact=exact, kv_dtype=kv_dtype, products=products,
                        max_positions=max_positions)
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

    tell: Callable[[int, int, int], None]

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        self.tell(source, target, tokens)
        super().copy_page(source, target, tokens)


class TensorExecutor(Executor):
    """Rank 0's executor: the others compute every step with it."""

    def __init__(self, model: Decoder, config: EngineConfig, ranks: Ranks,
                 shards: Mapping[str, Shard]) -> None:
        pool = _LeadingPool(local_spec(model), config.num_pages, config.page_size, model.kv_dtype,
                            ranks.device)
        pool.tell = self._tell_copy
        super().__init__(model, pool, config.context_of(model.max_positions))
        self._ranks, self._shards = ranks, shards
        self.together = True  # whether the other ranks wait for a command
        self._closed = False

    def hidden(self, inputs: Inputs) -> Tensor:
        self._part()
        self._tell(_STEP, *_pack(inputs))
        return super().hidden(inputs)

    def logits(self, hidden_TD: Tensor, inputs: Inputs) -> Tensor:
        logits_NV = _gathered(super().logits(hidden_TD, inputs), self.model.spec, self._ranks.axis)
        assert logits_NV is not None
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
        self._tell(_WEIGHTS, [len(path)], [path])
        _reload(self.model, self._shards, weights, storage, self._ranks)
        self.together = True

    def release(self) -> None:
        """Lets the other ranks return from `follow_steps`."""
        self._part()
        self._tell(_STOP, [])
        self.together = True

    def close(self) -> None:
        """Ends the other ranks; once."""
        if self._closed:
            return
        self._closed = True
        if self.together:
            with contextlib.suppress(RuntimeError, RanksLost):  # who is gone cannot be told
                self._dismiss()
        dist.destroy_process_group()

    def _dismiss(self) -> None:
        self._tell(_STOP, [])

    def _tell(self, command: int, sizes: Sequence[int], arrays: Sequence[np.ndarray] = ()) -> None:
        """Says to all others what to do next."""
        _send(self._ranks, command, sizes, arrays)

    def _tell_copy(self, source: int, target: int, tokens: int) -> None:
        self._tell(_COPY, [source, target, tokens])

    def _part(self) -> None:
        """Until they are together again the other ranks are at work."""
        if not self.together:
            raise RuntimeError("The ranks of this engine are out of step, since a step before was "
                               "interrupted or failed in the middle; close it and start another.")
        self.together = False

    @property
    def _can_record(self) -> bool:
        return False  # a recording holds kernels, and here the ranks talk between them


def follow_steps(executor: Executor, ranks: Ranks, shards: Mapping[str, Shard]) -> None:
    """The life of any other rank: does what rank 0 says until it releases its ranks
    (`TensorExecutor.release`) or ends. The executor is of rank 0's sizes."""
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
def _gathered(logits_NV: Tensor, spec: ModelSpec, axis: Axis) -> Tensor | None:
    """[N, V] of every rank's vocabulary rows on rank 0, None on the others."""
    chunk = vocab_chunk(spec.vocab_size)
    rows = [count * chunk for count in vocab_chunks(spec.vocab_size, axis.size)]
    rows[-1] -= sum(rows) - spec.vocab_size
    padding = max(rows) - logits_NV.shape[1]  # process groups gather equal sizes only
    parts = gather(torch.nn.functional.pad(logits_NV, (0, padding)) if padding else logits_NV, axis)
    if parts is None:
        return None
    return torch.cat([part[:, :count] for part, count in zip(parts, rows, strict=True)], 1)


def _pack(inputs: Inputs) -> tuple[list[int], list[np.ndarray]]:
    """A step's arrays end to end, and the numbers that take them apart again."""
    arrays = [getattr(inputs, name) for name in _ARRAYS]
    sizes = [-1 if a is None else a.size for a in arrays]
    return [*sizes, inputs.page_table_SP.shape[1]], [a.ravel() for a in arrays if a is not None]


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
        found.append(array.astype(np.int64) if name in ("tokens_T", "rows_N") else array)
    table = found[5]
    assert table is not None
    found[5] = table.reshape(-1, width)
    return Inputs(*found)  # type: ignore[arg-type]


def _send(ranks: Ranks, command: int, sizes: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
    """A command in one message, and a second one where its values do not fit the first."""
    values = np.concatenate(arrays).astype(np.int32) if arrays else np.empty(0, np.int32)
    head, rest = values[:_FIRST - _HEADER], values[_FIRST - _HEADER:]
    first = np.zeros(_FIRST, np.int32)
    first[:2 + len(sizes)] = command, len(values), *sizes
    first[_HEADER:_HEADER + len(head)] = head
    broadcast(torch.from_numpy(first), ranks.axis)
    if len(rest):
        broadcast(torch.from_numpy(rest), ranks.axis)


def _receive(ranks: Ranks) -> tuple[int, list[int], np.ndarray]:
    first = broadcast(torch.empty(_FIRST, dtype=torch.int32), ranks.axis).numpy()
    command, count, *sizes = first[:_HEADER].tolist()
    values = np.empty(count, np.int32)
    values[:_FIRST - _HEADER] = first[_HEADER:_HEADER + count]
    if len(rest := values[_FIRST - _HEADER:]):
        broadcast(torch.from_numpy(rest), ranks.axis)
    return command, sizes, values
