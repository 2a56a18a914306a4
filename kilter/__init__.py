"""Kilter: a language model's whole life from one model definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilter.serve.llm import LLM
    from kilter.serve.params import BeamParams, GrammarSpec, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamParams", "GrammarSpec", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # `import kilter` must stay cheap: the command line's --help does not wait for torch.
    if name == "LLM":
        from kilter.serve.llm import LLM

        return LLM
    if name in ("SamplingParams", "BeamParams", "GrammarSpec"):
        from kilter.serve import params

        return getattr(params, name)
    raise AttributeError(f"module 'kilter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
