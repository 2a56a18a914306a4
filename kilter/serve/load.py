"""From a model's name or path to a `Generator` that answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kilter.serve.generate import Generator
from kilter.tokens import Tokenizer
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.gguf import GGUFFile
from kilter.weights.load import Storage, load_decoder

_DEFAULT_CONTEXT = 8192  # tokens; longer contexts are asked for, since their cache costs memory


def load_generator(path: Path, *, storage: Storage = "auto", device: str = "cpu",
                   exact: bool = True, kv_dtype: torch.dtype = torch.float32,
                   context: int | None = None, max_running: int = 16,
                   progress: Callable[[int, int], None] | None = None) -> Generator:
    """Opens, checks and loads a model and its tokenizer.

    Args:
        path: a folder or a .gguf file (see `kilter.weights.pull.resolve` for names).
        context: tokens a request may reach; default the model's, at most 8192.
        max_running: requests that decode together; the cache holds this many full contexts.
        progress: called with (tensors done, tensors in all).

    Raises:
        ValueError: as `open_model` and `load_decoder` do, or for a context the model was not
            trained for.
    """
    source = open_model(path)
    spec = source.spec
    if context is None:
        context = min(spec.max_positions, _DEFAULT_CONTEXT)
    if not 2 <= context <= spec.max_positions:
        raise ValueError(f"A context of {context} tokens was asked for, but it must be from 2 to "
                         f"this model's {spec.max_positions}.")
    tokenizer = open_tokenizer(source)
    model = load_decoder(source, storage=storage, device=device, exact=exact, kv_dtype=kv_dtype,
                         max_positions=context, progress=progress)
    return Generator(model, tokenizer, kv_tokens=context * max_running, max_context=context,
                     max_running=max_running, eos_token_ids=source.eos_token_ids)


def open_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer: its folder's tokenizer.json, or what its GGUF header describes."""
    if isinstance(source.store, GGUFFile) and (
            source.path.is_file() or not (source.folder / "tokenizer.json").is_file()):
        return Tokenizer.from_gguf_metadata(source.store.metadata)
    return Tokenizer.from_folder(source.folder)
