"""What the starting model says of all pairs: computed once, before the first step, so that no
second model is in memory.

    output/reference.safetensors    train, held_out: float64 [pairs, 2], chosen and rejected; and
                                    what they were made with, which has to be the same on a resume

On the exact path a log-probability does not depend on the packing, so the first step of a run finds
the policy's to be these very bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_sum, broadcast
from kilter.comm.objects import share_result
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.parallel.context.plan import all_rows
from kilter.report.progress import progress
from kilter.train.checkpoint import CheckpointError
from kilter.train.config import TrainJob
from kilter.train.data import Corpus, Data, DataConfig, Pack, SampleId, corpus_packs
from kilter.train.inputs import Inputs
from kilter.train.preference.objective import Reference, sequence_logprobs
from kilter.train.step import local_rows

Tables = dict[str, Tensor]

_FILE = "reference.safetensors"
_FORMAT = "kilter-reference-1"


def stored_tables(job: TrainJob, inputs: Inputs, world: Axis) -> Tables | None:
    """The tables of the output folder, None if there are none; collective.

    Raises:
        CheckpointError: on all ranks, if they are of another starting model or other data, or
            cannot be read.
    """
    path = Path(job.output) / _FILE
    tables: Tables = {}

    def found() -> bool:
        if not path.exists():
            return False
        tables.update(_read(path, starting_point(job, inputs)))
        return True

    if not share_result(found if world.index == 0 else None, world, raises=(CheckpointError,)):
        return None
    return {name: broadcast(tables.get(name, _empty(corpus)), world)
            for name, corpus in _corpora(inputs.data)}


def made_tables(spread: Spread, job: TrainJob, inputs: Inputs) -> Tables:
    """The tables of the model as it is now, the starting one; writes them. Collective."""
    mesh = spread.mesh
    tables = {name: _table(spread, corpus, inputs.data.config)
              for name, corpus in _corpora(inputs.data)}
    if mesh.rank == 0:
        path = Path(job.output) / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        save_file(tables, partial, metadata={"format": _FORMAT,
                                             "start": starting_point(job, inputs)})
        os.replace(partial, path)
    return tables


def reference(tables: Tables, data: Data, name: str) -> Reference:
    """The rows of a table, ``train`` or ``held_out``, by pairs."""
    corpus = dict(_corpora(data))[name]

    def find(ids: Sequence[SampleId]) -> Tensor:
        numbers = torch.tensor([corpus.number(id) for id in ids], dtype=torch.int64)
        return tables[name][numbers].flatten()

    return find


def starting_point(job: TrainJob, inputs: Inputs) -> str:
    """A hash of the weights a job starts from and of all else that the tables depend on."""
    if inputs.source is None:
        weights = f"{inputs.spec} {job.seed} {job.model.std}"
    else:
        path, digest = inputs.source.path, hashlib.sha256()
        suffix = "*.safetensors" if inputs.source.kind == "hf" else "*.gguf"
        for file in [path] if path.is_file() else sorted(path.glob(suffix)):
            with open(file, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        weights = digest.hexdigest()
    facts = [weights, job.precision, job.model.exact, job.model.kv_dtype,
             job.model.products,
             [(name, corpus.key) for name, corpus in _corpora(inputs.data)]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read(path: Path, start: str) -> Tables:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Remove it, to have the reference "
                              "computed again.") from None
    if header.get("format") != _FORMAT or header.get("start") != start:
        raise CheckpointError(f"{path} holds the reference of another starting model, precision or "
                              "data. Restore them as they were, or name another output folder.")
    return tables


def _table(spread: Spread, corpus: Corpus, config: DataConfig) -> Tensor:
    """Every rank its packs."""
    mesh, dp = spread.mesh, spread.mesh.axis("dp")
    device = torch.device(mesh.device_type)
    table = _empty(corpus)
    done = 0
    with _bar(mesh.rank == 0) as update:
        coming = corpus_packs(corpus, config, dp.index, dp.size)
        while packs := list(islice(coming, 1 if spread.pipeline is None else 4 * mesh.layout.pp)):
            rows = [local_rows(spread, pack, device) for pack in packs]
            found = spread.forward_all([batch for batch, _ in rows], partial(_score, packs, rows))
            for pack, sums_S in zip(packs, found, strict=True):
                done += len(pack.ids) * dp.size
                if sums_S is not None and pack.ids and mesh.axis("cp").index == 0:
                    table[[corpus.number(id) for id in pack.ids]] = sums_S.view(-1, 2).cpu()
            update(min(done, len(table)), len(table))
    return all_reduce_sum(table, mesh.axis("pp_dp_cp"))


def _score(packs: Sequence[Pack], rows: Sequence[tuple[Batch, Tensor]],
           forward: Callable[..., Tensor], k: int) -> Tensor:
    return sequence_logprobs(all_rows(rows[k][0], forward(*rows[k])), packs[k])


def _bar(shown: bool) -> AbstractContextManager[Callable[..., None]]:
    return progress("Scoring the pairs by the starting model") if shown else nullcontext(
        lambda done, total: None)


def _empty(corpus: Corpus) -> Tensor:
    return torch.zeros(sum(corpus.sizes), 2, dtype=torch.float64)


def _corpora(data: Data) -> Iterator[tuple[str, Corpus]]:
    yield "train", data.train
    if data.held_out is not None:
        yield "held_out", data.held_out
