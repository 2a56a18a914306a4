"""New weights for a loaded model: what has to agree beside the shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.weights.bridge import ModelSource
from kilter.weights.load import Storage, replace_weights


def take_weights(model: Decoder, weights: ModelSource | Mapping[str, Tensor], storage: Storage
                 ) -> None:
    """Puts other weights into a model, as `replace_weights` does.

    Raises:
        ValueError: as there, or for a source of a model that computes differently; nothing was
            changed.
    """
    if isinstance(weights, ModelSource):
        check_same_model(model.spec, weights.spec)
    replace_weights(model, weights, storage)


def check_same_model(ours: ModelSpec, theirs: ModelSpec) -> None:
    """Raises ValueError where a source's model computes differently, which no shape would show."""
    facts = ("num_heads", "num_kv_heads", "head_dim", "layers", "activation", "norm_zero_centred",
             "qk_norm", "post_norms", "embed_scale", "query_scale")
    wrong = [name for name in facts if getattr(ours, name) != getattr(theirs, name)]
    if not math.isclose(ours.norm_eps, theirs.norm_eps, rel_tol=1e-6):  # GGUF has it in fp32
        wrong.append("norm_eps")
    if wrong:
        raise ValueError(f"These weights are of another model: its {', '.join(wrong)} differ from "
                         f"the loaded one's.")
