"""From data to steps: which packs a step has, and this rank's share of them.

All ranks count through one row of packs, which is the same whatever their number. Step s of G
micro-batches has the packs s·G … s·G + G−1, and micro-batch i goes to data-parallel rank i mod dp.
Counting needs lengths only, so a rank reads no tokens but its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kilter.train.data.config import DataConfig
from kilter.train.data.corpus import Corpus, Data
from kilter.train.data.order import Order
from kilter.train.data.packing import Pack, Packer

Unit = tuple[int, int]  # source, unit of it
_BLOCK = 1024  # places looked up at a time


class PackStream:
    """The endless row of packs, as lists of units. A pack never holds documents of two epochs.

    epoch, position: the next place to come into view; waiting: places that are in view.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, order: Order, epoch: int = 0,
                 position: int = 0, waiting: list[int] | None = None) -> None:
        self._corpus, self._config, self._order = corpus, config, order
        self.epoch, self.position = epoch, position
        self._seen: dict[int, tuple[Unit, int]] = {}  # unit and length of the places in view
        self._ahead: deque[tuple[int, Unit, int]] = deque()  # (place, unit, length) still to come
        self._end = order.length(epoch)
        self._packer = Packer()
        for place, unit, length in self._look_up(np.array(waiting or [], np.int64)):
            self._see(place, unit, length)

    def state(self) -> dict[str, Any]:
        """What `PackStream` needs to go on from here; numbers only."""
        return {"epoch": self.epoch, "position": self.position, "waiting": self._packer.places}

    @property
    def at_epoch_end(self) -> bool:
        """Whether the epoch has no further pack."""
        return self.position >= self._end and not len(self._packer)

    def is_over(self, epochs: int) -> bool:
        """Whether so many epochs have no further pack. (With small weights, one may have none.)"""
        return self.epoch >= epochs or (self.at_epoch_end and not any(
            self._order.length(epoch) for epoch in range(self.epoch + 1, epochs)))

    def next(self) -> list[Unit]:
        """The units of the next pack, in the order of arrival."""
        while self.at_epoch_end:
            self.epoch, self.position = self.epoch + 1, 0
            self._end = self._order.length(self.epoch)
        room, taken = self._config.seq_len, []
        self._fill_view()
        place = self._packer.first()
        while place is not None:
            unit, length = self._seen.pop(place)
            taken.append((place, unit))
            room -= length
            self._fill_view()
            place = self._packer.fitting(room) if self._config.packing else None
        return [unit for _, unit in sorted(taken)]

    def _fill_view(self) -> None:
        while len(self._packer) < self._config.lookahead and self.position < self._end:
            if not self._ahead:
                end = min(self.position + _BLOCK, self._end)
                self._ahead.extend(self._look_up(np.arange(self.position, end, dtype=np.int64)))
            self._see(*self._ahead.popleft())
            self.position += 1

    def _see(self, place: int, unit: Unit, length: int) -> None:
        self._seen[place] = unit, length
        self._packer.add(place, length)

    def _look_up(self, places_N: np.ndarray) -> list[tuple[int, Unit, int]]:
        sources_N, units_N = self._order.units(self.epoch, places_N)
        lengths_N = self._corpus.lengths(sources_N, units_N)
        units = zip(sources_N.tolist(), units_N.tolist(), strict=True)
        return list(zip(places_N.tolist(), units, lengths_N.tolist(), strict=True))


