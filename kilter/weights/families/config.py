"""Reading a config.json: typed fields that collect every problem before one error is raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kilter.models.spec import Activation, RopeSpec
from kilter.weights.errors import raise_all

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu",
                                       "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_TYPES = "default, linear, llama3 and yarn"

# Fields that change the computation in ways that the decoder does not have, and the values
# under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}


class Config:
    """A config.json (or one of its sections) being read.

    Every accessor returns a usable value and notes what is wrong; `finish` raises one
    `WeightsError` with all notes.
    """

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self.raw, self.architecture = raw, architecture
        self.problems: list[str] = []
        for name, neutral in _NEUTRAL.items():
            if name in raw and raw[name] not in neutral:
                self.problems.append(f"{name} is {_short(raw[name])}, which Kilter does not "
                                     f"support (only {neutral[-1]}).")

    def finish(self) -> None:
        raise_all(self.problems, f"This {self.architecture} config.json cannot be used.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number; missing is a problem when there is no default."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"{name} is missing.")
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.problems.append(f"{name} is {_short(value)}; it must be a positive whole number.")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        return self._number(self.raw, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {_short(value)}; it must be true or false.")
            return default
        return value

    def activation(self, name: str, default: str) -> Activation:
        value = self.raw.get(name, default)
        if value not in _ACTIVATIONS:
            self.problems.append(f"{name} is {_short(value)}, which Kilter does not support "
                                 f"(only {', '.join(_ACTIVATIONS)}).")
            return "silu"
        return _ACTIVATIONS[value]

    def layer_types(self, num_layers: int, default: list[bool]) -> list[bool]:
        """True for each layer with a sliding window, from ``layer_types`` where it is given."""
        types = self.raw.get("layer_types")
        if types is None:
            return default
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or any(t not in known for t in types):
            odd = sorted({str(t) for t in types if t not in known}) if isinstance(
                types, list) else [_short(types)]
            self.problems.append(f"layer_types holds {', '.join(odd)}; Kilter supports "
                                 f"{' and '.join(known)}.")
            return default
        if len(types) != num_layers:
            self.problems.append(f"layer_types has {len(types)} entries for {num_layers} layers.")
            return default
        return [known[t] for t in types]

    def rope(self) -> RopeSpec:
        """The rope of a model that has one kind, in either spelling.

        transformers 5 writes ``rope_parameters`` with the base inside; 4 writes ``rope_theta``
        and ``rope_scaling``, and very old files say ``type`` for ``rope_type``.
        """
        parameters = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        return self.rope_from(parameters, self.number("rope_theta", 10000.0))

    def rope_from(self, parameters: Any, theta: float) -> RopeSpec:
        """`RopeSpec` of one ``rope_parameters`` object; ``theta`` where it holds none."""
        if not isinstance(parameters, Mapping) or any(
                isinstance(value, Mapping) for value in parameters.values()):
            self.problems.append(f"the rope parameters are {_short(parameters)}; this family has "
                                 "one flat object of them.")
            return RopeSpec()
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        theta = self._number(parameters, "rope_theta", theta)
        if parameters.get("partial_rotary_factor") not in (None, 1):
            self.problems.append("partial_rotary_factor is "
                                 f"{_short(parameters['partial_rotary_factor'])}, which Kilter "
                                 "does not support (only 1.0).")
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind not in ("linear", "llama3", "yarn"):
            self.problems.append(f"the rope type is {_short(kind)}; Kilter supports "
                                 f"{_ROPE_TYPES}.")
            return RopeSpec(theta=theta)
        # transformers 4 also allowed this field beside the rope parameters; it wins.
        original = int(self.number("original_max_position_embeddings", self._number(
            parameters, "original_max_position_embeddings",
            self.number("max_position_embeddings", 0))))
        if kind == "yarn" and parameters.get("factor") is None and original > 0:
            factor = self.number("max_position_embeddings", 0) / original
        else:
            factor = self._number(parameters, "factor", None)
        if kind == "linear":
            return RopeSpec(theta=theta, scaling="linear", factor=factor)
        if kind == "llama3":
            return RopeSpec(theta=theta, scaling="llama3", factor=factor,
                            original_max_positions=original,
                            low_freq_factor=self._number(parameters, "low_freq_factor", None),
                            high_freq_factor=self._number(parameters, "high_freq_factor", None))
        return RopeSpec(theta=theta, scaling="yarn", factor=factor,
                        original_max_positions=original,
                        beta_fast=self._number(parameters, "beta_fast", 0.0) or 32.0,
                        beta_slow=self._number(parameters, "beta_slow", 0.0) or 1.0,
                        truncate=bool(parameters.get("truncate", True)),
                        attention_factor=self._yarn_attention_factor(parameters, factor))

    def _yarn_attention_factor(self, parameters: Mapping[str, Any], factor: float) -> float:
        """The factor on cos and sin: section 3.4 of YaRN (arXiv 2309.00071), 0.1 ln(s) + 1.

        With DeepSeek's ``mscale`` and ``mscale_all_dim`` it is the ratio of two such terms.
        """
        def term(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        if parameters.get("attention_factor") is not None:
            return self._number(parameters, "attention_factor", None)
        mscale = self._number(parameters, "mscale", 0.0)
        all_dim = self._number(parameters, "mscale_all_dim", 0.0)
        return term(mscale) / term(all_dim) if mscale and all_dim else term(1.0)

    def _number(self, section: Mapping[str, Any], name: str, default: float | None) -> float:
        value = section.get(name)
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"{name} is missing from the rope parameters.")
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(
                value):
            self.problems.append(f"{name} is {_short(value)}; it must be a number.")
            return 1.0
        return float(value)


def rope_to_config(rope: RopeSpec) -> dict[str, Any] | None:
    """The ``rope_scaling`` object of `rope` (read by transformers 4 and 5); None: no scaling."""
    if rope.scaling == "none":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_positions
    if rope.scaling == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow,
                "truncate": rope.truncate, "attention_factor": rope.attention_factor}
    return out


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
