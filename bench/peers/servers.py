"""The servers: how each is started, told to answer an exact number of tokens, paused and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.client import Reply, post

SLOTS = 16  # requests a peer that needs a number computes at a time; the loads ask for no more
CONTEXT = 1024  # tokens of the longest request, rounded up


@dataclass(frozen=True)
class Spec:
    """One contender.

    command: its arguments; "{port}" becomes its port.
    extra: what a request adds to OpenAI's fields so that exactly ``max_tokens`` tokens come;
        "{n}" in a text becomes their number.
    """

    name: str
    peer: str  # "kilter", "llama.cpp", …
    weights: str  # how large matrices are held
    command: tuple[str, ...]
    extra: Mapping[str, Any]
    model: str = "smollm2-135m"
    environment: Mapping[str, str] = field(default_factory=dict)
    stream_options: bool = True  # whether token counts of a stream must be asked for
    health: str = "/health"

    def body(self, new_tokens: int, stream: bool) -> dict[str, Any]:
        body = {"model": self.model, "max_tokens": new_tokens, "temperature": 0,
                **{key: value.replace("{n}", str(new_tokens)) if isinstance(value, str) else value
                   for key, value in self.extra.items()}}
        if stream:
            body["stream"] = True
            if self.stream_options:
                body["stream_options"] = {"include_usage": True}
        return body


class Server:
    """A contender's processes. While it is not measured it is stopped (SIGSTOP), so that nothing
    in it can take time from the others."""

    def __init__(self, spec: Spec, log: Path, stream: bool) -> None:
        self.spec = spec
        self.stream = stream
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = log
        command = [part.replace("{port}", str(self.port)) for part in spec.command]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT,
                                             env={**os.environ, **spec.environment},
                                             start_new_session=True)

    def wait_until_ready(self, seconds: float = 300) -> float:
        """Returns the seconds it took.

        Raises:
            RuntimeError: if the server ends or is not healthy in time; its log's end is in it.
        """
        start = time.monotonic()
        while time.monotonic() - start < seconds and self._process.poll() is None:
            try:
                url = f"http://127.0.0.1:{self.port}{self.spec.health}"
                with urllib.request.urlopen(url, timeout=5):
                    return time.monotonic() - start
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.end()
        raise RuntimeError(f"{self.spec.name} did not start; the end of {self._log}:\n"
                           + self._log.read_text(errors="replace")[-3000:])

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def memory(self) -> int:
        """Bytes that its processes hold, shared pages counted once (proportional set size)."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:  # its process group
                    rollup = stat.with_name("smaps_rollup").read_text()
                    total += int(rollup.split("Pss:")[1].split()[0]) * 1024
            except OSError:
                continue  # it ended meanwhile
        return total

    async def complete(self, prompt: str, new_tokens: int) -> Reply:
        return await post(self.port, "/v1/completions",
                          {**self.spec.body(new_tokens, self.stream), "prompt": prompt})

    async def chat(self, messages: list[dict[str, str]], new_tokens: int) -> Reply:
        return await post(self.port, "/v1/chat/completions",
                          {**self.spec.body(new_tokens, self.stream), "messages": messages})


def kilter(weights: str, products: str = "fp32", model: str = "smollm2-135m") -> Spec:
    command = (sys.executable, "-m", "kilter", "serve", model, "--port", "{port}",
               "--weights", weights, "--products", products, "--threads", "2")
    name = f"kilter {weights}" + (f" --products {products}" if products != "fp32" else "")
    return Spec(name, "kilter", weights, command,
                {"ignore_eos": True}, model=model)


def llama_cpp(program: Path, gguf: Path, weights: str) -> Spec:
    """One slot per request, all slots in one cache, flash attention and the prompt cache in RAM
    as they are by default."""
    command = (str(program), "-m", str(gguf), "--port", "{port}", "-t", "2", "-tb", "2",
               "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--no-ui")
    return Spec(f"llama.cpp {weights}", "llama.cpp", weights, command, {"ignore_eos": True})


def vllm(python: Path, folder: Path, weights: str, threads: str = "0-1") -> Spec:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[weights]
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
               "--port", "{port}", "--dtype", dtype, "--max-model-len", str(CONTEXT),
               "--max-num-seqs", str(SLOTS), "--served-model-name", "smollm2-135m",
               "--enforce-eager")
    return Spec(f"vLLM {weights}", "vLLM", weights, command, {"ignore_eos": True},
                environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": threads,
                             "OMP_NUM_THREADS": "2", "VLLM_NO_USAGE_STATS": "1",
                             "HF_HUB_OFFLINE": "1"})


def transformers_serve(folder: Path) -> Spec:
    """`transformers serve` with continuous batching. It takes lengths through a generation_config
    alone; without an end token in it nothing ends an answer early. Its cache is as large as the
    loads need: with the default size it answered nothing within a minute."""
    command = (str(Path(sys.executable).with_name("transformers")), "serve", str(folder),
               "--port", "{port}", "--device", "cpu", "--dtype", "float32",
               "--continuous-batching", "--cb-block-size", "16",
               "--cb-num-blocks", str(SLOTS * CONTEXT // 16), "--cb-max-batch-tokens", "512")
    generation = json.dumps({"do_sample": False, "pad_token_id": 2}).replace(
        "}", ', "max_new_tokens": {n}, "min_new_tokens": {n}}')
    return Spec("transformers serve", "transformers", "fp32", command,
                {"generation_config": generation}, model=str(folder),
                environment={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
                stream_options=False)


def transformers_padded(folder: Path) -> Spec:
    """`generate` on whatever requests wait, padded to one batch (bench/peers/padded.py)."""
    command = (sys.executable, "-m", "bench.peers.padded", str(folder), "--port", "{port}",
               "--batch", str(SLOTS))
    return Spec("transformers generate, padded batches", "transformers", "fp32", command, {},
                environment={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
