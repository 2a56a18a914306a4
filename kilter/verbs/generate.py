"""`kilter generate`: continue one or more prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kilter.verbs.model_options import (
    add_model_arguments,
    add_sampling_arguments,
    load,
    sampling_params,
)

HELP = "continue prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT",
                        help="a prompt; may be given several times ('-': standard input)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per line")
    parser.add_argument("--logprobs", action="store_true",
                        help="report the log-probability of every token (with --json)")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object per prompt instead of streamed text")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.logprobs and not args.json:
        raise ValueError("--logprobs prints nothing without --json; add --json.")
    params = sampling_params(args, logprobs=args.logprobs)
    prompts = [sys.stdin.read() if p == "-" else p for p in args.prompt]
    if args.prompts is not None:
        prompts += [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line]
    if not prompts:
        raise ValueError("There is nothing to continue: give -p TEXT or --prompts FILE.")
    generator = load(args, max_running=min(16, len(prompts)))
    ids = [generator.tokenizer.encode(prompt) for prompt in prompts]
    if len(prompts) == 1 and not args.json:
        print(prompts[0], end="", flush=True)
        for step in generator.stream(ids, params):
            print(step.text, end="", flush=True)
        print()
        return 0
    for prompt, done in zip(prompts, generator.generate(ids, params), strict=True):
        if args.json:
            record = {"prompt": prompt, "text": done.text, "finish_reason": done.finish_reason,
                      "prompt_tokens": len(done.prompt_ids), "token_ids": done.token_ids}
            if args.logprobs:
                record["logprobs"] = done.logprobs
            print(json.dumps(record, ensure_ascii=False), flush=True)
        else:
            print(f"{prompt}{done.text}\n", flush=True)
    return 0
