"""`kilter pull NAME`: fetches a model into the cache; `kilter pull --list` shows what there is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kilter.report.progress import progress
from kilter.report.text import size, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?",
                      help="a name of the list, or a Hugging Face id like org/name")
    what.add_argument("--list", action="store_true", help="show what there is to pull, and what "
                      "has been pulled")


def run(args: argparse.Namespace) -> int:
    from kilter.weights.pull import CATALOGUE, folder_of, pull
    from kilter.weights.tokenizer import write_tokenizer

    if args.list:
        _list()
        return 0
    folder_of(args.name)  # a name that cannot be pulled is an error before anything is said
    entry = CATALOGUE.get(args.name)
    about = (f"{entry.about}, {size(sum(package.nbytes for package in entry.packages))} to "
             f"download, licence: {entry.licence}") if entry else "from the Hugging Face hub"
    there = args.name in pulled_models()
    if not there:
        print(f"Pulling {args.name} ({about}).", flush=True)
    with progress("start", in_bytes=True) as update:
        folder = pull(args.name, progress=lambda stage, done, total: update(done, total, stage),
                      after=write_tokenizer)
    print(f"{args.name} {'was already' if there else 'is'} in {folder} ({_size_of(folder)}).")
    return 0


def pulled_models() -> dict[str, Path]:
    """Names of the models in the cache and their folders."""
    from kilter.weights.pull import CATALOGUE, folder_of

    models = folder_of(next(iter(CATALOGUE))).parent
    return {json.loads(manifest.read_text(encoding="utf-8"))["name"]: manifest.parent
            for manifest in sorted(models.glob("*/kilter.json"))}


def _list() -> None:
    from kilter.weights.pull import CATALOGUE

    pulled = pulled_models()
    rows = [(entry.name, entry.about, entry.licence,
             size(sum(package.nbytes for package in entry.packages)),
             _size_of(pulled[entry.name]) if entry.name in pulled else "no")
            for entry in CATALOGUE.values()]
    rows += [(name, "Hugging Face hub", "", "", _size_of(folder))
             for name, folder in pulled.items() if name not in CATALOGUE]
    print(table(rows, header=("name", "what it is", "licence", "download", "pulled"), left=3,
                indent=0))
    print("\nA Hugging Face id, org/name, works where the hub can be reached.")


def _size_of(folder: Path) -> str:
    return size(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
