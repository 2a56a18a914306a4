"""The finished model as a Hugging Face folder. Rank 0 writes it and asks for one parameter after
another, whose parts meet there from all ranks: no rank ever holds the model.

    rank 0   asks for a name, gets it whole, writes it, asks for the next, …, says it is done
    others   hand in their parts of what is asked for
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.parallel.apply import Spread
from kilter.parallel.shards import Box
from kilter.train.inputs import Start
from kilter.train.lora import LoraConfig, merged
from kilter.train.peft import write_peft
from kilter.weights.errors import WeightsError
from kilter.weights.export import Pending, State, export_hf, remove_leftovers
from kilter.weights.families import FAMILIES


def export_model(spread: Spread, inputs: Start, output: Path, dtype: torch.dtype, *,
                 lora: LoraConfig | None = None, base: str | None = None,
                 reward_ends: Collection[int] | None = None,
                 max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes ``model/`` in the output folder: the model, its config and its tokenizer; of a job
    with adapters also ``adapter/``, and the model has them merged in (of a reward model only the
    latter, as an adapter's folder has no place for the head). Replaces what is there. Collective.

    Args:
        dtype: what matrices are written as; all else is float32.
        lora, base: of a job with adapters, and the model these were trained on.
        reward_ends: it is a reward model, and these are the tokens its sequences end with.
        max_shard_bytes: above this, several files and an index are written.

    Raises:
        WeightsError: on all ranks, if it cannot be written. What was there is still there.
    """
    desk = _Desk(spread, dtype)
    if desk.index != 0:
        desk.serve()
        return
    try:
        for name in ("adapter", "model"):
            remove_leftovers(output / name)
        if lora is not None and reward_ends is None:
            write_peft(output / "adapter", inputs.spec, lora, desk.pending(), base=base,
                       overwrite=True)
        config = _config(inputs, dtype)
        if reward_ends is not None:
            # transformers takes a sequence's score at its last token that is no padding, so one
            # that ends with padding's token would be scored too early; without such a token it
            # scores one sequence at a time, and rightly.
            pad = config.get("pad_token_id")
            config["pad_token_id"] = None if pad in reward_ends else pad
        export_hf(State(inputs.spec, _plain(desk, inputs, lora), inputs.carried, config),
                  output / "model", overwrite=True, max_shard_bytes=max_shard_bytes,
                  before_rename=inputs.tokenizer.save)
    except (WeightsError, OSError) as error:
        said = (f"The finished model was not exported: {error} The run's checkpoints are whole: "
                "the same command exports again.")
        desk.done(said)
        raise WeightsError(said) from error
    desk.done()


def whole_parameters(spread: Spread, dtype: torch.dtype = torch.float32
                     ) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter by name, on the CPU: whole on rank 0, None on the others. Collective: all
    ranks go through it together.

    Args:
        dtype: of matrices; all else is float32.
    """
    desk = _Desk(spread, dtype)
    for name in spread.shards:
        yield name, desk.meet(name)


class _Desk:
    """Where parameters are asked for. Collective, as is `meet`; rank 0 calls `ask` (or what
    `pending` has) and in the end `done`, while the others are in `serve`.

    Args:
        dtype: of the model's matrices; all else, adapters too, is float32.
    """

    def __init__(self, spread: Spread, dtype: torch.dtype) -> None:
        self._spread, self._dtype = spread, dtype
        self._world = spread.mesh.axis("world")
        self.index = self._world.index
        mine = {name: [box for box, own in zip(shard.boxes, shard.owned, strict=True)
                       if own and box.numel] for name, (_, shard) in spread.local.items()}
        self._boxes: list[dict[str, list[Box]] | None] = [mine]  # of all ranks, on rank 0
        if self._world.size > 1:
            self._boxes = [None] * self._world.size
            dist.gather_object(mine, self._boxes if self.index == 0 else None,
                               self._world.ranks[0], group=self._world.members)

    def pending(self) -> dict[str, Pending]:
        """Every parameter of the model, to be asked for."""
        return {name: Pending(shard.shape, self._format(name), partial(self.ask, name))
                for name, shard in self._spread.shards.items()}

    def ask(self, name: str) -> Tensor:
        """A parameter, whole, on the CPU."""
        self._say((name, None))
        whole = self.meet(name)
        assert whole is not None
        return whole

    def done(self, failure: str | None = None) -> None:
        """Nothing more is asked for, perhaps because it cannot be written."""
        self._say((None, failure))

    def serve(self) -> None:
        """Hands in what is asked for until rank 0 is done.

        Raises:
            WeightsError: if it failed there.
        """
        while (request := self._say(None))[0] is not None:
            self.meet(request[0])
        if request[1] is not None:
            raise WeightsError(request[1])

    def _say(self, request: tuple[str | None, str | None] | None) -> tuple[Any, Any]:
        told = [request]
        if self._world.size > 1:
            dist.broadcast_object_list(told, self._world.ranks[0], group=self._world.members)
        assert told[0] is not None
        return told[0]

    @torch.no_grad()
    def meet(self, name: str) -> Tensor | None:
        """A parameter whole on rank 0, None on the others. Collective."""
        world, spread, to = self._world, self._spread, self._format(name)
        mine = []
        if name in spread.local:  # else another stage has it
            local, shard = spread.local[name]
            mine = [(box, part) for box, own, part in shard.parts(local) if own and part.numel()]
        if self.index != 0:
            for _, part in mine:
                dist.send(part.detach().to("cpu", to).contiguous(), world.ranks[0])
            return None
        whole = torch.empty(spread.shards[name].shape, dtype=to)
        for box, part in mine:
            whole[box.slices] = part.detach()
        for rank, boxes in zip(world.ranks[1:], self._boxes[1:], strict=True):
            for box in (boxes or {}).get(name, []):
                received = torch.empty(box.size, dtype=to)
                dist.recv(received, rank)
                whole[box.slices] = received
        return whole

    def _format(self, name: str) -> torch.dtype:
        matrix = len(self._spread.shards[name].shape) > 1 and ".adapter." not in name
        return self._dtype if matrix else torch.float32


def _plain(desk: _Desk, inputs: Start, lora: LoraConfig | None) -> dict[str, Pending]:
    """The model's own parameters, with adapters merged in when they are asked for."""
    pending = desk.pending()
    plain = {name: entry for name, entry in pending.items() if ".adapter." not in name}
    for name, entry in plain.items():
        adapter = f"{name.removesuffix('.weight')}.adapter."
        of_it = [other for other in pending if other.startswith(adapter)]
        if of_it and lora is not None:
            plain[name] = Pending(entry.shape, entry.dtype, partial(
                _merge, desk, inputs, lora, name, of_it, entry.dtype))
    return plain


def _merge(desk: _Desk, inputs: Start, lora: LoraConfig, name: str, adapter: list[str],
           dtype: torch.dtype) -> Tensor:
    """What was trained is the function of the rounded matrix and its adapter, so the sum starts
    from that matrix, and is rounded once."""
    tensors = {other: desk.ask(other) for other in adapter}
    return merged(inputs.spec, lora, name, desk.ask(name).float(), tensors).to(dtype)


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
