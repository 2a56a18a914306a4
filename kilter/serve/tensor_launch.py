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
        ValueError: for a degree that the model cannot be spread over.
    """
    split_model(source.spec, options.degree)
    store = dist.TCPStore("127.0.0.1", 0, options.degree, is_master=True, wait_for_workers=False)
    told = json.dumps({"path": str(source.path.resolve()), "port": store.port,
                       "options": asdict(options), "config": asdict(config),
                       "parent": os.getpid()})
    ranks = [subprocess.Popen([sys.executable, "-m", __name__, str(rank), told],
                              stdin=subprocess.DEVNULL, start_new_session=True)
             for rank in range(1, options.degree)]
    watch = _Watch(ranks, lost or _end)
    try:
        library.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
        me = join(options.degree, 0, store, options.device)
        model, shards = load_part(source, me, storage=options.storage, exact=options.exact,
                                  kv_dtype=getattr(torch, options.kv_dtype),
                                  max_positions=options.context, progress=progress)
        executor = TensorExecutor(model, config, me, shards)
    except BaseException:
        watch.stop()
        for process in ranks:
            process.kill()
        raise
    executor.on_close = watch.stop
    engine = Engine(model, open_tokenizer(source), config, executor)
    atexit.register(engine.close)
    return engine


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
    follow(model, config, me, shards)


class _Watch:
    """Notices when a rank ends before it is told to."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]], lost: Callable[[str], None]) -> None:
        self._ranks, self._lost = ranks, lost
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="kilter-tp-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            for rank, process in enumerate(self._ranks, 1):
                if process.poll() is not None and not self._stopped.is_set():
                    self._lost(f"Tensor-parallel rank {rank} has ended with exit code "
                               f"{process.returncode}; the engine cannot go on without it.")
                    return


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
