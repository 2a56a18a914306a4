"""The prefix cache alone, beside SGLang's own Python radix cache where it is at hand.

    python -m bench.radix [--peer DIR] [--repeats 7]

DIR holds an unpacked SGLang (``pip download --no-deps sglang``, then unzip the wheel); only its
radix cache and what that needs is loaded, all else of it is stood in for by empty modules.

The same requests (shared system prompts, conversations, few-shot templates; 16 at a time, in a
cache much smaller than they are) run through each cache, taking turns. A request is: its key made,
its prefix found and held with its page ids, the rest allocated (evicting), its whole text kept,
its hold let go. The peer's allocator is stood in for by a tensor of free slots, sliced and
concatenated as its own is. At the end 1,000 waiting prompts are matched on the warm tree; and
apart from that, single evictions from a tree of 4,096 leaves. Times are medians over the turns,
ratios medians of the ratios turn by turn. Writes bench/results/radix.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import platform
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.page import provenance, write_section
from kilter.report.machine import cpu_name
from kilter.serve.pages import Pages
from kilter.serve.radix import RadixTree
from kilter.serve.radix_node import token_key

CAPACITY = 1 << 16  # tokens
RUNNING = 16
LEAVES = 4096
PHASES = ("key", "find", "allocate", "keep", "release")


def requests(seed: int = 0, conversations: int = 60, few_shots: int = 240
             ) -> list[tuple[list[int], int]]:
    """(tokens, how many of them are the prompt), in the order of arrival."""
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return rng.choices(range(49152), k=rng.randint(low, high))

    systems = [words(600, 1500) for _ in range(8)]
    templates = [words(1000, 2000) for _ in range(12)]
    streams: list[list[tuple[list[int], int]]] = []
    for _ in range(conversations):
        text, turns = list(rng.choice(systems)), []
        for _ in range(rng.randint(4, 7)):
            prompt = text + words(40, 200)
            text = prompt + words(50, 300)
            turns.append((text, len(prompt)))
        streams.append(turns)
    for _ in range(few_shots):
        prompt = rng.choice(templates) + words(30, 80)
        streams.append([(prompt + words(10, 40), len(prompt))])
    arrived = []
    while streams:
        stream = rng.choice(streams[:40])
        arrived.append(stream.pop(0))
        if not stream:
            streams.remove(stream)
    return arrived


class Ours:
    name = "kilter"

    def __init__(self, page_size: int) -> None:
        self.pages = Pages(CAPACITY // page_size, page_size)
        self.tree = RadixTree(self.pages)

    def key(self, tokens: list[int]) -> bytes:
        return token_key(tokens)

    def find(self, key: bytes) -> tuple[list[int], int]:
        return self.tree.acquire(key)

    def allocate(self, held: tuple[list[int], int], length: int) -> None:
        self.pages.grow(*held, length)

    def keep(self, key: bytes, held: tuple[list[int], int]) -> None:
        # `finish` in its two halves, so that each is timed beside the peer's.
        self.tree._insert(key, held[0], None)

    def release(self, held: tuple[list[int], int]) -> None:
        self.pages.release(held[0])

    def hit(self, held: tuple[list[int], int]) -> int:
        return held[1]

    def match(self, key: bytes) -> Any:
        return self.tree.match(key)

    def evict(self, tokens: int) -> None:
        self.tree.evict(self.pages.pages_for(tokens))

    def check(self) -> None:
        self.tree.check_integrity()


class Peer:
    name = "sglang"

    def __init__(self, module: ModuleType, page_size: int) -> None:
        self.m = module
        self.size = page_size
        self.device = "cpu"  # asked of an allocator, which this object stands in for
        self.tree = module.RadixCache.create_simulated(mock_allocator=self, page_size=page_size)
        self.free = torch.arange(CAPACITY)

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free = torch.cat((self.free, slots))

    def key(self, tokens: list[int]) -> Any:
        return self.m.RadixKey(array("q", tokens))

    def find(self, key: Any) -> list[Any]:
        """The node held, its slots, how many tokens they are."""
        found, slots = self.match(key)
        self.tree.inc_lock_ref(found.last_device_node)
        return [found.last_device_node, slots, found.device_prefix_len]

    def allocate(self, held: list[Any], length: int) -> None:
        need = -(-length // self.size) * self.size - held[2]
        if need > len(self.free):
            self.tree.evict(self.m.EvictParams(num_tokens=need - len(self.free)))
        held[1] = torch.cat((held[1], self.free[:need]))
        self.free = self.free[need:]

    def keep(self, key: Any, held: list[Any]) -> None:
        length = len(key) // self.size * self.size
        result = self.tree.insert(self.m.InsertParams(key=key, value=held[1][:length]))
        # Duplicates of what the tree had, and the last page that it does not keep.
        self.free = torch.cat((self.free, held[1][held[2]:result.prefix_len], held[1][length:]))

    def release(self, held: list[Any]) -> None:
        self.tree.dec_lock_ref(held[0])

    def hit(self, held: list[Any]) -> int:
        return held[2]

    def match(self, key: Any) -> Any:
        # As its engine: all but the last token is looked up, and the slots are read.
        found = self.tree.match_prefix(self.m.MatchPrefixParams(
            key=self.m.RadixKey(key.token_ids, limit=len(key) - 1)))
        return found, self.tree.path_device_indices(found.last_device_node)

    def evict(self, tokens: int) -> None:
        self.tree.evict(self.m.EvictParams(num_tokens=tokens))

    def check(self) -> None:
        assert self.tree.total_size() + len(self.free) == CAPACITY
        assert len(self.free.unique()) == len(self.free)
        assert self.tree.protected_size() == 0


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the few SGLang modules that a radix cache runs on; any other is an empty module of
    which every attribute is a class without members."""

    REAL = ("radix_cache", "base_prefix_cache", "cache_init_params", "evict_policy",
            "unified_cache.component_type")

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "sglang":
            return None
        if name.removeprefix("sglang.srt.mem_cache.") in self.REAL:
            return importlib.util.spec_from_file_location(
                name, self.root.joinpath(*name.split(".")).with_suffix(".py"))
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def stand_in(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            members: dict[str, Any] = {"__init__": lambda self, *a, **k: None}
            if attribute == "KVCacheEventRecorder":  # off: an event costs one empty call
                members |= {n: lambda self, *a: None for n in (
                    "record_all_cleared", "record_store", "record_remove")}
            value = type(attribute, (), members)
            setattr(module, attribute, value)
            return value

        module.__getattr__ = stand_in  # type: ignore[method-assign]
        if module.__name__ == "sglang.srt.mem_cache.utils":
            from_policy = "sglang.srt.mem_cache.evict_policy"
            module.get_eviction_strategy = (  # type: ignore[attr-defined]
                lambda *_: importlib.import_module(from_policy).LRUStrategy())
            module.split_node_hash_value = (  # type: ignore[attr-defined]
                lambda *_: (None, None))  # hashes are made for events only


def load_peer(root: Path) -> tuple[ModuleType, str]:
    """SGLang's radix cache module and its version.

    Raises:
        ValueError: if the folder does not hold it.
    """
    if not (root / "sglang" / "srt" / "mem_cache" / "radix_cache.py").is_file():
        raise ValueError(f"{root} holds no sglang/srt/mem_cache/radix_cache.py; give the folder "
                         f"that SGLang's wheel was unpacked in.")
    sys.meta_path.insert(0, _StandIns(root))
    module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    version = next((p.name.split("-")[1].removesuffix(".dist")
                    for p in root.glob("sglang-*.dist-info")), "unknown")
    return module, version


def play(cache: Any, arrived: Sequence[tuple[list[int], int]]) -> dict[str, float]:
    """Microseconds per request and phase; tokens found; microseconds of a match when warm."""
    seconds = dict.fromkeys(PHASES, 0.0)
    running: deque[tuple[list[int], Any]] = deque()
    hits = 0

    def timed(phase: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        seconds[phase] += time.perf_counter() - start
        return result

    def finish() -> None:
        text, held = running.popleft()
        whole = timed("key", cache.key, text)
        timed("keep", cache.keep, whole, held)
        timed("release", cache.release, held)

    for text, prompt in arrived:
        key = timed("key", cache.key, text[:prompt])
        held = timed("find", cache.find, key)
        hits += cache.hit(held)
        timed("allocate", cache.allocate, held, len(text))
        running.append((text, held))
        if len(running) == RUNNING:
            finish()
    while running:
        finish()
    cache.check()
    keys = [cache.key(text[:prompt]) for text, prompt in arrived]
    keys = (keys * (1000 // len(keys) + 1))[:1000]
    start = time.perf_counter()
    for key in keys:
        cache.match(key)
    warm = time.perf_counter() - start
    times = {phase: s / len(arrived) * 1e6 for phase, s in seconds.items()}
    return {**times, "request": sum(times.values()), "warm_match": warm / len(keys) * 1e6,
            "hit_tokens": float(hits)}


def evict_from_many(cache: Any) -> float:
    """Microseconds to evict one leaf of `LEAVES`, 200 times in a row."""
    length = CAPACITY // LEAVES
    for i in range(LEAVES):
        key = cache.key([i] * length)
        held = cache.find(key)
        cache.allocate(held, length)
        cache.keep(key, held)
        cache.release(held)
    start = time.perf_counter()
    for _ in range(200):
        cache.evict(length)
    seconds = time.perf_counter() - start
    cache.check()
    return seconds / 200 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, help="folder with an unpacked SGLang wheel")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    arrived = requests()
    makers: list[Callable[[int], Any]] = [Ours]
    version = None
    if args.peer is not None:
        module, version = load_peer(args.peer)
        makers.append(lambda size: Peer(module, size))
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "python": platform.python_version(),
        "peer": version and f"sglang {version}", "repeats": args.repeats,
        "requests": len(arrived), "prompt_tokens": sum(prompt for _, prompt in arrived),
        "capacity_tokens": CAPACITY, "running": RUNNING, "unit": "microseconds per request",
        "rows": []}
    for size in (16, 1):
        turns: list[list[dict[str, float]]] = []
        names: list[str] = []
        for _ in range(args.repeats):
            names = [make(size).name for make in makers]
            turns.append([{**play(make(size), arrived), "evict_leaf": evict_from_many(make(size))}
                          for make in makers])
        print(f"page size {size}")
        for phase in (*PHASES, "request", "warm_match", "evict_leaf", "hit_tokens"):
            row: dict[str, Any] = {"page_size": size, "what": phase}
            for i, name in enumerate(names):
                row[name] = statistics.median(turn[i][phase] for turn in turns)
            if len(names) == 2 and phase != "hit_tokens":
                row["peer_over_ours"] = statistics.median(
                    turn[1][phase] / turn[0][phase] for turn in turns)
            result["rows"].append(row)
            print("  " + "  ".join(f"{k} {v:10.1f}" if isinstance(v, float) else f"{v:>10}"
                                   for k, v in row.items() if k != "page_size"))
    out = Path(__file__).parent / "results" / "radix.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if version is not None:
        lines = [f"{provenance()} Beside {result['peer']}, microseconds per request.", "",
                 "| page size | what | Kilter | peer | peer / Kilter |", "|---|---|---|---|---|"]
        lines += [f"| {row['page_size']} | {row['what']} | {row['kilter']:.1f} | "
                  f"{row['sglang']:.1f} | {row['peer_over_ours']:.2f}× |"
                  for row in result["rows"] if "peer_over_ours" in row]
        write_section("radix", "\n".join(lines))


if __name__ == "__main__":
    main()
