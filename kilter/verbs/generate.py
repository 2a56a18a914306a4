"""`kilter generate`: continue one or more prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kilter.report.progress import progress
from kilter.verbs.model_options import (
    add_model_arguments,
    add_sampling_arguments,
    decode_utf8,
    load,
    read_stdin,
    sampling_params,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT",
                        help="a prompt; may be given several times ('-': standard input)")
    parser.add_argument("--prompts", type=Path, metavar="FILE",
                        help="a prompt in every line that is not empty")
    parser.add_argument("--logprobs", action="store_true",
                        help="report the log-probability of every token (with --json)")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object per prompt instead of streamed text")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.logprobs and not args.json:
        raise ValueError("--logprobs prints nothing without --json; add --json.")
    params = sampling_params(args, logprobs=args.logprobs)
    if args.prompt.count("-") > 1:
        raise ValueError("-p - was given more than once, but standard input can be read once.")
    prompts = [read_stdin() if p == "-" else p for p in args.prompt]
    if args.prompts is not None:
        text = decode_utf8(args.prompts.read_bytes(), str(args.prompts))
        prompts += [line for line in text.splitlines() if line]
    if not prompts:
        raise ValueError("There is nothing to continue: give -p TEXT or --prompts FILE.")
    engine = load(args, max_running=min(64, len(prompts)))
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    order = {engine.submit(tokens, params): i for i, tokens in enumerate(ids)}
    if len(prompts) == 1 and not args.json:
        print(prompts[0], end="", flush=True)
        while engine.busy:
            for delta in engine.step():
                print(delta.text, end="", flush=True)
        print()
        return 0
    records: list[dict[str, Any]] = [
        {"prompt": prompt, "text": "", "finish_reason": None, "prompt_tokens": len(tokens),
         "token_ids": [], "logprobs": []}
        for prompt, tokens in zip(prompts, ids, strict=True)]
    with progress("Generating") as update:
        done = 0
        while engine.busy:
            for delta in engine.step():
                record = records[order[delta.request]]
                record["text"] += delta.text
                record["token_ids"] += [choice.token_id for choice in delta.choices]
                record["logprobs"] += [choice.logprob for choice in delta.choices]
                record["finish_reason"] = delta.finish_reason
                done += delta.finish_reason is not None
            update(done, len(prompts))
    for record in records:
        if not args.logprobs:
            del record["logprobs"]
        print(json.dumps(record, ensure_ascii=False) if args.json
              else f"{record['prompt']}{record['text']}\n", flush=True)
    return 0
