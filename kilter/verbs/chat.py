"""`kilter chat`: talk with a model, or ask it once with -p."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from kilter.verbs.model_options import (
    add_model_arguments,
    add_sampling_arguments,
    load,
    sampling_params,
)

if TYPE_CHECKING:
    from kilter.serve.engine import Engine
    from kilter.serve.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT",
                        help="ask this once and leave ('-': standard input)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--timing", action="store_true",
                        help="print where the time went on standard error")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    params = sampling_params(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    engine = load(args, max_running=1)
    loaded = time.perf_counter()
    messages: list[dict[str, Any]] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
        _, first, count = _answer(engine, messages, params)
        if args.timing:
            end = time.perf_counter()
            print(f"load {loaded - started:.2f} s, first token {first - loaded:.2f} s, then "
                  f"{count - 1} tokens at {(count - 1) / max(end - first, 1e-9):.1f} tokens/s",
                  file=sys.stderr)
        return 0
    print("Type a message; an empty line or end of file leaves.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        try:
            text, _, _ = _answer(engine, messages, params)
        except ValueError as error:  # this turn cannot be answered; the talk goes on without it
            print(f"kilter: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _answer(engine: Engine, messages: list[dict[str, Any]], params: SamplingParams
            ) -> tuple[str, float, int]:
    """Streams the answer; returns (text, time of the first token, tokens). The turns before are
    in the engine's prefix cache."""
    number = engine.submit(engine.tokenizer.encode_chat(messages), params)
    text, first, count = "", 0.0, 0
    try:
        while engine.busy:
            for delta in engine.step():
                first = first or time.perf_counter()
                count += len(delta.choices)
                text += delta.text
                print(delta.text, end="", flush=True)
    finally:
        engine.abort(number)
    print()
    return text, first, count
