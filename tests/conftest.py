"""What all tests share: environment before imports, the state that each begins with, and the two
real models."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from kilter.ops.cpu import library
from tests.ranks import ranks

__all__ = ["ranks"]

if not torch.cuda.is_available():
    # Triton reads this when it is imported; without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says how busy the machine is, and nothing of what is tested. Examples
# are the same in every run of the same test, so that a change does not fail by another one's luck;
# `pytest --hypothesis-profile=search` looks for new ones.
settings.register_profile("search", settings.default, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


class _TorchRandom:
    """Torch's generator as hypothesis takes it, so that an example draws the same numbers each
    time."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # hypothesis holds it weakly
register_random(_torch_random)


@pytest.fixture(autouse=True)
def as_if_alone() -> Iterator[None]:
    """A test draws the numbers that it draws alone, and the next one has the threads that it
    had."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if library.load.cache_info().currsize:
        library.set_num_threads(threads)


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
