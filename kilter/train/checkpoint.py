"""Checkpoints: whole or absent, and readable by any layout.

    checkpoints/
      step-00000100/          a folder with this name is complete: it is renamed when it is
        .metadata, *.distcp   torch's distributed checkpoint (DCP): parameters and optimizer states
        trainer.json          step, data position, the job, the layout it was written under
      step-00000200.partial/  being written, or left by a run that died

Tensors are written as the boxes of the whole parameters that their ranks own, under the parameters'
own names, so reading one is asking for other boxes of the same thing: other degrees, other numbers
of ranks, one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from kilter.comm.axis import Axis
from kilter.comm.collectives import barrier
from kilter.parallel.data import Held
from kilter.parallel.shards import Shard

_NAME = re.compile(r"step-(\d+)")
_FACTS = "trainer.json"


class CheckpointError(ValueError):
    """A checkpoint that is not there or does not fit; the message says what to do."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    Attributes:
        every: steps between two; 0: only at the end of the run and when it is stopped.
        keep: how many of the last ones; 0: all.
        asynchronous: write while training goes on (from a copy in the host's memory).
    """

    every: int = 100
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 0:
            raise ValueError(f"Checkpoints every {self.every} steps, keeping {self.keep}, cannot "
                             f"be: neither number may be negative.")


class Pieces:
    """A rank's local tensor as boxes of a whole one, in the form that DCP saves and loads.

    Args:
        local: the boxes stacked along dim 0; loading writes into it.
    """

    def __init__(self, local: Tensor, shard: Shard) -> None:
        self._shape = torch.Size(shard.shape)
        self._parts = [(box, own, part) for box, own, part in shard.parts(local) if part.numel()]

    def copy(self) -> Pieces:
        """The owned boxes with a copy of their data, on the CPU."""
        copied = object.__new__(Pieces)
        copied._shape = self._shape
        copied._parts = [(box, own, part.detach().to("cpu", copy=True))
                         for box, own, part in self._parts if own]
        return copied

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [WriteItem(index=MetadataIndex(fqn, torch.Size(box.start)),
                          type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(
                              chunk=ChunkStorageMetadata(torch.Size(box.start),
                                                         torch.Size(box.size)),
                              properties=TensorProperties.create_from_tensor(part),
                              size=self._shape))
                for box, own, part in self._parts if own]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
                for box, _, _ in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, _, part in self._parts:
            if index.offset is not None and tuple(index.offset) == box.start:
                return part
        raise CheckpointError(f"There is no part of {index.fqn} at {index.offset} on this rank.")


def pieces_of(held: Sequence[Held], states: Mapping[str, Mapping[str, Tensor]],
              model: str = "model", optimizer: str = "optimizer") -> dict[str, Pieces]:
    """What a checkpoint has of a model that is trained: this rank's part of the parameters and of
    the optimizer's states, by name.

    Args:
        states: `Optimizer.states`.
        model, optimizer: what the names begin with.
    """
    found = {}
    for part in held:
        found[f"{model}.{part.name}"] = Pieces(part.tensor, part.shard)
        for key, state in states[part.name].items():
            found[f"{optimizer}.{part.name}.{key}"] = (
                Pieces(state, part.shard) if state.dim() else
                Pieces(state.view(1), _number_of(part.shard)))
    return found


def _number_of(shard: Shard) -> Shard:
    """Of one number per parameter, which all its ranks hold: the rank that owns the parameter's
    first element owns it."""
    owned = any(own and not any(box.start)
                for box, own in zip(shard.boxes, shard.owned, strict=True))
    return Shard.whole((1,), owned)


class _Saver(DefaultSavePlanner):
    """DCP's planner, which itself finds parts of tensor classes only."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Loader(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None,
                       is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        return LoadPlan([item for name, pieces in self.state_dict.items()
                         for item in create_read_items_for_chunk_list(
                             name, cast(TensorStorageMetadata, stored[name]),
                             pieces.__create_chunk_list__())])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class Checkpointer:
    """Writes and finds the checkpoints of one run.

    Args:
        folder: where the ``step-…`` folders are.
        world: all ranks; they call every method together.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, world: Axis) -> None:
        self._folder, self._config, self._world = folder, config, world
        # DCP warns whenever one process is alone, which is what we ask of it.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        # The writer talks beside the training's collectives, so it has a group of its own.
        self._group = dist.new_group(list(world.ranks), backend="gloo") if world.size > 1 else None
        if world.index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        barrier(world)

    def save(self, step: int, tensors: Mapping[str, Pieces], facts: Mapping[str, Any]) -> None:
        """Writes the checkpoint of a step; with ``asynchronous`` returns when a copy is made.

        Args:
            facts: what `trainer.json` holds; the same on all ranks.

        Raises:
            OSError: if writing failed; with ``asynchronous``, the next call or `wait` raises it.
        """
        self.wait()
        copies = {name: pieces.copy() for name, pieces in tensors.items()}
        text = json.dumps({"step": step, **facts}, indent=1)
        self._writing = self._thread.submit(self._write, step, copies, text)
        if not self._config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _write(self, step: int, tensors: dict[str, Pieces], text: str) -> None:
        final = self._folder / f"step-{step:08d}"
        partial = final.with_name(final.name + ".partial")
        if self._world.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / _FACTS).write_text(text, encoding="utf-8")
        if self._group is not None:
            dist.barrier(self._group)
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial),
                 planner=_Saver(flatten_state_dict=False, flatten_sharded_tensors=False),
                 process_group=self._group, no_dist=self._group is None)
        if self._world.index == 0:
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
            for old in checkpoints(self._folder)[:-self._config.keep] if self._config.keep else ():
                shutil.rmtree(old, ignore_errors=True)
        if self._group is not None:
            dist.barrier(self._group)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)
             and (path / ".metadata").is_file()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `Checkpointer.save` was given as facts, and the step.

    Raises:
        CheckpointError: if the folder is no checkpoint.
    """
    try:
        facts = json.loads((checkpoint / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint ({error}); name a "
                              f"folder step-… that holds {_FACTS}.") from None
    assert isinstance(facts, dict)
    return facts


def load_tensors(checkpoint: Path, tensors: Mapping[str, Pieces], world: Axis) -> None:
    """Fills the pieces' tensors; each rank reads its own boxes, whatever layout wrote them.

    Raises:
        CheckpointError: for a tensor that the checkpoint does not have, or has in another shape.
    """
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    problems = []
    for name, pieces in tensors.items():
        if name not in stored:
            problems.append(f"{name} is not in it")
        elif (size := getattr(stored[name], "size", None)) != pieces._shape:
            problems.append(f"{name} has shape {list(size or ())} there and "
                            f"{list(pieces._shape)} here")
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"The checkpoint {checkpoint} is not of this model and optimizer: "
                              f"{'; '.join(problems[:10])}{more}.")
    dcp.load(dict(tensors), storage_reader=reader, planner=_Loader(),
             process_group=world.group, no_dist=world.size == 1)
