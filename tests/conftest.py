"""What all tests share: environment before imports, and the two real models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import ranks

__all__ = ["ranks"]

if not torch.cuda.is_available():
    # Triton reads this when it is imported; without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _pulled(name: str) -> Path:
    from kilter.weights.pull import pull
    from kilter.weights.tokenizer import write_tokenizer

    return pull(name, after=write_tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, downloaded once and kept in the cache."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Folder of the real Gemma 3 270M, downloaded once and kept in the cache."""
    return _pulled("gemma3-270m")
