"""`kilter convert SRC DST`: writes a model as a Hugging Face folder that other libraries load."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kilter.report.progress import progress
from kilter.report.text import size

if TYPE_CHECKING:
    from kilter.weights.bridge import ModelSource

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC",
                        help="a pulled model's name, a folder or a .gguf file")
    parser.add_argument("dst", metavar="DST", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"),
                        help="round every tensor to this (default: as they are; quantised ones "
                             "become float32, which loses nothing)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace DST if it holds a model already")
    parser.add_argument("--max-shard-size", type=parse_size, default=5 * 10**9, metavar="SIZE",
                        help="start a new file above this, for instance 500MB (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    import torch

    from kilter.weights.bridge import open_model
    from kilter.weights.export import export_hf
    from kilter.weights.pull import resolve
    from kilter.weights.tokenizer import open_tokenizer

    source = open_model(resolve(args.src))
    _check_destination(args.dst, source, args.overwrite)
    # A Hugging Face folder's tokenizer files are copied; a GGUF header's have to be written.
    add_tokenizer = open_tokenizer(source).save if source.kind == "gguf" else None
    with progress("Writing", in_bytes=True) as update:
        export_hf(source, args.dst, dtype=getattr(torch, args.dtype) if args.dtype else None,
                  max_shard_bytes=args.max_shard_size, overwrite=args.overwrite, progress=update,
                  before_rename=add_tokenizer)
    for note in source.notes:
        print(f"Note: {note}")
    files = [path for path in args.dst.rglob("*") if path.is_file()]
    print(f"Wrote {args.dst}: {source.spec.architecture}, {len(source.names())} parameters, "
          f"{len(files)} files, {size(sum(path.stat().st_size for path in files))}.")
    return 0


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``1.5 GiB`` or ``1000000``.

    Raises:
        argparse.ArgumentTypeError: anything else, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (nbytes := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for instance 5GB, 500MiB "
                                         "or a number of bytes")
    return nbytes


def _check_destination(dst: Path, source: ModelSource, overwrite: bool) -> None:
    """Refuses what holds something, or where that may be replaced, what is no model: everything in
    it would be gone."""
    if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
        return
    is_model = (dst / "config.json").is_file()
    if not overwrite:
        raise ValueError(f"{dst} already exists; choose another destination"
                         + (", or replace it with --overwrite." if is_model else "."))
    if dst.resolve() in source.path.resolve().parents:
        raise ValueError(f"{dst} holds the source {source.path}, so it cannot be overwritten; "
                         "choose another destination.")
    if not is_model:
        raise ValueError(f"{dst} is no model folder (it has no config.json), so --overwrite leaves "
                         "it alone; choose another destination or remove it yourself.")
