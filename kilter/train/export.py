"""The finished model as a Hugging Face folder: the ranks' parts meet on rank 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.parallel.apply import Spread
from kilter.parallel.shards import Box
from kilter.train.inputs import Start
from kilter.train.lora import LoraConfig, merge
from kilter.train.peft import write_peft
from kilter.weights.export import State, export_hf
from kilter.weights.families import FAMILIES

_Parts = list[tuple[Box, Tensor]]


def export_model(spread: Spread, inputs: Start, output: Path, dtype: torch.dtype, *,
                 lora: LoraConfig | None = None, base: str | None = None,
                 reward_ends: Collection[int] | None = None) -> None:
    """Writes ``model/`` in the output folder: the model, its config and its tokenizer; of a job
    with adapters also ``adapter/``, and the model has them merged in (of a reward model only the
    latter, as an adapter's folder has no place for the head). Replaces what is there. Collective.

    Args:
        dtype: what matrices are written as; all else is float32.
        lora, base: of a job with adapters, and the model these were trained on.
        reward_ends: it is a reward model, and these are the tokens its sequences end with.
    """
    read_as = torch.float32 if lora is not None else dtype  # a sum is not to be rounded twice
    tensors = {name: whole for name, whole in whole_parameters(spread, read_as)
               if whole is not None}
    if spread.mesh.rank != 0:
        return
    if lora is not None:
        if reward_ends is None:
            write_peft(output / "adapter", inputs.spec, lora, tensors, base=base, overwrite=True)
        tensors = {name: value.to(dtype) if value.dim() > 1 else value
                   for name, value in merge(inputs.spec, lora, tensors).items()}
    config = _config(inputs, dtype)
    if reward_ends is not None:
        # transformers takes a sequence's score at its last token that is no padding, so one that
        # ends with padding's token would be scored too early; without such a token it scores one
        # sequence at a time, and rightly.
        pad = config.get("pad_token_id")
        config["pad_token_id"] = None if pad in reward_ends else pad
    export_hf(State(inputs.spec, tensors, inputs.carried, config),
              output / "model", overwrite=True, before_rename=inputs.tokenizer.save)


@torch.no_grad()
def whole_parameters(spread: Spread, dtype: torch.dtype = torch.float32
                     ) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter by name, on the CPU: whole on rank 0, None on the others. Collective: all
    ranks go through it together.

    Args:
        dtype: of matrices; all else is float32.
    """
    mesh = spread.mesh
    world = mesh.axis("world")
    for name, whole_shard in spread.shards.items():
        to = dtype if len(whole_shard.shape) > 1 else torch.float32
        mine: _Parts = []
        if name in spread.local:  # else another stage has it
            local, shard = spread.local[name]
            mine = [(box, part.detach().to("cpu", to).contiguous())
                    for box, own, part in shard.parts(local) if own and part.numel()]
        boxes: list[list[Box] | None] = [[box for box, _ in mine]]
        if world.size > 1:
            boxes = [None] * world.size
            dist.all_gather_object(boxes, [box for box, _ in mine], group=world.members)
        if mesh.rank != 0:
            for _, part in mine:
                dist.send(part, world.ranks[0])
            yield name, None
            continue
        whole = torch.empty(whole_shard.shape, dtype=to)
        for box, part in mine:
            whole[box.slices] = part
        for rank in range(1, world.size):
            for box in boxes[rank] or []:
                part = torch.empty(box.size, dtype=to)
                dist.recv(part, world.ranks[rank])
                whole[box.slices] = part
        yield name, whole


def _config(inputs: Start, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that was started from, or one composed."""
    source, tokenizer = inputs.source, inputs.tokenizer
    config: dict[str, Any] = dict(source.config) if source is not None else {}
    if not config:
        config = FAMILIES[inputs.spec.architecture].to_config(inputs.spec)
        ends = list(source.eos_token_ids if source is not None else ()) or tokenizer.eos_token_ids
        config |= {"bos_token_id": tokenizer.bos_token_id,
                   "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    spelling = "dtype" if "dtype" in config else "torch_dtype"
    return config | {spelling: str(dtype).removeprefix("torch.")}
