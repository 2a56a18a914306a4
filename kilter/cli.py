"""The command `kilter VERB …`: finds the verb, runs it, and turns errors into one clear sentence.

Each verb is a module of `kilter.verbs` with ``add_arguments(parser)`` and ``run(args) -> int``,
imported only when it is the one asked for: `kilter --help` has to be instant, and torch is not.
Exit codes: 0 done, 1 the verb's answer is "no" (a failed check) or memory ran out, 2 bad input,
130 interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from kilter import __version__

VERBS = {
    "doctor": "show what this machine is and what works on it, and prove exactness on it",
    "pull": "fetch a model by name and keep it in the cache",
    "inspect": "show a model's parameters, bytes, KV cache, FLOPs and layers (headers only)",
    "chat": "talk with a model",
    "generate": "continue a text",
    "serve": "answer OpenAI's API over HTTP, with a page that shows what the engine does",
    "batch": "answer a file of requests in OpenAI's batch format",
    "train": "train a model as a job file says, on one rank or many",
    "rl": "align a model by reinforcement learning, as a job file says",
    "convert": "write a model as a Hugging Face folder, from a folder, a name or a GGUF file",
}
_LATER = ("plan", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in argv
    if sys.stdout is None:  # closed by whoever started us: nobody wants the output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _dispatch(argv)
        sys.stdout.flush()  # a closed pipe must show here, not in the interpreter's exit
        return code
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads any more. Point stdout elsewhere so that the exit's flush stays silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (ValueError, OSError) as error:
        if debug:
            raise
        print(f"kilter: error: {_sentence(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if debug or not _out_of_memory(error):
            raise
        why = str(error).partition("\n")[0].rpartition("Allocator: ")[2].rstrip(".")
        print(f"kilter: error: There is not enough memory for this{why and ': '}{why}. Take a "
              "smaller model, batch or context, or spread it over more machines.", file=sys.stderr)
        return 1


def _dispatch(argv: list[str]) -> int:
    verb = next((a for a in argv if not a.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        raise ValueError(_unknown(verb))
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                        help="show the whole traceback when something fails")
    parser = argparse.ArgumentParser(
        prog="kilter", parents=[common],
        description="A language model's whole life from one model definition.",
        epilog="`kilter VERB --help` tells what a verb takes.")
    parser.add_argument("--version", action="version", version=f"kilter {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    module = None
    for name, summary in VERBS.items():
        sub = verbs.add_parser(name, parents=[common], help=summary,
                               description=summary[0].upper() + summary[1:] + ".")
        if name == verb:
            module = importlib.import_module(f"kilter.verbs.{name}")
            module.add_arguments(sub)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            settings = [a.lstrip("-") for a in unknown if "=" in a] if "settings" in args else []
            parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (
                f" (a job's settings have no dashes: {' '.join(settings)})" if settings else ""))
    except SystemExit as stop:  # --help, --version, or a usage error that argparse has printed
        return int(stop.code or 0)
    assert module is not None  # parse_args exits when there is no verb
    return module.run(args)


def _unknown(verb: str) -> str:
    if verb in _LATER:
        return (f"`kilter {verb}` is not there yet in this version; the verbs there are: "
                f"{', '.join(VERBS)}.")
    close = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f" Did you mean `kilter {close[0]}`?" if close else ""
    return f"There is no verb {verb!r}; the verbs are: {', '.join(VERBS)}.{hint}"


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}."
    return str(error) or f"{type(error).__name__} without a message; run again with --debug."


def _out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """torch tells of memory in a `RuntimeError`: on a CPU in one of no type of its own."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("allocate memory", "out of memory"))


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                  file: object = None, line: str | None = None) -> None:
    print(f"kilter: warning: {message}", file=sys.stderr)
