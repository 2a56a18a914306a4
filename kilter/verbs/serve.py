"""`kilter serve MODEL`: a model behind OpenAI's API."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kilter.verbs.model_options import add_model_arguments, load

if TYPE_CHECKING:
    from kilter.serve.server.config import ServerConfig

_STALLS = 5  # with --tp, so many times --stall-timeout a step may take before it is given up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1",
                       help="address to listen on; 0.0.0.0: all of this machine's "
                            "(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000,
                       help="0 takes a free one (default: %(default)s)")
    group.add_argument("--api-key", metavar="KEY",
                       help="what clients have to send; others on this machine see it here, so "
                            "rather set KILTER_API_KEY (default: nobody is asked)")
    group.add_argument("--served-name", action="append", default=[], metavar="NAME",
                       help="what requests call the model; further ones are aliases (default: "
                            "MODEL as it is given, without the path)")
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN",
                       help="let pages of this web origin in (*: of all); may be given several "
                            "times")
    group.add_argument("--admin", action="store_true",
                       help="offer /admin: new weights, cache flush, pause")
    group.add_argument("--access-log", action="store_true",
                       help="log every request on standard error")
    group = parser.add_argument_group("limits")
    group.add_argument("--max-running", type=int, default=64, metavar="N",
                       help="answers that run together (default: %(default)s)")
    group.add_argument("--kv-tokens", type=int, metavar="TOKENS",
                       help="tokens the KV cache holds over all requests (default: four contexts)")
    group.add_argument("--policy", default="fcfs", choices=("fcfs", "prefix", "priority"),
                       help="who waits least: the first to come, the longest cached prefix, or the "
                            "highest priority (default: %(default)s)")
    group.add_argument("--max-queue", type=int, default=256, metavar="N",
                       help="answers that may wait; more get a 429 (default: %(default)s)")
    group.add_argument("--max-body", type=int, default=4 * 1024 * 1024, metavar="BYTES",
                       help="size of a request's body (default: %(default)s)")
    group.add_argument("--request-timeout", type=float, metavar="SECONDS",
                       help="how long a request may take in all (default: as long as it needs)")
    group.add_argument("--drain-timeout", type=float, default=30, metavar="SECONDS",
                       help="how long running requests may still take after SIGTERM or Ctrl-C "
                            "(default: %(default)s)")
    group.add_argument("--stall-timeout", type=float, default=60, metavar="SECONDS",
                       help="/health is 503 when the engine is busy and no step ended for so "
                            "long; with --tp the server ends after five times that "
                            "(default: %(default)s)")
    group.add_argument("--prepare-threads", type=int, default=2, metavar="N",
                       help="threads for templates, tokens and grammars (default: %(default)s)")
    group.add_argument("--tool-format", choices=("hermes", "llama3"),
                       help="how the model writes tool calls (default: as its chat template shows)")


def run(args: argparse.Namespace) -> int:
    config = _config(args)
    from kilter.serve.params import GrammarSpec, SamplingParams
    from kilter.serve.server.context import build_context
    from kilter.serve.server.lifecycle import Server, bind, listen, url_of

    logging.basicConfig(level=logging.INFO if args.access_log else logging.WARNING,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with bind(config) as listener:
        engine = load(args, args.max_running, kv_tokens=args.kv_tokens, policy=args.policy,
                      step_timeout=_STALLS * args.stall_timeout)
        # The engine's thread and the event loop hand the interpreter to each other many times a
        # step, and waiting for it costs more than handing it over.
        sys.setswitchinterval(0.001)
        if importlib.util.find_spec("llguidance") is not None:
            # Reads the vocabulary, which takes a second and would hold up everybody later.
            engine.compile_grammar(SamplingParams(grammar=GrammarSpec("json_object")))
        url = url_of(listener)
        context = build_context(engine, config)

        def ready() -> None:
            # What is loaded by now stays: it need not be looked through again and again, which
            # takes a tenth of a second each time.
            gc.collect()
            gc.freeze()
            print(f"{config.served_name} is served at {url}/v1; the page is {url}/", flush=True)

        server = Server(context, access_log=args.access_log, on_ready=ready)
        try:
            listen(listener)
            server.run([listener])
        finally:
            context.close()
            engine.close()
    return 1 if server.failed else 0


def _config(args: argparse.Namespace) -> ServerConfig:
    from kilter.serve.server.config import ServerConfig

    name, *aliases = args.served_name or [Path(args.model).name]
    return ServerConfig(
        served_name=name, aliases=tuple(aliases), host=args.host, port=args.port,
        api_key=args.api_key if args.api_key is not None else os.environ.get("KILTER_API_KEY"),
        cors_origins=tuple(args.cors_origin), max_body_bytes=args.max_body,
        max_queue=args.max_queue, request_timeout=args.request_timeout,
        drain_timeout=args.drain_timeout, stall_timeout=args.stall_timeout, admin=args.admin,
        prepare_threads=args.prepare_threads, tool_format=args.tool_format)
