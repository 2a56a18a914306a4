"""WHAT is computed, for one device: spec, batch, decoder."""

from kilter.models.batch import Batch, KVView
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec

__all__ = ["Batch", "Decoder", "KVView", "LayerSpec", "ModelSpec", "RopeSpec"]
