"""The options that verbs share which run a model, and what they load."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilter.serve.engine import Engine
    from kilter.serve.params import SamplingParams
    from kilter.serve.scheduler import Policy


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and how it is loaded."""
    parser.add_argument("model", help="a pulled model's name, a folder or a .gguf file")
    add_loading_arguments(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded; `load` reads them."""
    group = parser.add_argument_group("loading")
    group.add_argument("--weights", default="auto",
                       choices=("auto", "fp32", "bf16", "int8", "int4"),
                       help="how large matrices are held; auto keeps exactly what the file has "
                            "(default: %(default)s)")
    group.add_argument("--kv", default="fp32", choices=("fp32", "bf16", "fp16"),
                       help="format of the KV cache (default: %(default)s)")
    group.add_argument("--products", default="fp32", choices=("fp32", "bf16"),
                       help="what factors of matrix products are rounded to; bf16 is "
                            "faster where the processor has AVX512-BF16 (default: %(default)s)")
    group.add_argument("--context", type=int, metavar="TOKENS",
                       help="longest prompt plus answer (default: the model's, at most 8192)")
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    group.add_argument("--threads", type=int, metavar="N",
                       help="CPU threads, of each process if there are several (default: all "
                            "cores)")
    group.add_argument("--tp", type=int, default=1, metavar="N",
                       help="spread the model over N processes of this machine (tensor "
                            "parallelism); on the exact path with the same bits (default: 1)")
    group.add_argument("--fast", action="store_true",
                       help="torch's own kernels in place of the exact ones: a token's bits may "
                            "then depend on its batch (on a CPU this is usually slower)")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; `sampling_params` reads them."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0,
                       help="0 takes the likeliest token (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument("--seed", type=int, help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end before this text; may be given several times")


def sampling_params(args: argparse.Namespace, logprobs: bool = False) -> SamplingParams:
    """Raises ValueError listing every setting out of range."""
    from kilter.serve.params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, min_p=args.min_p, seed=args.seed, stop=tuple(args.stop),
        logprobs=0 if logprobs else None)


def read_stdin() -> str:
    """All of standard input.

    Raises:
        ValueError: if it is closed or is not UTF-8 text.
    """
    if sys.stdin is None:
        raise ValueError("Standard input is closed, so there is nothing to read from it.")
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    return decode_utf8(data, "Standard input")


def decode_utf8(data: bytes, what: str) -> str:
    """The text of UTF-8 bytes. Raises ValueError naming ``what`` and the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text: byte {error.start} is "
                         f"{data[error.start]:#04x}. Convert it to UTF-8.") from error


def load(args: argparse.Namespace, max_running: int, *, kv_tokens: int | None = None,
         policy: Policy = "fcfs", step_timeout: float | None = None) -> Engine:
    """Loads the model with a progress bar on stderr (shown on a terminal only). The further
    arguments are as `load_engine` has them."""
    import torch

    from kilter.ops.packed import FLOATS
    from kilter.report.progress import progress
    from kilter.serve.load import load_engine
    from kilter.weights.pull import resolve

    if args.device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device is {args.device!r}, but must be cpu or cuda.")
    if args.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device is {args.device}, but torch sees no CUDA device here; use "
                         f"--device cpu.")
    if args.tp < 1:
        raise ValueError(f"--tp is {args.tp}, but must be at least 1.")
    path = resolve(args.model)
    with progress("Loading weights") as advance:
        return load_engine(path, storage=args.weights, device=args.device, exact=not args.fast,
                           kv_dtype=FLOATS[args.kv], products=args.products,
                           context=args.context, kv_tokens=kv_tokens, max_running=max_running,
                           policy=policy,
                           tensor_parallel=args.tp, threads=args.threads,
                           step_timeout=step_timeout, progress=advance)
