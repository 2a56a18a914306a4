"""Runs a model on what the scheduler chose: tokens of requests, their pages in the pool.

A step is first laid out as plain arrays (`Inputs`: the seam where the ranks of a tensor-parallel
engine will receive it), then computed. A step of single tokens (decode) runs the same kernels on
the same buffers every time, so on the CPU it is recorded once per batch size and then replayed as
one call (see `kilter.ops.cpu.tape`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kilter.models.adapter import adapters
from kilter.models.attention import Attention
from kilter.models.batch import Batch, KVView
from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.ops.packed import PackedWeight
from kilter.serve.engine_config import EngineConfig
from kilter.serve.pages import PagePool
from kilter.serve.request import Request
from kilter.serve.update import take_weights
from kilter.weights.bridge import ModelSource
from kilter.weights.load import Storage

_RECORDED_SEQS = 32  # past this Python's share of a step is small and the buffers would be large
_RECORDED_SIZES = 8  # recordings kept at a time; each holds a step's activations


class Chunk(NamedTuple):
    """A request's part in a step."""

    request: Request
    size: int  # tokens to compute from ``request.computed`` on; their pages are allocated
    rows: int  # of how many of them, from the last, logits are wanted
    hidden: Callable[[Tensor], None] | None = None  # given [size, D] after the last norm


class RanksLost(ConnectionError):
    """A process that has a part of the model is gone or hangs; nothing can be computed any more."""


@dataclass(frozen=True)
class Inputs:
    """One step as arrays."""

    tokens_T: np.ndarray  # int64
    positions_T: np.ndarray  # int32
    cu_seqlens_S1: np.ndarray  # int32
    context_S: np.ndarray  # int32
    slots_T: np.ndarray  # int32
    page_table_SP: np.ndarray  # int32
    rows_N: np.ndarray | None  # int64 rows of T whose logits are wanted; None: all


