"""Starts the tensor-parallel ranks of an engine on this machine: this process is rank 0.

The others are this module run by itself; they end when rank 0 says so, or when it is gone. If one
of them ends before that, or hangs, all are given up: what waits for them fails with `RanksLost`,
which says what happened, and so does everything after it. This process goes on: what can wait for
them is done in a thread that can be left behind (`kilter.serve.tensor_thread`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.ops.cpu import library
from kilter.parallel.heads import split_model
from kilter.parallel.shards import Shard
from kilter.serve import tensor_processes
from kilter.serve.engine import Engine
from kilter.serve.engine_config import EngineConfig
from kilter.serve.executor import Chunk, Executor, RanksLost
from kilter.serve.scheduler import SchedulerConfig
from kilter.serve.tensor import Ranks, TensorExecutor, follow_steps, join, leave, load_part
from kilter.serve.tensor_processes import Processes, key_of, said
from kilter.serve.tensor_thread import StepThread
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.load import Storage
from kilter.weights.tokenizer import open_tokenizer

T = TypeVar("T")
STEP_TIMEOUT = 300.0  # seconds after which a step is taken to hang


@dataclass(frozen=True)
class TensorOptions:
    """What every rank loads; as `kilter.serve.load.load_engine` has it.

    Attributes:
        degree: number of ranks.
        kv_dtype: name of a torch dtype.
        context: longest prompt plus answer, tokens.
        threads: CPU threads of each rank.
    """

    degree: int
    storage: Storage
    device: str
    exact: bool
    kv_dtype: str
    products: str
    context: int
    threads: int


def start_tensor_engine(source: ModelSource, options: TensorOptions, config: EngineConfig, *,
                        step_timeout: float = STEP_TIMEOUT,
                        progress: Callable[[int, int], None] | None = None) -> Engine:
    """An engine whose model is spread over ``degree`` processes of this machine, all of which are
    ready. `Engine.close` ends the others; so does the end of this process.

    Args:
        step_timeout: seconds after which a step that has not ended is given up with its ranks.

    Raises:
        ValueError: for a degree that the model or this machine's devices cannot be spread over, or
            if torch's default process group is in use.
        RanksLost: if another rank cannot start.
    """
    split_model(source.spec, options.degree)
    if dist.is_initialized():
        raise ValueError("A tensor-parallel engine makes torch's default process group of its own "
                         "ranks, but this process is in one already. Close the other engine, or "
                         "start this one in another process.")
    if options.device not in ("cpu", "cuda"):
        raise ValueError(f"The device is {options.device!r}, but {options.degree} tensor-parallel "
                         f"ranks take one each: choose cpu or cuda.")
    if options.device == "cuda" and torch.cuda.device_count() < options.degree:
        raise ValueError(f"{options.degree} tensor-parallel ranks need as many GPUs, but this "
                         f"machine shows {torch.cuda.device_count()}.")
    others = Processes(options.degree, __name__, {
        "path": str(source.path.resolve()), "options": asdict(options), "config": asdict(config)},
        step_timeout)
    thread = StepThread(lambda: others.hopeless)

    def load() -> tuple[Ranks, Decoder, dict[str, Shard]]:
        me = join(options.degree, 0, others.store, options.device,
                  timedelta(seconds=max(step_timeout, STEP_TIMEOUT)))
        if (sentence := others.hopeless) is not None:  # whoever asked for it is gone
            dist.destroy_process_group()
            raise RanksLost(sentence)
        return me, *load_part(source, me, storage=options.storage, exact=options.exact,
                              kv_dtype=getattr(torch, options.kv_dtype),
                              products=options.products, max_positions=options.context,
                              progress=progress)

    try:
        library.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
        others.watch()
        others.wait_for("here")
        me, model, shards = thread.do(load)
        executor = _LeadingExecutor(model, config, me, shards)
        executor.others, executor.thread = others, thread
        engine = Engine(model, open_tokenizer(source), config, executor)
        others.wait_for("ready")
    except BaseException:
        others.kill()
        thread.end()
        leave()
        raise
    atexit.register(executor.close)
    return engine


class _LeadingExecutor(TensorExecutor):
    """Rank 0's executor where the other ranks are processes that this one started."""

    others: Processes
    thread: StepThread

    def run(self, work: Sequence[Chunk]) -> Tensor:
        return self._do(partial(self._run, work))

    def _run(self, work: Sequence[Chunk]) -> Tensor:
        logits_NV = super().run(work)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # here a wait for another rank can be given up
        return logits_NV

    def take_weights(self, weights: ModelSource | Mapping[str, Tensor], storage: Storage) -> None:
        # Reading takes as long as the disk does.
        self._do(partial(super().take_weights, weights, storage), timed=False)

    @property
    def pids(self) -> tuple[int, ...]:
        return (os.getpid(), *(process.pid for process in self.others.processes))

    def on_loss(self, tell: Callable[[str], None]) -> None:
        self.others.listen(tell)

    def give_up(self) -> None:
        self.others.lose("The tensor-parallel ranks were given up in the middle of a step.")

    def close(self) -> None:
        atexit.unregister(self.close)
        ranks = self.others
        if ranks.expected:
            return
        ranks.expected = True
        # A rank that is in the middle of a step hears nothing, and one that hangs holds up its
        # caller.
        hung = threading.Timer(tensor_processes.FAREWELL if self.together else 0.0, ranks.kill)
        hung.start()
        super().close()
        ranks.reap()
        hung.cancel()
        self.thread.end()

    def _dismiss(self) -> None:
        self._do(super()._dismiss)

    def _tell_copy(self, source: int, target: int, tokens: int) -> None:
        with contextlib.suppress(RanksLost):  # the step that it is for will say so
            self._do(partial(self._copy_with_all, source, target, tokens))

    def _copy_with_all(self, source: int, target: int, tokens: int) -> None:
        self._part()
        super()._tell_copy(source, target, tokens)
        self.together = True

    def _do(self, what: Callable[[], T], timed: bool = True) -> T:
        """What cannot be done without the others. An error that comes before they were asked for
        anything is what it is; any other leaves them out of step. An interrupt does not: what was
        begun is done to its end first, unless another one comes."""
        others = self.others
        if others.ended:
            others.lose("A tensor-parallel rank has ended.")
        if (sentence := others.hopeless) is not None:
            raise RanksLost(sentence)
        others.since = time.monotonic() if timed else None
        try:
            return self.thread.do(what)
        except Exception as error:
            if self.together or isinstance(error, RanksLost):
                raise
            raise RanksLost(others.lose(f"Tensor-parallel rank 0 failed: {said(error)}")
                            ) from error
        except BaseException:
            with contextlib.suppress(RanksLost):
                self.thread.do(_nothing)
            raise
        finally:
            others.since = None


def _nothing() -> None:
    pass


def _rank(rank: int, told: str) -> None:
    """The life of another rank."""
    facts = json.loads(told)
    options = TensorOptions(**facts["options"])
    scheduler = SchedulerConfig(**facts["config"].pop("scheduler"))
    config = EngineConfig(**facts["config"], scheduler=scheduler)
    # Rank 0 hears the signals; this one ends when told to, or with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(facts["parent"],), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", facts["port"], options.degree, is_master=False)
    try:
        library.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
        store.set(key_of("here", rank), "")
        me = join(options.degree, rank, store, options.device)
        model, shards = load_part(open_model(Path(facts["path"])), me, storage=options.storage,
                                  exact=options.exact, kv_dtype=getattr(torch, options.kv_dtype),
                                  products=options.products, max_positions=options.context)
        executor = Executor.of(model, config)
        store.set(key_of("ready", rank), "")
        follow_steps(executor, me, shards)
        dist.destroy_process_group()
    except BaseException as error:
        trace = "" if isinstance(error, ValueError | OSError | MemoryError) else (
            traceback.format_exc())
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            store.set(key_of("failed", rank), json.dumps([time.monotonic(), said(error), trace]))
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
