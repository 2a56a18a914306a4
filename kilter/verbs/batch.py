"""`kilter batch IN OUT --model M`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilter.verbs.model_options import add_loading_arguments, load

if TYPE_CHECKING:
    from kilter.serve.batch import Summary
    from kilter.serve.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", type=Path, help="a file with a request in every "
                        "line: {\"custom_id\", \"method\", \"url\", \"body\"}")
    parser.add_argument("output", metavar="OUT", type=Path, help="the file to write, with a "
                        "result in every line; until it is whole it is called OUT.partial, and "
                        "the same command goes on where it was interrupted")
    parser.add_argument("--model", required=True,
                        help="a pulled model's name, a folder or a .gguf file")
    parser.add_argument("--served-name", metavar="NAME",
                        help="what requests call the model (default: MODEL as it is given, without "
                             "the path)")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N",
                        help="requests that are under way at a time (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, metavar="TOKENS",
                        help="tokens the KV cache holds over all requests (default: four contexts)")
    parser.add_argument("--tool-format", choices=("hermes", "llama3"),
                        help="how the model writes tool calls (default: as its chat template "
                             "shows)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    add_loading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a request failed."""
    from kilter.report.progress import progress
    from kilter.serve.batch import partial_path

    if not args.input.is_file():
        raise ValueError(f"{args.input} is not a file; give a file with a request in every line.")
    if args.concurrency < 1:
        raise ValueError(f"The concurrency is {args.concurrency} but must be at least 1.")
    _check_output(args)  # before a model is loaded for nothing
    engine = load(args, max_running=args.concurrency, kv_tokens=args.kv_tokens)
    start = time.perf_counter()
    try:
        with progress("Answering") as update:
            summary = asyncio.run(_answer_all(engine, args, update))
    except KeyboardInterrupt:
        print(f"\nWhat was answered is in {partial_path(args.output)}; the same command goes on "
              f"from there.", file=sys.stderr)
        raise
    kept = f", {summary.kept} of them in an earlier run" if summary.kept else ""
    print(f"Wrote {args.output}: {summary.answered} answered, {summary.failed} failed{kept}; "
          f"{summary.prompt_tokens} prompt and {summary.completion_tokens} completion tokens in "
          f"{time.perf_counter() - start:.1f} s.")
    return 1 if summary.failed else 0


def _check_output(args: argparse.Namespace) -> None:
    output: Path = args.output
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is no folder, so {output.name} cannot be written there; "
                         "make it, or choose another output.")
    if output.exists() and output.samefile(args.input):
        raise ValueError(f"{output} is both input and output; choose another output.")
    if output.exists() and not args.overwrite:
        raise ValueError(f"{output} is there already; choose another output, or replace it with "
                         "--overwrite.")


async def _answer_all(engine: Engine, args: argparse.Namespace, progress: Any) -> Summary:
    from kilter.serve.batch import run_batch
    from kilter.serve.server.config import ServerConfig
    from kilter.serve.server.context import build_context
    from kilter.serve.server.dispatch import answer

    name = args.served_name or Path(args.model).name
    # The batch bounds what is under way itself, so no request may meet a full queue.
    context = build_context(engine, ServerConfig(name, max_queue=100_000,
                                                 tool_format=args.tool_format))
    loaded = json.dumps([args.model, name, args.weights, args.kv, args.context, args.device,
                         args.fast, args.products, args.tool_format])
    context.engine.start()
    try:
        return await run_batch(args.input, args.output, functools.partial(answer, context),
                               concurrency=args.concurrency, loaded=loaded,
                               overwrite=args.overwrite, progress=progress)
    finally:
        await asyncio.to_thread(context.close)
