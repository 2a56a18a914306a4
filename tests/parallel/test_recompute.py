"""What is computed again in backward is what was asked for, and changes no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.parity import tiny
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.parallel.apply import apply
from kilter.parallel.recompute import Recompute
from tests.parallel.gradients import backward, document

# One op of each part of a layer, by the module that calls it.
OPS = {"attention": ("attn.qkv", "linear"), "mlp": ("mlp.gate_up", "gated_linear"),
       "norms": ("attn_norm", "rms_norm")}


def computed(recompute: Recompute) -> tuple[Counter[tuple[str, int]], dict[str, Tensor]]:
    """(how often a step of one micro-batch computed each part of each layer, the gradients)."""
    with torch.device("meta"):
        model = Decoder(tiny(True))
    seen: Counter[tuple[str, int]] = Counter()

    def noted(op: Callable[..., Tensor], part: str, layer: int) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            seen[part, layer] += 1
            return op(*args, **kwargs)

        return run

    for layer in range(4):
        for part, (path, op) in OPS.items():
            module: Any = model.layers[layer].get_submodule(path)  # type: ignore[index]
            module.ops = replace(module.ops, **{op: noted(getattr(module.ops, op), part, layer)})
    spread = apply(model, Mesh.single(), recompute=recompute)
    spread.initialise(seed=1, std=0.1)
    backward(spread, [document(range(1, 9))], 7)
    return seen, {h.name: h.tensor.grad for h in spread.held if h.tensor.grad is not None}


@pytest.mark.parametrize(("recompute", "twice"), [
    (Recompute(), set()),
    (Recompute("full"), {(part, layer) for part in OPS for layer in range(4)}),
    (Recompute("full", every=2), {(part, layer) for part in OPS for layer in (0, 2)}),
    (Recompute("full", every=3), {(part, layer) for part in OPS for layer in (0, 3)}),
    *((Recompute("selective", parts=(part,)), {(part, layer) for layer in range(4)})
      for part in OPS)], ids=lambda value: str(value) if isinstance(value, Recompute) else "")
def test_what_is_named_is_computed_twice(recompute: Recompute, twice: set[tuple[str, int]]) -> None:
    seen, grads = computed(recompute)
    assert seen == {(part, layer): 1 + ((part, layer) in twice)
                    for part in OPS for layer in range(4)}
    _, plain = computed(Recompute())
    assert all(torch.equal(grads[name], plain[name]) for name in plain)
