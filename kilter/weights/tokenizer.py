"""A checkpoint's tokenizer: its folder's tokenizer.json, or what its GGUF header describes."""

from __future__ import annotations

from pathlib import Path

from kilter.tokens import Tokenizer
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.gguf import GGUFFile


def open_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer. Raises ValueError if it cannot be read."""
    if isinstance(source.store, GGUFFile) and (
            source.path.is_file() or not (source.folder / "tokenizer.json").is_file()):
        return Tokenizer.from_gguf_metadata(source.store.metadata)
    return Tokenizer.from_folder(source.folder)


def write_tokenizer(folder: Path) -> None:
    """Writes a GGUF folder's tokenizer as tokenizer.json beside it: that loads several times
    faster than the header's description is rebuilt. Folders that have one are left alone."""
    source = open_model(folder)
    if isinstance(source.store, GGUFFile) and not (folder / "tokenizer.json").is_file():
        Tokenizer.from_gguf_metadata(source.store.metadata).save(folder)
