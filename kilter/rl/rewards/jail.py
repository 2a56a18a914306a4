"""The program that runs what a model wrote: a script of the standard library only, which
`jails.py` starts. It imports nothing of Kilter: it has to start fast, and what is not in its memory
cannot be read from it.

It speaks in frames on its standard input and output, 8 bytes of length and JSON:

    → {"work": "program" | "mathematics" | "reasoning_gym", "limits": {…}, "isolate": bool,
       "folder": where jobs get folders of their own,
       "readable": [paths], "sys_path": [paths] or null for this program's own}
    ← {"problem": null or a sentence}
    → a job                              (again and again; the end of input ends the program)
    ← {"end": "exit" | "time" | "output" | "signal", "code": int, "output": text}

Every job runs in a process of its own, forked from this one, so that imports are paid for once and
nothing that one answer does is there for the next. Before the work starts the child locks itself
up (`_lock`); this process reads its output up to a limit and kills its group when time is up.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

Message = dict[str, Any]
Work = Callable[[Message], None]
Prepare = Callable[[Message], Work]

REPORT = 3  # the descriptor a child writes its result to

# What a child may not call: the numbers on x86-64 and on AArch64 (None: not there).
DENIED: dict[str, tuple[int, int | None]] = {
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "setsid": (112, 157), "setpgid": (109, 154),
    # the network; io_uring would go around a filter of system calls
    "socket": (41, 198), "io_uring_setup": (425, 425),
    # its own limits and share of the machine
    "setrlimit": (160, 164), "prlimit64": (302, 261), "setpriority": (141, 140),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    "mlock": (149, 228), "mlockall": (151, 230), "mlock2": (325, 284),
    # memory that outlives a process or that no limit counts
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # attributes of files, which Landlock does not guard
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    # the machine
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "sync": (162, 81),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None),
}
ON_SELF = {"kill": (62, 129), "tgkill": (234, 131)}  # allowed to itself, as abort() does
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_THREAD = 0x10000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, audit number


def main() -> None:
    setup = _receive()
    assert setup is not None
    sys.path[:] = setup["sys_path"] or sys.path
    setup["readable"] += sys.path
    problem = None
    try:
        prepare = {"program": _prepare_program, "mathematics": _prepare_mathematics,
                   "reasoning_gym": _prepare_reasoning_gym}[setup["work"]]()
        patient = {**setup["limits"], "seconds": 60.0, "cpu_seconds": 60}  # not an answer's
        tried = _run({**setup, "limits": patient}, _probe, {})
        if tried["output"] != "locked":
            problem = tried["output"] or f"the trial ended with {tried['end']} {tried['code']}"
    except ImportError as error:
        problem = f"it cannot be imported: {error}"
    _send({"problem": problem})
    while (job := _receive()) is not None:
        try:
            work = prepare(job)
        except Exception as error:  # of our own making or the reference's, never of an answer
            _send({"end": "error", "code": 0, "output": f"{type(error).__name__}: {error}"})
            continue
        _send(_run(setup, work, job))


def _receive() -> Message | None:
    head = _exactly(8)
    body = None if head is None else _exactly(int.from_bytes(head, "little"))
    if body is None:
        return None
    message: Message = json.loads(body)
    return message


def _exactly(count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        block = os.read(0, min(count - len(data), 1 << 20))
        if not block:
            return None
        data += block
    return data


def _send(message: Message) -> None:
    data = json.dumps(message).encode()
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(1, data):]


# --- one job ---------------------------------------------------------------------------------


def _run(setup: Message, work: Work, job: Message) -> Message:
    """Forks, locks the child up, lets it work, and says how it ended and what it wrote."""
    limits = setup["limits"]
    folder = tempfile.mkdtemp(dir=setup["folder"])
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as given:
        given.write(job.get("stdin", "").encode(errors="replace"))
        given.seek(0)
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(setup, work, job, folder, given.fileno(), writer)
    os.close(writer)
    try:
        end, data = _watch(pid, reader, limits)
    finally:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if end == "exit" and code < 0:
        end = "time" if -code == signal.SIGXCPU else "signal"
    code = abs(code)
    return {"end": end, "code": code, "output": data.decode(errors="replace")}


def _watch(pid: int, reader: int, limits: Message) -> tuple[str, bytes]:
    deadline, most = time.monotonic() + limits["seconds"], limits["output"]
    os.set_blocking(reader, False)
    data, open_ = b"", True
    while True:
        left = deadline - time.monotonic()
        if open_:
            select.select([reader], [], [], max(min(left, 0.02), 0.0))
        else:
            time.sleep(0.002)
        # whether it has ended is asked first, so that what it wrote before is read after
        done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        while open_ and len(data) <= most:
            try:
                block = os.read(reader, 1 << 16)
            except BlockingIOError:
                break
            open_ = bool(block)
            data += block
        if len(data) > most:
            return "output", data[:most]
        if done:
            return "exit", data
        if left <= 0:
            return "time", data


def _child(setup: Message, work: Work, job: Message, folder: str, given: int,
           writer: int) -> NoReturn:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        to_output = "stdin" in job
        # away from 0…3 first, so that none is overwritten before it is moved
        given, writer, nothing = (_above(fd) for fd in (given, writer, nothing))
        os.dup2(given if to_output else nothing, 0)
        os.dup2(writer if to_output else nothing, 1)
        os.dup2(nothing, 2)
        os.dup2(nothing if to_output else writer, REPORT)
        os.closerange(REPORT + 1, 4096)
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
        os.chdir(folder)
        os.environ.clear()
        try:
            _lock(setup, folder)
        except (OSError, ValueError) as error:
            if work is _probe:
                os.write(REPORT, str(error).encode())
            os._exit(1)
        work(job)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        except BaseException:
            code = code or 1
        os._exit(code & 0xFF)


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD, 16)


def _probe(job: Message) -> None:
    os.write(REPORT, b"locked")


# --- what is run -----------------------------------------------------------------------------


def _prepare_program() -> Prepare:
    return lambda job: _program


def _program(job: Message) -> None:
    """A candidate program, and what its test asks of it.

    The candidate never sees the value or text that is expected of it, except in an assertion."""
    text = job["program"]
    call, check = job.get("call"), job.get("assert")
    name = "__main__" if call is None and check is None else "candidate"
    space: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
    exec(compile(text, "candidate.py", "exec"), space)
    if call is not None:
        value = space[call](*job.get("args", ()), **job.get("kwargs", {}))
        _report({"value": value})
    elif check is not None:
        exec(compile(check, "test.py", "exec"), space)
        _report({"passed": job["token"]})


def _report(value: Message) -> None:
    data = json.dumps(value).encode()
    while data:
        data = data[os.write(REPORT, data):]


def _prepare_mathematics() -> Prepare:
    import math_verify

    # its grammars are read at the first use, which should not be paid for by every child
    math_verify.verify(math_verify.parse(r"$\frac{1}{2}$", parsing_timeout=None),
                       math_verify.parse("0.5", parsing_timeout=None), timeout_seconds=None)

    def mathematics(job: Message) -> None:
        gold = math_verify.parse(job["gold"], parsing_timeout=None)
        if not gold:
            _report({"error": "it has no expression that can be read"})
            return
        answer = math_verify.parse(job["answer"], parsing_timeout=None)
        equal = math_verify.verify(gold, answer, float_rounding=job["digits"],
                                   strict=job["strict"], timeout_seconds=None)
        _report({"value": float(bool(equal))})

    return lambda job: mathematics


def _prepare_reasoning_gym() -> Prepare:
    import reasoning_gym

    datasets: dict[str, Any] = {}
    entries: dict[tuple[str, int], Any] = {}

    def prepare(job: Message) -> Work:
        reference = job["reference"]
        address = json.dumps([reference["dataset"], reference.get("config", {})], sort_keys=True)
        if address not in datasets:
            datasets[address] = reasoning_gym.create_dataset(reference["dataset"],
                                                             **reference.get("config", {}))
        dataset = datasets[address]
        entry = reference.get("entry")
        if entry is None:
            place = (address, reference["index"])
            if place not in entries:
                if len(entries) >= 256:
                    entries.clear()
                entries[place] = dataset[reference["index"]]
            entry = entries[place]
            if entry["answer"] != reference.get("answer", entry["answer"]):
                raise ValueError(f"item {reference['index']} of {reference['dataset']} came out "
                                 "with another answer than when the task made it; this dataset "
                                 "is not deterministic on this machine or version")

        def judge(job: Message) -> None:
            _report({"value": float(dataset.score_answer(job["answer"], entry))})

        return judge

    return prepare


# --- the lock --------------------------------------------------------------------------------


def _lock(setup: Message, folder: str) -> None:
    """Limits, then (isolated) Landlock and a filter of system calls; OSError says what failed."""
    limits = setup["limits"]
    pages = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    memory = limits["memory"] + pages * resource.getpagesize()  # beside what is loaded already
    cpu = int(limits["cpu_seconds"])
    wanted = {"CORE": (0, 0), "CPU": (cpu, cpu + 1), "AS": (memory, memory),
              "FSIZE": (limits["file"], limits["file"]), "NOFILE": (limits["files"],) * 2}
    if not setup["isolate"]:
        wanted["NPROC"] = (0, 0)  # counts every process of the user, so: none; root is exempt
    for name, (soft, hard) in wanted.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            most = resource.getrlimit(kind)[1]
            most = hard if most == resource.RLIM_INFINITY else min(hard, most)
            resource.setrlimit(kind, (min(soft, most), most))
    if not setup["isolate"]:
        return
    if not sys.platform.startswith("linux"):
        raise OSError(f"isolation needs Linux, but this is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, 1, signal.SIGKILL, "PR_SET_PDEATHSIG")
    _prctl(libc, 38, 1, "PR_SET_NO_NEW_PRIVS")
    _landlock(libc, setup["readable"], folder if limits["file"] else None)
    _seccomp(libc)


def _prctl(libc: ctypes.CDLL, option: int, value: int, name: str) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0),
                  ctypes.c_ulong(0)) != 0:
        raise OSError(f"{name} is refused: {os.strerror(ctypes.get_errno())}")


class _Path(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def _landlock(libc: ctypes.CDLL, readable: list[str], writable: str | None) -> None:
    """Files: reading below `readable`, writing below `writable`, and nothing else."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        raise OSError("the kernel has no Landlock (Linux 5.13 or later, enabled at boot)")
    # execute, write, read, list, remove ×2, make ×7; then moving between folders and truncating
    every = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14
    handled = ctypes.c_uint64(every)
    rules = libc.syscall(444, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        raise OSError(f"Landlock is refused: {os.strerror(ctypes.get_errno())}")
    reading, of_files = 0b1100, 0b111 | 1 << 14
    grants = [(path, reading) for path in readable if os.path.exists(path)]
    grants += [(os.devnull, 0b110)]
    if writable is not None:
        grants.append((writable, every & ~1 & ~(0b111001 << 6)))  # no devices, sockets, pipes
    for path, allowed in grants:
        parent = os.open(path, os.O_PATH)
        allowed &= every if os.path.isdir(path) else of_files & every
        rule = _Path(allowed, parent)
        if libc.syscall(445, rules, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0)) != 0:
            raise OSError(f"Landlock refuses {path}: {os.strerror(ctypes.get_errno())}")
        os.close(parent)
    if libc.syscall(446, rules, ctypes.c_uint32(0)) != 0:
        raise OSError(f"Landlock is refused: {os.strerror(ctypes.get_errno())}")
    os.close(rules)


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def _seccomp(libc: ctypes.CDLL) -> None:
    """A filter of system calls: EPERM for what is in `DENIED`."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"there is no filter of system calls for {machine}")
    column, audit = ARCHITECTURES[machine]
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, missing = 0x7FFF0000, 0x80000000, 0x50000 | 1, 0x50000 | 38
    number, architecture, argument = 0, 4, 16  # offsets in struct seccomp_data
    code = [(load, 0, 0, architecture), (equal, 1, 0, audit), (give, 0, 0, kill),
            (load, 0, 0, number), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for denied in DENIED.values():
        called = denied[column]
        if called is not None:
            code += [(equal, 0, 1, called), (give, 0, 0, refuse)]
    # ENOSYS makes the C library take clone, whose flags can be seen: threads are allowed
    code += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, missing)]
    code += [(equal, 0, 4, CLONE[column]), (load, 0, 0, argument), (has, 0, 1, CLONE_THREAD),
             (give, 0, 0, allow), (give, 0, 0, refuse)]
    for numbers in ON_SELF.values():
        code += [(equal, 0, 4, numbers[column]), (load, 0, 0, argument), (equal, 0, 1, os.getpid()),
                 (give, 0, 0, allow), (give, 0, 0, refuse)]
    code.append((give, 0, 0, allow))
    instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
    program = _Program(len(code), instructions)
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0),
                  ctypes.c_ulong(0)) != 0:
        raise OSError("the filter of system calls is refused: "
                      f"{os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
