"""Kilter: a language model's whole life from one model definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilter.serve.llm import LLM
    from kilter.serve.params import BeamParams, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # `import kilter` must stay cheap: the command line's --help does not wait for torch.
    if name == "LLM":
        from kilter.serve.llm import LLM

        return LLM
    if name in ("SamplingParams", "BeamParams"):
        from kilter.serve import params

        return getattr(params, name)
    raise AttributeError(f"module 'kilter' has no attribute {name!r}")