class DataLoader:
    """This rank's packs, step after step, made ahead in a thread.

    global_micro_batches: packs in a step over all ranks.
    dp_rank, dp: which of how many data-parallel ranks this is.
    prefetch: steps made ahead.
    epochs: where the row of packs ends; the step that has the last ones is filled up with blank
        packs, so that no document comes once more. None: never.

    Raises ValueError if the micro-batches do not divide among the ranks.
    """

    def __init__(self, data: Data, global_micro_batches: int, dp_rank: int = 0, dp: int = 1,
                 prefetch: int = 2, epochs: int | None = None) -> None:
        _check_rank(dp_rank, dp)
        if global_micro_batches < 1 or global_micro_batches % dp:
            raise ValueError(f"A step of {global_micro_batches} micro-batches cannot be shared by "
                             f"{dp} data-parallel ranks. Make it a multiple of {dp}.")
        config = data.config
        weights = [source.weight for source in config.sources]
        self._order = Order(data.train.sizes, weights, config.shuffle, config.seed)
        self._data, self._count = data, global_micro_batches
        self._dp_rank, self._dp, self._depth = dp_rank, dp, max(1, prefetch)
        self._epochs = epochs
        self._stream = PackStream(data.train, config, self._order)
        self._state = self._stream.state()
        self._ahead: deque[Future[tuple[list[Pack], dict[str, Any]]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kilter-data")

    @property
    def epoch(self) -> int:
        """The epoch that the last step ended in, from 0."""
        return int(self._state["epoch"])

    def steps_left(self) -> int:
        """Steps to the end of the epochs, from the next one on. Every pack is counted, by lengths
        alone."""
        if self._epochs is None:
            raise ValueError("A row of packs without an end has no number of steps.")
        stream = PackStream(self._data.train, self._data.config, self._order, **self._state)
        packs = 0
        while not stream.is_over(self._epochs):
            stream.next()
            packs += 1
        return -(-packs // self._count)

    def next_step(self) -> list[Pack]:
        """This rank's micro-batches of the next step, in their order.

        Raises ValueError if the epochs are over.
        """
        while len(self._ahead) < self._depth:
            self._ahead.append(self._thread.submit(self._make))
        try:
            packs, self._state = self._ahead.popleft().result()
        except BaseException:
            self._go_to(self._state)  # the step can be asked for again
            raise
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, as JSON has it. It is the same on every rank, and fits any
        number of ranks and of micro-batches."""
        return {"data": self._data.key, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises ValueError if that was with other data, or with settings that give another order.
        """
        if state.get("data") != self._data.key:
            raise ValueError("The checkpoint's place in the data was saved with other data or "
                             "settings (files, tokenizer, weights, seq_len, packing, lookahead, "
                             "long_documents, shuffle, seed or eval_fraction), so it cannot be "
                             "resumed exactly. Restore them, or start the data anew.")
        self._go_to({name: state[name] for name in ("epoch", "position", "waiting")})

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> tuple[list[Pack], dict[str, Any]]:
        mine: list[Pack] = []
        units: list[Unit] = []
        for number in range(self._count):
            over = self._epochs is not None and self._stream.is_over(self._epochs)
            if over and not units:
                raise ValueError(f"All {self._epochs} epochs are over.")
            units = units if over else self._stream.next()
            if number % self._dp == self._dp_rank:
                pack = _read(self._data.train, units)
                mine.append(pack.blank() if over else pack)
        return mine, self._stream.state()

    def _go_to(self, state: dict[str, Any]) -> None:
        while self._ahead:
            future = self._ahead.pop()
            if not future.cancel():
                future.exception()  # wait until the thread lets go of the stream
        self._state = state
        self._stream = PackStream(self._data.train, self._data.config, self._order, **state)


def evaluation_packs(data: Data, dp_rank: int = 0, dp: int = 1) -> Iterator[Pack]:
    """This rank's packs of the held-out documents: `corpus_packs`."""
    if data.held_out is None:
        return iter(())
    return corpus_packs(data.held_out, data.config, dp_rank, dp)


def corpus_packs(corpus: Corpus, config: DataConfig, dp_rank: int = 0, dp: int = 1
                 ) -> Iterator[Pack]:
    """This rank's packs of all documents, each of which is in one pack of one rank.

    All ranks get equally many packs, so that they can run the model together; where the packs do
    not divide, some get a blank one (no labels, no ids).
    """
    _check_rank(dp_rank, dp)
    sizes = corpus.sizes
    stream = PackStream(corpus, config, Order(sizes, [1.0] * len(sizes), False, 0))
    while not stream.at_epoch_end:
        together = [stream.next()]
        while len(together) < dp and not stream.at_epoch_end:
            together.append(stream.next())
        pack = _read(corpus, together[min(dp_rank, len(together) - 1)])
        yield pack if dp_rank < len(together) else pack.blank()


def _read(corpus: Corpus, units: list[Unit]) -> Pack:
    return Pack.of([corpus.read(source, unit) for source, unit in units])


def _check_rank(dp_rank: int, dp: int) -> None:
    if not 0 <= dp_rank < dp:
        raise ValueError(f"The data-parallel rank is {dp_rank} of {dp}; it must be from 0 to "
                         f"{dp - 1}.")