class Executor:
    """A model and a page pool.

    Args:
        max_context: longest sequence that will be run, tokens; it sizes the page table's rows.

    Raises:
        ValueError: if the model was loaded for fewer positions.
    """

    def __init__(self, model: Decoder, pool: PagePool, max_context: int) -> None:
        if max_context > model.max_positions:
            raise ValueError(f"max_context is {max_context} tokens but this model was loaded for "
                             f"{model.max_positions}.")
        self.model = model
        self.pool = pool
        self.max_context = max_context
        self.device = pool.keys[0].device
        self._adapted = bool(adapters(model))  # they compute with torch, which no tape records
        self._recorded: dict[int, _RecordedDecode] = {}

    @classmethod
    def of(cls, model: Decoder, config: EngineConfig) -> Executor:
        """With a pool of the sizes that an engine's configuration says."""
        pool = PagePool(local_spec(model), config.num_pages, config.page_size, model.kv_dtype,
                        model.norm.weight.device)
        return cls(model, pool, config.context_of(model.max_positions))

    @torch.inference_mode()
    def run(self, work: Sequence[Chunk]) -> Tensor:
        """Computes a step; requests are read, not changed. Chunks that ask for their hidden states
        are given them before it returns; they may be kept.

        Returns:
            Logits of the wanted rows in order, float32 [N, V]. The next call may overwrite them.

        Raises:
            ValueError: for a chunk beyond its request's tokens or pages, or ``max_context``.
        """
        size = self.pool.page_size
        for request, count, rows, _ in work:
            end = request.computed + count
            if not (0 <= rows <= count and count >= 1 and end <= request.length):
                raise ValueError(f"{count} tokens (and logits of {rows}) were asked of a request "
                                 f"with {request.length - request.computed} to compute.")
            if end > min(len(request.pages) * size, self.max_context):
                raise ValueError(f"Request {request.id} would have {end} tokens computed, but it "
                                 f"has {len(request.pages)} pages of {size} and the longest "
                                 f"context is {self.max_context}.")
        if (len(work) <= _RECORDED_SEQS and all(c.size == c.rows == 1 for c in work)
                and self._can_record):
            return self._decode([chunk.request for chunk in work])
        inputs = self.lay_out(work)
        hidden_TD = self.hidden(inputs)
        for chunk, start in zip(work, inputs.cu_seqlens_S1, strict=False):
            if chunk.hidden is not None:
                chunk.hidden(hidden_TD[start:start + chunk.size])
        return self.logits(hidden_TD, inputs)

    def lay_out(self, work: Sequence[Chunk]) -> Inputs:
        """The step as arrays."""
        size = self.pool.page_size
        tokens: list[int] = []
        positions, slots, cu, contexts, rows = [], [], [0], [], []
        table_SP = np.zeros((len(work), max(len(c.request.pages) for c in work)), dtype=np.int32)
        for s, (request, count, wanted, _) in enumerate(work):
            start, end = request.computed, request.computed + count
            tokens += request.tokens[start:end]
            position = np.arange(start, end, dtype=np.int32)
            pages = np.asarray(request.pages, dtype=np.int32)
            table_SP[s, :len(pages)] = pages
            positions.append(position)
            slots.append(pages[position // size] * size + position % size)
            contexts.append(end)
            cu.append(cu[-1] + count)
            rows.append(np.arange(cu[-1] - wanted, cu[-1]))
        rows_N = np.concatenate(rows)
        return Inputs(np.asarray(tokens, dtype=np.int64), np.concatenate(positions),
                      np.asarray(cu, dtype=np.int32), np.asarray(contexts, dtype=np.int32),
                      np.concatenate(slots), table_SP,
                      None if len(rows_N) == len(tokens) else rows_N)

    @torch.inference_mode()
    def hidden(self, inputs: Inputs) -> Tensor:
        """Hidden states of a laid-out step after the last norm, [T, D]."""
        put = self._put
        pool = self.pool
        batch = Batch(
            put(inputs.tokens_T), put(inputs.positions_T), put(inputs.cu_seqlens_S1),
            int(np.diff(inputs.cu_seqlens_S1).max()),
            KVView(pool.keys, pool.values, pool.page_size, put(inputs.page_table_SP),
                   put(inputs.context_S), put(inputs.slots_T)))
        return self.model.hidden(batch)

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor, inputs: Inputs) -> Tensor:
        """Logits of a step's wanted rows, [N, V]."""
        if inputs.rows_N is not None:
            hidden_TD = hidden_TD[self._put(inputs.rows_N)]
        return self.model.logits(hidden_TD)

    def close(self) -> None:
        """Lets go of what is beside this process; there is nothing, but over several ranks."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that have the model, by rank."""
        return (os.getpid(),)

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called with a sentence, from any thread, once a process that has a part of
        the model is lost. There are none, but over several ranks."""

    def give_up(self) -> None:
        """Lets a step that waits for another process fail at once (`RanksLost`), and all after it.
        A step of this process alone goes on."""

    def take_weights(self, weights: ModelSource | Mapping[str, Tensor], storage: Storage) -> None:
        """Puts other weights of the same architecture into the model. Raises as `take_weights`;
        nothing was changed then."""
        take_weights(self.model, weights, storage)
        self.forget()

    def forget(self) -> None:
        """Drops recordings, which point at weights and pages: these are other tensors from now
        on."""
        self._recorded.clear()

    @property
    def _can_record(self) -> bool:
        return (self.model.exact and self.device.type == "cpu" and not self._adapted
                and isinstance(self.model.embed.weight, PackedWeight))

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _decode(self, requests: list[Request]) -> Tensor:
        count = len(requests)
        recorded = self._recorded.pop(count, None)
        if recorded is None:
            if len(self._recorded) >= _RECORDED_SIZES:
                del self._recorded[next(iter(self._recorded))]  # the least recently used
            recorded = _RecordedDecode(self.model, self.pool, count,
                                       self.pool.pages_for(self.max_context))
        logits = recorded.run(requests)
        self._recorded[count] = recorded  # not before: a failed recording is of no use
        return logits


def local_spec(model: Decoder) -> ModelSpec:
    """The facts of the part of a model that is here: under tensor parallelism, of fewer heads."""
    return next(m.spec for m in model.modules() if isinstance(m, Attention))


class _RecordedDecode:
    """A decode step of a fixed number of requests: input buffers, a tape, the logits buffer."""

    def __init__(self, model: Decoder, pool: PagePool, seqs: int, table_width: int) -> None:
        from kilter.ops.cpu.tape import Tape

        self.model = model
        self.page_size = pool.page_size
        kv = KVView(pool.keys, pool.values, pool.page_size,
                    torch.zeros(seqs, table_width, dtype=torch.int32),
                    torch.ones(seqs, dtype=torch.int32), torch.zeros(seqs, dtype=torch.int32))
        self.batch = Batch(
            torch.zeros(seqs, dtype=torch.int64), torch.zeros(seqs, dtype=torch.int32),
            torch.arange(seqs + 1, dtype=torch.int32), 1, kv)
        self.tokens_S = self.batch.tokens_T.numpy()
        self.positions_S = self.batch.positions_T.numpy()
        self.table_SP = kv.page_table_SP.numpy()
        self.context_S = kv.context_S.numpy()
        self.slots_S = kv.slots_T.numpy()
        self.tape = Tape()
        self.logits: Tensor | None = None

    def run(self, requests: list[Request]) -> Tensor:
        size = self.page_size
        for s, request in enumerate(requests):
            position, pages = request.computed, request.pages
            self.tokens_S[s] = request.tokens[position]
            self.positions_S[s] = position
            self.context_S[s] = position + 1
            self.slots_S[s] = pages[position // size] * size + position % size
            self.table_SP[s, :len(pages)] = pages
        if self.logits is None:
            # The first step is computed for real while it is recorded.
            with self.tape.record():
                self.logits = self.model(self.batch)
        else:
            self.tape.replay()
        return self.logits
