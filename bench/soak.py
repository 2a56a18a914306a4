"""A server under random load for minutes: does it leak, hang, or stop answering /health?

    python -m bench.soak [--minutes 10] [--model smollm2-135m] [--clients 24]

`kilter serve` runs in its own process. Clients come and go: streams read to their end or broken
off, answers waited for or not, broken bodies, prompts longer than the context, and processes that
are killed with their connections open. Beside them /health is asked four times a second, and the
server's memory, files and threads are read from /proc. At the end the load stops, and every page
must be free or cached again.

Fails (exit 1) if memory grows, pages or files stay held, a client waits too long, the server
answers with 5xx, or the 99th percentile of /health is 200 ms or more. Writes
bench/results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.page import provenance, write_section

HERE = Path(__file__).parent
HEALTH_LIMIT = 0.2  # seconds, 99th percentile
PATIENCE = 120.0  # seconds after which a client that waits counts as hung
LEAK_LIMIT = 4 * 2**20  # bytes by which memory may rise from every fifth of the run to the next
WORDS = ("the", "river", "bread", "moon", "of", "trains", "glass", "bees", "and", "maps", "rooms")

# A process that opens streams, reads a little and never closes them; it is killed.
VICTIM = """
import socket, sys, time
body = sys.argv[2].encode()
streams = []
for _ in range(4):
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\n"
              b"Content-Type: application/json\\r\\n"
              b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    streams.append(s)
streams[0].recv(64)
print("up", flush=True)
time.sleep(600)
"""


@dataclass
class Watch:
    """What was seen of the server from outside."""

    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)


# ---- the server from outside ----

def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port: int, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_until_up(port: int, server: subprocess.Popen[bytes], limit: float = 180.0) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(port, "/health")[0] == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"The server was not up after {limit:.0f} s (exit code {server.poll()}).")


def metric(text: str, name: str) -> float:
    """Sum over a metric's samples."""
    values = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text)
    if not values:
        raise ValueError(f"/metrics has no {name}.")
    return sum(map(float, values))


def watch_process(pid: int, watch: Watch, over: threading.Event) -> None:
    start = time.monotonic()
    while not over.is_set():
        status = Path(f"/proc/{pid}/status").read_text()
        watch.seconds.append(time.monotonic() - start)
        watch.rss.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024)  # type: ignore[index]
        watch.threads.append(int(re.search(r"Threads:\s+(\d+)", status)[1]))  # type: ignore[index]
        watch.files.append(len(os.listdir(f"/proc/{pid}/fd")))
        over.wait(1.0)


def watch_health(port: int, watch: Watch, over: threading.Event) -> None:
    while not over.is_set():
        start = time.perf_counter()
        try:
            status, _ = get(port, "/health", timeout=30)
            watch.unhealthy += status != 200
        except (OSError, http.client.HTTPException) as error:
            watch.problem(f"/health: {error!r}")
        watch.health.append(time.perf_counter() - start)
        over.wait(0.25)


# ---- clients ----

