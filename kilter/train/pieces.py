"""Tensors on disk in the form of torch's distributed checkpoint (DCP), whatever cuts they have.

Every rank gives or takes boxes of whole tensors, by name; who wrote which is not seen from outside.

    save_pieces({"w": Pieces(local, shard)}, folder, group)
    load_pieces({"w": Pieces(local, shard)}, folder, group)      other shards, other ranks

What is read is data and nothing else (DCP's own reader would run what it finds), every tensor's
bits are those that were written, and every element is there.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from kilter.parallel.data import Held
from kilter.parallel.shards import Shard

INDEX = ".metadata"  # there when all is
# What DCP's index is made of.
_KNOWN = {"torch": ("Size",), "torch.serialization": ("_get_layout",),
          "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
          "torch.distributed.checkpoint.metadata": (
              "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
              "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
          "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")}


class PiecesError(ValueError):
    """Tensors could not be written or read; the message is a rank and why."""


class Pieces:
    """A rank's local tensor as boxes of a whole one, in the form that DCP saves and loads.

    Args:
        local: the boxes stacked along dim 0; loading writes into it.

    Attributes:
        shape: of the whole.
    """

    def __init__(self, local: Tensor, shard: Shard) -> None:
        self.shape = torch.Size(shard.shape)
        self._parts = [(box, own, part) for box, own, part in shard.parts(local) if part.numel()]

    def copy(self) -> Pieces:
        """The owned boxes with a copy of their data, on the CPU."""
        copied = object.__new__(Pieces)
        copied.shape = self.shape
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
                              size=self.shape))
                for box, own, part in self._parts if own]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
                for box, _, _ in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, _, part in self._parts:
            if index.offset is not None and tuple(index.offset) == box.start:
                return part
        raise PiecesError(f"There is no part of {index.fqn} at {index.offset} on this rank.")


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


def save_pieces(pieces: Mapping[str, Pieces], folder: Path, group: dist.ProcessGroup | None
                ) -> None:
    """Writes what ranks own into a folder that is there. Collective.

    Args:
        group: the ranks; None: this one alone.

    Raises:
        PiecesError: on all ranks, if it failed on any.
    """
    try:
        dcp.save(dict(pieces), storage_writer=_Writer(folder),
                 planner=_Saver(flatten_state_dict=False, flatten_sharded_tensors=False),
                 process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise PiecesError(_first_cause(error)) from None


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that a folder holds.

    Raises:
        PiecesError: if that cannot be read.
    """
    try:
        found = _Reader(folder).read_metadata().state_dict_metadata
        return {name: tuple(cast(TensorStorageMetadata, entry).size)
                for name, entry in found.items()}
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError,
            IndexError, KeyError) as error:
        raise PiecesError(f"{INDEX}: {error}") from None


def load_pieces(pieces: Mapping[str, Pieces], folder: Path, group: dist.ProcessGroup | None
                ) -> None:
    """Fills pieces of tensors that are there, of those shapes. Collective.

    Raises:
        PiecesError: on all ranks, if it failed on any.
    """
    try:
        dcp.load(dict(pieces), storage_reader=_Reader(folder), planner=_Loader(),
                 process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise PiecesError(_first_cause(error)) from None


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
        plan = []
        for name, pieces in self.state_dict.items():
            chunks = pieces.__create_chunk_list__()
            items = create_read_items_for_chunk_list(
                name, cast(TensorStorageMetadata, stored[name]), chunks)
            if sum(item.lengths.numel() for item in items) != sum(c.sizes.numel() for c in chunks):
                raise PiecesError(f"{name} is not whole in it")
            plan += items
        return LoadPlan(plan)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which says what the disk said."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of torch's zip writer, when a file could not be written
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


class _Reader(dcp.FileSystemReader):
    """DCP's, which would run what is in its index, and does not notice wrong bits."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / INDEX, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = io.BytesIO(super()._slice_file(file, sinfo).read(sinfo.length))
        with zipfile.ZipFile(part) as archive:  # what torch writes a tensor as
            if archive.testzip() is not None:
                raise OSError(f"{sinfo.relative_path} holds other bits than were written")
        part.seek(0)
        return part


class _Unpickler(pickle.Unpickler):
    """Of ``.metadata``: takes what that is made of, so that it cannot run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _first_cause(error: CheckpointException) -> str:
    """Of the first rank that failed, as a line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, OSError) and cause.strerror:
        name = f" ({Path(cause.filename).name})" if cause.filename else ""
        return f"rank {rank}: {cause.strerror}{name}"
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"rank {rank}: {lines[0].rstrip('.')}"
