"""`kilter train JOB.toml [key=value …]`: trains a model as a job file says, on one rank or many."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# By these a job for the other command is known.
ELSEWHERE = {"kilter rl": ("task", "rewards", "algorithm", "rollout")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB.toml", help="the job file")
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value",
                        help="settings in place of the file's, by dotted name: optimizer.lr=1e-4 "
                             "layout.dp=2")


def run(args: argparse.Namespace) -> int:
    from kilter.job import read_job
    from kilter.train.config import TrainJob

    job = read_job(TrainJob, args.job, args.settings, ELSEWHERE)  # before anything slow
    from kilter.train import launch

    ending = launch.run(job)
    if ending.text:
        print(ending.text if ending.code == 0 else f"kilter: error: {ending.text}",
              file=sys.stdout if ending.code == 0 else sys.stderr, flush=True)
    return ending.code