class Client:
    """One user at a time, each with a connection of its own."""

    def __init__(self, port: int, model: str, context: int, watch: Watch, seed: int) -> None:
        self._port = port
        self._model = model
        self._context = context
        self._watch = watch
        self._rng = random.Random(seed)

    async def run(self, end: float) -> None:
        kinds = {"chat stream": 6, "completion": 4, "n answers": 1, "structured": 1,
                 "leaves a stream": 4, "leaves an answer": 3, "broken body": 3, "half a body": 1,
                 "too long": 1, "long prompt": 1, "embedding": 1, "killed process": 1}
        while time.monotonic() < end:
            kind = self._rng.choices([*kinds], [*kinds.values()])[0]
            self._watch.kinds[kind] += 1
            try:
                async with asyncio.timeout(PATIENCE):
                    await self.act(kind)
            except TimeoutError:
                self._watch.problem(f"{kind}: no end after {PATIENCE:.0f} s")
            except OSError as error:
                self._watch.problem(f"{kind}: {error!r}")
            await asyncio.sleep(self._rng.random() * 0.2)

    async def act(self, kind: str) -> None:
        """One request, or what else a client may do."""
        rng = self._rng
        match kind:
            case "chat stream":
                await self._chat(200, stream=True)
            case "completion":
                await self._complete(200, temperature=rng.choice([0, 0.8]))
            case "n answers":
                await self._complete(200, n=3, seed=rng.randrange(2**31), temperature=1)
            case "structured":
                await self._chat(200, response_format={"type": "json_object"}, max_tokens=24)
            case "leaves a stream":
                await self._chat(200, stream=True, max_tokens=400, ignore_eos=True,
                                 leave_after=rng.random() * 3)
            case "leaves an answer":
                await self._complete(200, max_tokens=400, ignore_eos=True,
                                     leave_after=rng.random() * 3)
            case "broken body":
                broken = rng.choice([b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"model": NaN}',
                                     b'{"messages": 7}', b'{"temperature": 1e999}'])
                await self._post(rng.choice(["/v1/chat/completions", "/v1/completions"]), broken,
                                 "4")
            case "half a body":
                await self._post("/v1/completions", b'{"prompt": "', "", length=10_000,
                                 leave_after=rng.random())
            case "too long":
                await self._complete(400, prompt=self._text(self._context * 4))
            case "long prompt":
                await self._complete(200, prompt=self._text(self._context // 2), max_tokens=4)
            case "embedding":
                await self._json("/v1/embeddings", 200, input=self._text(20))
            case "killed process":
                await self._kill_a_process()

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    async def _chat(self, expected: int, *, leave_after: float | None = None, **body: Any) -> None:
        await self._json("/v1/chat/completions", expected, leave_after,
                         **{"messages": [{"role": "user", "content": self._text(30)}],
                            "max_tokens": self._rng.randint(1, 60), **body})

    async def _complete(self, expected: int, *, leave_after: float | None = None, **body: Any
                        ) -> None:
        await self._json("/v1/completions", expected, leave_after,
                         **{"prompt": self._text(self._rng.randint(1, 100)),
                            "max_tokens": self._rng.randint(1, 60), **body})

    async def _json(self, path: str, expected: int, leave_after: float | None = None, **body: Any
                    ) -> None:
        await self._post(path, json.dumps({"model": self._model, **body}).encode(), str(expected),
                         leave_after=leave_after)

    async def _post(self, path: str, body: bytes, expected: str, *, length: int | None = None,
                    leave_after: float | None = None) -> None:
        """Sends a request; reads the answer to its end unless it leaves before that."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
                         f"Content-Type: application/json\r\n"
                         f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
                         .encode() + body)
            try:
                async with asyncio.timeout(leave_after):
                    answer = await reader.read(-1)
            except TimeoutError:
                if leave_after is None:
                    raise
                return
        finally:
            writer.transport.abort()
        status = answer[9:12].decode("latin-1")
        self._watch.statuses[status or "closed"] += 1
        # A full queue is an honest answer to any request.
        if not status.startswith(expected) and status != "429":
            self._watch.problem(f"{path}: {answer[:12]!r} where {expected or 'any'} was expected: "
                                f"{body[:80]!r} → {answer[-200:]!r}")
        if status == "200" and b"event-stream" in answer and b"[DONE]" not in answer:
            self._watch.problem(f"{path}: a stream ended without [DONE]: {answer[-200:]!r}")

    async def _kill_a_process(self) -> None:
        body = json.dumps({"model": self._model, "prompt": self._text(20), "max_tokens": 400,
                           "ignore_eos": True, "stream": True})
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", VICTIM, str(self._port), body,
            stdout=asyncio.subprocess.PIPE)
        assert victim.stdout is not None
        await victim.stdout.readline()
        await asyncio.sleep(self._rng.random())
        victim.send_signal(signal.SIGKILL)
        await victim.wait()


# ---- the run ----

async def load(args: argparse.Namespace, port: int, watch: Watch, clients: int, minutes: float
               ) -> None:
    end = time.monotonic() + minutes * 60
    await asyncio.gather(*(
        Client(port, args.model, args.context, watch, seed).run(end) for seed in range(clients)))


def drained(port: int, limit: float = 30.0) -> dict[str, float]:
    """Page counts once nothing runs any more."""
    end = time.monotonic() + limit
    while True:
        text = get(port, "/metrics")[1].decode()
        pages = {name: metric(text, f"kilter_pages_{name}")
                 for name in ("total", "free", "cached", "held")}
        busy = metric(text, "kilter_running") + metric(text, "kilter_waiting")
        if (busy == 0 and pages["held"] == 0) or time.monotonic() > end:
            return {**pages, "unfinished": busy}
        time.sleep(0.2)


async def fill_cache(client: Client, port: int) -> None:
    """Prompts until every page has been used: the system gives memory when it is first written,
    which is no leak."""
    for _ in range(1000):
        if metric(get(port, "/metrics")[1].decode(), "kilter_pages_free") < 8:
            return
        await client.act("long prompt")
    raise RuntimeError("The cache does not fill.")


def steady_growth(rss: list[int]) -> float:
    """The smallest rise from one fifth's median to the next, after the first: a leak rises through
    all of them; what a rare request makes the server keep for good is one step."""
    fifths = [statistics.median(rss[i * len(rss) // 5:(i + 1) * len(rss) // 5 + 1])
              for i in range(1, 5)]
    return min(after - before for before, after in pairwise(fifths))


def judge(watch: Watch, pages: dict[str, float], exit_code: int | None) -> list[str]:
    """What is wrong, in sentences."""
    problems = list(watch.problems)
    if (rise := steady_growth(watch.rss)) > LEAK_LIMIT:
        problems.append(f"memory rose by {rise / 2**20:.1f} MiB or more from every fifth of the "
                        f"run to the next")
    if pages["held"] or pages["unfinished"] or pages["free"] + pages["cached"] != pages["total"]:
        problems.append(f"pages or requests are left over: {pages}")
    if watch.files[-1] > watch.files[0] + 4:
        problems.append(f"{watch.files[-1]} files are open at the end, {watch.files[0]} were at "
                        f"the beginning")
    p99 = percentile(watch.health, 99)
    if p99 >= HEALTH_LIMIT:
        problems.append(f"/health took {p99 * 1000:.0f} ms at the 99th percentile")
    if watch.unhealthy:
        problems.append(f"/health was not 200 {watch.unhealthy} times")
    if exit_code != 0:
        problems.append(f"the server ended with exit code {exit_code}")
    return problems


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=24)
    args = parser.parse_args()
    port, watch, over = free_port(), Watch(), threading.Event()
    server = subprocess.Popen([sys.executable, "-m", "kilter", "serve", args.model, "--port",
                               str(port), "--context", str(args.context)],
                              stdout=subprocess.DEVNULL)
    try:
        wait_until_up(port, server)
        # The first requests allocate what stays: buffers, compiled grammars, thread stacks.
        asyncio.run(load(args, port, Watch(), args.clients, min(0.5, args.minutes / 2)))
        asyncio.run(fill_cache(Client(port, args.model, args.context, Watch(), 99), port))
        drained(port)
        watchers = [threading.Thread(target=watch_process, args=(server.pid, watch, over)),
                    threading.Thread(target=watch_health, args=(port, watch, over))]
        for thread in watchers:
            thread.start()
        asyncio.run(load(args, port, watch, args.clients, args.minutes))
        pages = drained(port)
        time.sleep(2)  # closed connections' files, and one more look at the process
        over.set()
        for thread in watchers:
            thread.join()
        tokens = metric(get(port, "/metrics")[1].decode(), "kilter_completion_tokens_total")
        server.send_signal(signal.SIGTERM)
        exit_code: int | None = server.wait(60)
    finally:
        over.set()
        server.kill()
        server.wait()
    problems = judge(watch, pages, exit_code)
    health = {f"p{p}_ms": percentile(watch.health, p) * 1000 for p in (50, 90, 99, 100)}
    every = max(1, len(watch.rss) // 60)
    result: dict[str, Any] = {
        "minutes": args.minutes, "model": args.model, "clients": args.clients,
        "requests": sum(watch.kinds.values()), "kinds": dict(watch.kinds.most_common()),
        "statuses": dict(watch.statuses.most_common()), "completion_tokens": tokens,
        "health": health, "health_probes": len(watch.health), "pages": pages,
        "rss_steady_growth_bytes": steady_growth(watch.rss), "rss_bytes": watch.rss[::every],
        "seconds": [round(s, 1) for s in watch.seconds[::every]],
        "files": [watch.files[0], max(watch.files), watch.files[-1]],
        "threads": [watch.threads[0], max(watch.threads), watch.threads[-1]],
        "exit_code": exit_code, "problems": problems}
    out = HERE / "results" / "soak.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("rss_bytes", "seconds")},
                     indent=1))
    write_section("soak", "\n".join([
        f"{provenance()} {args.model}, {args.minutes:g} minutes, {args.clients} clients at a time, "
        f"{result['requests']} requests of which many are broken, too long or left early.", "",
        "| | |", "|---|---|",
        f"| `/health`, median / 99 % / longest | {health['p50_ms']:.1f} / {health['p99_ms']:.1f} / "
        f"{health['p100_ms']:.1f} ms |",
        f"| memory at the beginning, in the middle, at the end | {watch.rss[0] / 2**20:.0f}, "
        f"{watch.rss[len(watch.rss) // 2] / 2**20:.0f}, {watch.rss[-1] / 2**20:.0f} MiB |",
        f"| pages held after the load | {pages['held']:.0f} of {pages['total']:.0f} |",
        f"| open files at the beginning, at most, at the end | "
        f"{', '.join(map(str, result['files']))} |",
        f"| answers | {', '.join(f'{n} × {s}' for s, n in watch.statuses.most_common())} |",
        f"| problems | {'; '.join(problems) or 'none'} |"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
