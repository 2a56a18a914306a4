"""From one command to ranks, and from their ends to one sentence and an exit code.

    kilter train JOB.toml
      ├─ opens everything the job names: what is wrong is said before any rank starts
      ├─ one rank: works in this process
      └─ several: torch's elastic agent starts `python -m kilter.train.launch job.json` as often;
           a rank that dies takes the group down, which starts again from the last checkpoint
    torchrun … kilter train JOB.toml: is a rank already, and just works

The same for every kind of job (`Program`).

An ending that starting again would not change (done, told to stop, bad data, a NaN) is written to
`ending.json` beside the job; a rank that finds one leaves at once. A rank whose launcher is gone
takes that as being told to stop.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from kilter.job import build, dump
from kilter.ops.cpu import library
from kilter.report.machine import memory_bytes, usable_cpus
from kilter.train.config import LaunchConfig
from kilter.train.inputs import device_type
from kilter.train.step import NotFinite

_JOB, _ENDING = "job.json", "ending.json"
_FAREWELL = 10.0  # seconds in which the agent has seen the end of ranks that are done
_RANK_BYTES = 128 * 2**20  # of an interpreter with torch in it, before there is a model


@dataclass(frozen=True)
class Exit:
    """An exit code of `kilter.cli` and what to say, if anything: an error unless the code is 0."""

    code: int
    text: str


class Job(Protocol):
    """What every kind of job has."""

    @property
    def output(self) -> str: ...

    @property
    def launch(self) -> LaunchConfig: ...


@dataclass(frozen=True)
class Program:
    """A kind of job.

    Attributes:
        module: what ``python -m`` runs as a rank; it calls `main`.
        job: the dataclass of its jobs.
        world: ranks that a job takes.
        open: what a job names, opened and checked; asked before any rank starts, then in each.
        work: (job, what was opened, device type, timeout of collectives or None where there is no
            process group) -> how it ended.
        failures: exceptions that are an ending: starting again would not help.
    """

    module: str
    job: type
    world: Callable[[Any], int]
    open: Callable[[Any], Any]
    work: Callable[[Any, Any, str, timedelta | None], str]
    failures: tuple[type[Exception], ...] = (NotFinite,)


def run(program: Program, job: Job) -> Exit:
    """Works, in this process or in as many as the job asks for.

    Raises:
        ValueError: for a job that cannot be run, before anything was started.
    """
    if "RANK" in os.environ:
        found = _as_rank(program, job)
        return found if os.environ["RANK"] == "0" else replace(found, text="")
    _check_ranks(job, program.world(job))
    _check_output(job.output)
    opened = program.open(job)
    library.available()  # compiled once, before the ranks need it
    Path(job.output).mkdir(parents=True, exist_ok=True)
    if program.world(job) > 1:
        return _elastic(program, job)
    if job.launch.threads is not None:
        torch.set_num_threads(job.launch.threads)
        library.set_num_threads(job.launch.threads)
    try:
        return Exit(0, program.work(job, opened, device_type(job.launch), None))
    except program.failures as error:
        return Exit(1, str(error))


def _elastic(program: Program, job: Job) -> Exit:
    """Starts the ranks on this machine and waits for their end."""
    world = program.world(job)
    for name in ["torch.distributed.elastic", *logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):  # some have a level of their own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = job.launch.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(
        1, usable_cpus() // world)
    failed = ("The ranks were stopped before they could write a checkpoint. The same command goes "
              "on from the last one, if there is one.")
    with tempfile.TemporaryDirectory(prefix="kilter-train-") as temporary:
        file = Path(temporary) / _JOB
        file.write_text(json.dumps(dump(job)), encoding="utf-8")
        config = ElasticConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world, run_id=Path(temporary).name,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            max_restarts=job.launch.max_restarts, monitor_interval=0.1,
            shutdown_timeout=job.launch.grace)
        heard = ",".join(number.name for number in _heard())
        with _environment(OMP_NUM_THREADS=str(threads), TORCHELASTIC_SIGNALS_TO_HANDLE=heard
                          ), suppress(SignalException), _agent_ends(Path(temporary) / _ENDING):
            try:
                elastic_launch(config, sys.executable)("-m", program.module, str(file))
            except ChildFailedError as error:
                failed = _told(error.failures, job.launch.max_restarts)
        ending = Path(temporary) / _ENDING
        if ending.exists():
            return Exit(**json.loads(ending.read_text(encoding="utf-8")))
    return Exit(1, failed)


@contextmanager
def _agent_ends(ending: Path) -> Iterator[None]:
    """Interrupts torch's agent until it leaves where the ranks have ended and it does not see it.

    It raises from its signal handler. Where that is between `subprocess.Popen.poll` taking its lock
    and giving it back, the agent takes the process to be alive for ever, and waits for the whole of
    ``launch.grace`` twice."""
    done = threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        while not ending.exists():
            if done.wait(0.5):
                return
        while not done.wait(_FAREWELL):
            with lock:
                if not done.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="agent", daemon=True).start()
    try:
        yield
    finally:
        while not done.is_set():  # an interrupt that was under way must not leave the thread at it
            with suppress(SignalException), lock:
                done.set()


def main(program: Program, file: str) -> int:
    """A rank under `_elastic`; ``file`` is the job as JSON."""
    path = Path(file)
    ending = path.with_name(_ENDING)
    if ending.exists():
        return 0
    _follow_launcher()
    try:
        found = _as_rank(program, build(program.job,
                                        json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, OSError) as error:
        found = Exit(2, _sentence(error))
    except Exception as error:  # a lost peer, or a mistake of ours: starting again may help
        get_error_handler().record_exception(error)
        _leave(1)
    if found.code or os.environ["RANK"] == "0":
        _write_once(ending, json.dumps(asdict(found)))
    _leave(0)


def _as_rank(program: Program, job: Job) -> Exit:
    """Works as the rank that the environment says this process is."""
    device = device_type(job.launch)
    rank, restart = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=job.launch.timeout)
    store, _, world = next(dist.rendezvous("env://", timeout=timeout))
    # The agent's store outlives the group, so addresses of dead ranks are still in it.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=rank,
                            store=dist.PrefixStore(f"start-{restart}", store), world_size=world,
                            timeout=timeout)
    if rank == 0 and restart:
        print(f"A rank died; restart {restart} of at most {job.launch.max_restarts}.",
              file=sys.stderr, flush=True)
    wrong: list[str | None] = [None]
    if rank == 0:  # alone first: it says what is wrong, and tokenises what is not yet
        try:
            opened = program.open(job)
        except (ValueError, OSError) as error:
            wrong = [_sentence(error)]
    dist.broadcast_object_list(wrong)
    if wrong[0] is not None:
        return Exit(2, wrong[0])
    if rank != 0:
        opened = program.open(job)
    try:
        text = program.work(job, opened, device, timeout)
    except program.failures as error:
        return Exit(1, str(error))
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()
    return Exit(0, text)


def _check_ranks(job: Job, world: int) -> None:
    """That this machine has room for so many ranks. Raises ValueError."""
    if device_type(job.launch) == "cuda":
        if world > torch.cuda.device_count():
            raise ValueError(f"The layout has {world} ranks, but there are "
                             f"{torch.cuda.device_count()} GPUs; a rank needs one of its own. Make "
                             "the layout smaller, or set launch.device to cpu.")
    elif world * _RANK_BYTES > memory_bytes()[0]:
        raise ValueError(f"The layout has {world} ranks, but this machine's memory holds at most "
                         f"{memory_bytes()[0] // _RANK_BYTES} processes of them, whatever the "
                         "model. Make the layout smaller.")


def _check_output(output: str) -> None:
    """That a folder is there or can be made. Raises ValueError."""
    folder = Path(output)
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"output is {output}, but {place} is no folder; name another.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"output is {output}, but nothing may be written to {place}; name another "
                         "folder.")


def _heard() -> list[signal.Signals]:
    """The signals that tell a run to stop: not those that whoever started us wants ignored, as
    `nohup` does a closed terminal."""
    return [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN]


def _follow_launcher() -> None:
    """Tells this process to stop when its launcher is gone, which nobody else could do then."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _leave(code: int) -> NoReturn:
    """Ends the process at once: threads that wait for lost ranks would hold it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _write_once(path: Path, text: str) -> None:
    """Writes a file whole, unless another rank has."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    with suppress(FileExistsError):
        os.link(own, path)


