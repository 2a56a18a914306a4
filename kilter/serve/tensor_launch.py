"""Starts the tensor-parallel ranks of an engine on this machine: this process is rank 0.

The others are this module run by itself; they end when rank 0 says so, or when it is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from kilter.ops.cpu import library
from kilter.parallel.heads import split_model
from kilter.serve.engine import Engine
from kilter.serve.engine_config import EngineConfig
from kilter.serve.load import open_tokenizer
from kilter.serve.scheduler import SchedulerConfig
from kilter.serve.tensor import TensorExecutor, follow, join, load_part
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.load import Storage

_FAREWELL = 10.0  # seconds that ranks get to end by themselves


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
    context: int
    threads: int


def start_tensor_engine(source: ModelSource, options: TensorOptions, config: EngineConfig, *,
                        progress: Callable[[int, int], None] | None = None,
                        lost: Callable[[str], None] | None = None) -> Engine:
    """An engine whose model is spread over ``degree`` processes of this machine. `Engine.close`
    ends the others; so does the end of this process.

    Args:
        lost: called with a sentence, from a thread, when another rank has died. The default says
            it on stderr and ends this process: nothing here could go on.

    Raises:
        ValueError: for a degree that the model or this machine's devices cannot be spread over, or
            if torch's default process group is in use.
    """
    split_model(source.spec, options.degree)
    if dist.is_initialized():
        raise ValueError("A tensor-parallel engine makes torch's default process group of its own "
                         "ranks, but this process is in one already. Close the other engine, or "
                         "start this one in another process.")
    if options.device == "cuda" and torch.cuda.device_count() < options.degree:
        raise ValueError(f"{options.degree} tensor-parallel ranks need as many GPUs, but this "
                         f"machine shows {torch.cuda.device_count()}.")
    store = dist.TCPStore("127.0.0.1", 0, options.degree, is_master=True, wait_for_workers=False)
    told = json.dumps({"path": str(source.path.resolve()), "port": store.port,
                       "options": asdict(options), "config": asdict(config),
                       "parent": os.getpid()})
    ranks = [subprocess.Popen([sys.executable, "-m", __name__, str(rank), told],
                              stdin=subprocess.DEVNULL, start_new_session=True)
             for rank in range(1, options.degree)]
    others = _Others(ranks, lost or _end)
    try:
        library.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
        me = join(options.degree, 0, store, options.device)
        model, shards = load_part(source, me, storage=options.storage, exact=options.exact,
                                  kv_dtype=getattr(torch, options.kv_dtype),
                                  max_positions=options.context, progress=progress)
        executor = _LeadingExecutor(model, config, me, shards)
        executor.others = others
        engine = Engine(model, open_tokenizer(source), config, executor)
    except BaseException:
        others.expected = True
        others.reap(0.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    atexit.register(executor.close)
    return engine


class _LeadingExecutor(TensorExecutor):
    """Rank 0's executor where the other ranks are processes that this one started."""

    others: _Others

    def close(self) -> None:
        atexit.unregister(self.close)
        self.others.expected = True
        super().close()
        # Ranks that are in the middle of a step hear nothing.
        self.others.reap(_FAREWELL if self.together else 0.0)


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
    library.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    store = dist.TCPStore("127.0.0.1", facts["port"], options.degree, is_master=False)
    me = join(options.degree, rank, store, options.device)
    model, shards = load_part(open_model(Path(facts["path"])), me, storage=options.storage,
                              exact=options.exact, kv_dtype=getattr(torch, options.kv_dtype),
                              max_positions=options.context)
    try:
        follow(model, config, me, shards)
    except RuntimeError as error:  # another rank is gone; rank 0 says so
        if facts["parent"] == os.getppid() and "onnection" not in str(error):
            raise
        os._exit(1)


class _Others:
    """The processes of the other ranks; notices when one ends before it is told to.

    Attributes:
        expected: whether they are to end.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]],
                 lost: Callable[[str], None]) -> None:
        self.processes, self._lost = processes, lost
        self.expected = False
        threading.Thread(target=self._watch, name="kilter-tp-watch", daemon=True).start()

    def reap(self, seconds: float) -> None:
        """Waits so long for each to end, and kills those that do not."""
        for process in self.processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        while not self.expected:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None and not self.expected:
                    self._lost(f"Tensor-parallel rank {rank} has ended with exit code "
                               f"{process.returncode}; the engine cannot go on without it.")
                    return
            time.sleep(0.2)


def _end(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"kilter: error: {sentence}\n".encode())
    os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
