"""Records of pairs: two answers to one prompt, of which one is better.

    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", …}, …], "chosen": [{"role": "assistant", …}], "rejected": …}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": [the same start, …]}

Text is what a user says as a prompt, and what the assistant says as an answer. Without a prompt the
messages that both conversations begin with are it; with one they may begin with it too.
``margin`` (by how much the chosen answer is better) and ``tools`` may stand beside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kilter.train.data.errors import DataError
from kilter.train.data.shapes import messages_of, tools_of

FIELDS = ("chosen", "rejected", "prompt", "margin", "tools")


def pair_of(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The two whole conversations: {"chosen": messages, "rejected": messages, "margin": float,
    "tools": ...}.

    Raises:
        DataError: for a record that is no such pair; ``where`` names it.
    """
    missing = [name for name in ("chosen", "rejected") if content.get(name) is None]
    if missing:
        raise DataError(f"{where} has no field {missing[0]!r}; it has "
                        f"{', '.join(map(repr, content)) or 'none'}. A pair needs chosen and "
                        "rejected, and a prompt unless these are whole conversations.")
    prompt = content.get("prompt")
    margin = content.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"The margin of {where} is {margin!r}, but must be a finite number.")
    start = [] if prompt is None else messages_of(prompt, "user", "prompt", where)
    sides = {name: messages_of(content[name], "assistant", name, where)
             for name in ("chosen", "rejected")}
    for name, side in sides.items():  # a whole conversation has the prompt already
        if side[:len(start)] != start or len(side) == len(start):
            sides[name] = start + side
    if prompt is None:
        if any(isinstance(content[name], str) for name in sides):
            raise DataError(f"{where} has no prompt, and text alone for answers. Give it a prompt, "
                            "or make chosen and rejected whole conversations.")
        if sides["chosen"][0] != sides["rejected"][0]:
            raise DataError(f"The conversations chosen and rejected of {where} do not begin with "
                            "the same message, so they do not answer the same prompt.")
    if sides["chosen"] == sides["rejected"]:
        raise DataError(f"The answers chosen and rejected of {where} are the same, so there is "
                        "nothing to learn from them. Remove the record.")
    return {**sides, "margin": float(margin), "tools": tools_of(content.get("tools"), where)}