def _told(failures: Mapping[int, ProcessFailure], restarts: int) -> str:
    """What made ranks fail for good. When one is gone the others lose their connection to it, and
    the agent ends what is left: none of these is the cause."""
    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        lost = any(word in _message(failure) for word in ("onnection", "by peer", "roken pipe"))
        return failure.exitcode == -signal.SIGTERM, lost, failure.timestamp, rank

    rank, failure = min(failures.items(), key=order)
    if failure.exitcode < 0:
        why = f"was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            why += " (as happens where memory runs out)"
    else:
        why = f"failed: {_message(failure) or f'exit code {failure.exitcode}'}"
    again = "It was not started again, as launch.max_restarts is 0." if restarts == 0 else (
        f"It had been started again as often as launch.max_restarts says, {restarts} "
        f"{'time' if restarts == 1 else 'times'}.")
    return (f"The run stopped: rank {rank} {why.rstrip('.')}. {again} The same command goes on "
            "from the last checkpoint, if there is one.")


def _message(failure: ProcessFailure) -> str:
    """The first line of what a rank recorded."""
    found: Any = failure.message  # as `record_exception` writes it, a table
    text = found["message"] if isinstance(found, Mapping) else ""
    return str(text).strip().partition("\n")[0]


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}."
    return str(error)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables of processes that are started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
