"""Runs a model on the sequences the caller names, keys and values in a page pool.

A step of single tokens (decode) runs the same kernels on the same buffers every time, so it is
recorded once per batch size and then replayed as one call (see `kilter.ops.cpu.tape`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kilter.models.batch import Batch, KVView
from kilter.models.decoder import Decoder
from kilter.ops.packed import PackedWeight
from kilter.serve.pages import PagePool

_TAPE_MAX_SEQS = 32  # past this Python's share of a step is small and buffers would be large


@dataclass(eq=False)
class Sequence:
    """One text in the making: its tokens, how many of them have keys and values in the cache, and
    the pages those lie in."""

    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Executor:
    """A model, a page pool, and the one way to run them: `run`.

    Args:
        max_context: longest sequence that will be run, tokens; it sizes the page table's rows.
    """

    def __init__(self, model: Decoder, pool: PagePool, max_context: int) -> None:
        if max_context > model.max_positions:
            raise ValueError(f"max_context is {max_context} tokens but this model was loaded for "
                             f"{model.max_positions}.")
        self.model = model
        self.pool = pool
        self.max_context = max_context
        self.device = pool.keys[0].device
        self._table_width = pool.pages_for(max_context)
        self._decodes: dict[int, _RecordedDecode] = {}
        self._can_record = (model.exact and self.device.type == "cpu"
                            and isinstance(model.embed.weight, PackedWeight))

    @torch.inference_mode()
    def run(self, work: SequenceOf[tuple[Sequence, int]], all_rows: bool = False) -> Tensor:
        """Computes the next ``n`` tokens of each sequence and returns logits, fp32.

        Args:
            work: (sequence, n >= 1) pairs. Pages are allocated as needed.
            all_rows: logits of every computed token [T, V]; else of each sequence's last [S, V].

        Returns:
            A tensor that the next call may overwrite.

        Raises:
            OutOfPages: the pool cannot hold the new tokens; nothing was computed.
            ValueError: a sequence longer than ``max_context`` or fewer than ``n`` tokens waiting.
        """
        for seq, n in work:
            end = seq.computed + n
            if n < 1 or end > len(seq.tokens):
                raise ValueError(f"{n} tokens were asked of a sequence with "
                                 f"{len(seq.tokens) - seq.computed} waiting.")
            if end > self.max_context:
                raise ValueError(f"The sequence would be {end} tokens long but this executor holds "
                                 f"{self.max_context}.")
        self._allocate(work)
        if self._can_record and len(work) <= _TAPE_MAX_SEQS and all(n == 1 for _, n in work):
            logits = self._decode(work)
        else:
            logits = self._forward(work, all_rows)
        for seq, n in work:
            seq.computed += n
        return logits

    def release(self, seq: Sequence) -> None:
        """Gives a sequence's pages back and forgets what was computed."""
        self.pool.release(seq.pages)
        seq.pages = []
        seq.computed = 0

    def _allocate(self, work: SequenceOf[tuple[Sequence, int]]) -> None:
        missing = [self.pool.pages_for(seq.computed + n) - len(seq.pages) for seq, n in work]
        pages = self.pool.allocate(sum(missing))
        for (seq, _), count in zip(work, missing, strict=True):
            seq.pages.extend(pages[:count])
            del pages[:count]

    def _forward(self, work: SequenceOf[tuple[Sequence, int]], all_rows: bool) -> Tensor:
        size = self.pool.page_size
        tokens: list[int] = []
        positions, slots, cu = [], [], [0]
        table_SP = np.zeros((len(work), max(len(seq.pages) for seq, _ in work)), dtype=np.int32)
        for s, (seq, n) in enumerate(work):
            tokens.extend(seq.tokens[seq.computed:seq.computed + n])
            position = np.arange(seq.computed, seq.computed + n, dtype=np.int32)
            pages = np.asarray(seq.pages, dtype=np.int32)
            positions.append(position)
            slots.append(pages[position // size] * size + position % size)
            cu.append(cu[-1] + n)
            table_SP[s, :len(pages)] = pages
        put = self._put
        batch = Batch(
            put(np.asarray(tokens, dtype=np.int64)), put(np.concatenate(positions)),
            put(np.asarray(cu, dtype=np.int32)), max(n for _, n in work),
            KVView(self.pool.keys, self.pool.values, size, put(table_SP),
                   put(np.asarray([seq.computed + n for seq, n in work], dtype=np.int32)),
                   put(np.concatenate(slots))))
        x_TD = self.model.hidden(batch)
        if not all_rows and len(tokens) > len(work):
            x_TD = x_TD[batch.cu_seqlens_S1[1:].long() - 1]
        return self.model.logits(x_TD)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _decode(self, work: SequenceOf[tuple[Sequence, int]]) -> Tensor:
        recorded = self._decodes.get(len(work))
        if recorded is None:
            recorded = self._decodes[len(work)] = _RecordedDecode(
                self.model, self.pool, len(work), self._table_width)
        return recorded.run([seq for seq, _ in work])


class _RecordedDecode:
    """A decode step of a fixed number of sequences: input buffers, a tape, the logits buffer."""

    def __init__(self, model: Decoder, pool: PagePool, seqs: int, table_width: int) -> None:
        from kilter.ops.cpu.tape import Tape

        self.model = model
        self.page_size = pool.page_size
        self.batch = Batch(
            torch.zeros(seqs, dtype=torch.int64), torch.zeros(seqs, dtype=torch.int32),
            torch.arange(seqs + 1, dtype=torch.int32), 1,
            KVView(pool.keys, pool.values, pool.page_size,
                   torch.zeros(seqs, table_width, dtype=torch.int32),
                   torch.ones(seqs, dtype=torch.int32), torch.zeros(seqs, dtype=torch.int32)))
        kv = self.batch.kv
        assert kv is not None
        self.tokens_S = self.batch.tokens_T.numpy()
        self.positions_S = self.batch.positions_T.numpy()
        self.table_SP = kv.page_table_SP.numpy()
        self.context_S = kv.context_S.numpy()
        self.slots_S = kv.slots_T.numpy()
        self.tape = Tape()
        self.logits: Tensor | None = None

    def run(self, seqs: list[Sequence]) -> Tensor:
        size = self.page_size
        for s, seq in enumerate(seqs):
            position = seq.computed
            self.tokens_S[s] = seq.tokens[position]
            self.positions_S[s] = position
            self.context_S[s] = position + 1
            self.slots_S[s] = seq.pages[position // size] * size + position % size
            self.table_SP[s, :len(seq.pages)] = seq.pages
        if self.logits is None:
            # The first step is computed for real while it is recorded.
            with self.tape.record():
                self.logits = self.model(self.batch)
        else:
            self.tape.replay()
        return self.logits
