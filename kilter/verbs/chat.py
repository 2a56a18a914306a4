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
    read_stdin,
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
    prompt = read_stdin() if args.prompt == "-" else args.prompt
    if prompt is not None and not prompt.strip():
        raise ValueError("The prompt is empty; ask something, or leave -p out to talk.")
    if prompt is None and sys.stdin is None:
        raise ValueError("Standard input is closed, so there is nobody to talk with; give -p TEXT.")
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
            _forget_oldest(engine, messages)
            text, _, _ = _answer(engine, messages, params)
        except ValueError as error:  # this turn cannot be answered; the talk goes on without it
            print(f"kilter: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _forget_oldest(engine: Engine, messages: list[dict[str, Any]]) -> None:
    """Drops the oldest question and answer while the talk leaves no room in the context."""
    first = 1 if messages[0]["role"] == "system" else 0
    dropped = 0
    while (len(messages) > first + 1
           and len(engine.tokenizer.encode_chat(messages)) >= engine.max_context):
        del messages[first:first + 2]
        dropped += 1
    if dropped:
        print(f"kilter: the context of {engine.max_context} tokens is full; the oldest "
              f"{dropped} of your messages and their answers were dropped.", file=sys.stderr)


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
