"""The training loop of one rank: resume, step, tell, score, save, stop, export.

    output/
      checkpoints/step-…/    what a run goes on from by itself
      metrics.jsonl          see `kilter.train.metrics`
      reference.safetensors  of DPO, see `kilter.train.preference.reference`
      tensorboard/, profile/ if asked for
      model/                 the finished model, a Hugging Face folder
      adapter/               the finished adapters, a folder of PEFT; model/ has them merged

The number of the step and the place in the data are the only state beside the tensors.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from kilter import __version__
from kilter.comm.collectives import all_reduce_max
from kilter.job import JobError, build, dump
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.value import add_value_head
from kilter.ops.packed import FLOATS
from kilter.parallel.apply import apply
from kilter.parallel.checksum import weights_checksum
from kilter.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    checkpoints,
    load_tensors,
    read_facts,
)
from kilter.train.config import FREE, OF_PAIRS, STEERING, TrainJob, differences, steered
from kilter.train.data import DataLoader, Pack, corpus_packs, evaluation_packs
from kilter.train.export import export_model
from kilter.train.inputs import Inputs
from kilter.train.lora import add_adapters
from kilter.train.metrics import Monitor
from kilter.train.optimizer import Optimizer
from kilter.train.peft import start_adapters, told_of_start
from kilter.train.pieces import Pieces, pieces_of
from kilter.train.preference.objective import PairObjective
from kilter.train.preference.reference import Tables, made_tables, reference, stored_tables
from kilter.train.step import NotFinite, evaluate, token_losses, train_step


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        step: the last one taken.
        stopped: whether it was told to stop before its last step.
        text: that as a sentence.
    """

    step: int
    stopped: bool
    text: str


def train(job: TrainJob, inputs: Inputs, mesh: Mesh) -> Ending:
    """Runs a job to its end, or until SIGTERM or SIGINT; goes on from its last checkpoint.

    Every rank of the mesh calls it.

    Raises:
        NotFinite: as `train_step`.
        CheckpointError: if the output folder has checkpoints of another job.
    """
    with stop_signals() as stop, ExitStack() as closing:
        return Run(job, inputs, mesh, closing).go(stop)


def last_checkpoint(job: Any, free: Sequence[str] = FREE) -> Path | None:
    """What a job goes on from, if it has begun.

    Args:
        job: a `TrainJob`, or another job with an output folder.
        free: what may differ, beside `STEERING`; see `kilter.train.config.differences`.

    Raises:
        CheckpointError: if its output folder has checkpoints of another job.
    """
    whole = checkpoints(Path(job.output) / "checkpoints")
    if not whole:
        return None
    before = read_facts(whole[-1])["job"]
    with suppress(JobError):  # of another version: then what differs is what it says
        before = dump(build(type(job), before))
    if names := differences(before, dump(job), (*free, *STEERING)):
        raise CheckpointError(
            f"{whole[-1]} belongs to another job: {', '.join(names)} "
            f"{'differs' if len(names) == 1 else 'differ'}. Restore the job as it was, or name "
            "another output folder.")
    return whole[-1]


class Run:
    """A job on its way, in one rank.

    Args:
        closing: what the run opens is closed with this.
    """

    def __init__(self, job: TrainJob, inputs: Inputs, mesh: Mesh, closing: ExitStack) -> None:
        self.job, self.inputs, self.mesh = job, inputs, mesh
        self.output = Path(job.output)
        with torch.device("meta"):
            model = Decoder(inputs.spec, exact=job.model.exact,
                            kv_dtype=FLOATS[job.model.kv_dtype], products=job.model.products,
                            max_positions=job.data.seq_len)
        if job.lora is not None:
            add_adapters(model, job.lora)
        if job.kind == "reward":
            add_value_head(model)
        self.spread = apply(model, mesh, recompute=job.recompute, weights=FLOATS[job.precision],
                            pipeline=job.pipeline, context=job.context)
        self.optimizer = Optimizer(self.spread.held, job.optimizer, mesh.axis("dp_cp_tp"))
        dp = mesh.axis("dp")
        self.loader = closing.enter_context(
            DataLoader(inputs.data, job.micro_batches, dp.index, dp.size, epochs=job.epochs))
        self.checkpointer = Checkpointer(self.output / "checkpoints", job.checkpoint,
                                         mesh.axis("world"))
        closing.callback(self.checkpointer.close)
        self.steps = job.steps or self.loader.steps_left()
        if not self.steps:
            raise ValueError(f"There is nothing to learn: epochs is {job.epochs}, and so many have "
                             "not one sequence with these weights of the sources. Make either "
                             "larger.")
        self.step = self.tokens = 0  # taken, and seen
        self._saved = -1
        self._tables: Tables | None = None
        resumed = self._restore()
        self._pairs = self._objective("train")
        self._held_out = self._objective("held_out")
        self.monitor = Monitor(job, self.spread, self.step, self.steps)
        closing.callback(self.monitor.close)
        self.monitor.say(f"Data: {inputs.data}")
        told = told_of_start(job.lora, inputs.spec)
        if resumed is not None:
            told = [f"Going on from the checkpoint of step {self.step}"
                    f"{steered(resumed['job'], dump(job))}."]
        for line in told:
            self.monitor.say(line)

    def go(self, stop: threading.Event) -> Ending:
        """Steps until the last, or until a rank was told to stop."""
        job, monitor = self.job, self.monitor
        while self.step < self.steps:
            if self._told_to(stop):
                self.save()
                self.checkpointer.wait()
                return Ending(self.step, True, f"Stopped after step {self.step} of {self.steps}; "
                              "the same command goes on from there.")
            factor = job.schedule.factor(self.step, self.steps)
            with monitor.phase("data"):
                packs = self.loader.next_step()
            with monitor.step(self.step + 1):
                try:
                    result = train_step(self.spread, self.optimizer, packs, factor=factor,
                                        max_norm=job.max_norm or None, phase=monitor.phase,
                                        losses=self._pairs or token_losses)
                except NotFinite as error:
                    raise NotFinite(
                        f"Step {self.step + 1} failed. {error} A lower optimizer.lr may help: the "
                        "same job with another one goes on from its last checkpoint.") from None
            self.step += 1
            self.tokens += result.tokens
            monitor.tell(self.step, result, packs, lr=job.optimizer.lr * factor,
                         tokens=self.tokens, epoch=self.loader.epoch,
                         more=self._means(self._pairs, result.valid))
            if self.step < self.steps:  # after the last step, `_finish` does both
                if job.eval.every and self.step % job.eval.every == 0:
                    self.score()
                if job.checkpoint.every and self.step % job.checkpoint.every == 0:
                    self.save()
        return self._finish()

    def save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self._saved == self.step:
            return
        with self.monitor.phase("checkpoint"):
            self.checkpointer.save(self.step, self.pieces(), {
                "tokens": self.tokens, "steps": self.steps, "loader": self.loader.state_dict(),
                "job": dump(self.job), "layout": str(self.job.layout), **self._start,
                "versions": {"kilter": __version__, "torch": torch.__version__}})
        self._saved = self.step

    def score(self) -> float | None:
        """Mean loss over the targets of the held-out data; None if there is none."""
        if self.inputs.data.held_out is None:
            return None
        with self.monitor.phase("evaluation"):
            loss, targets = evaluate(self.spread, self._evaluation_packs(),
                                     self._held_out or token_losses)
        self.monitor.evaluated(self.step, loss, targets, self._means(self._held_out, targets))
        return loss

    def pieces(self) -> dict[str, Pieces]:
        """What a checkpoint holds: this rank's part of the trained parameters and of the
        optimizer's states."""
        return pieces_of(self.spread.held, self.optimizer.states())

    def _restore(self) -> dict[str, Any] | None:
        """Weights and states: of the last whole checkpoint, whose facts it returns, else as the job
        says to start."""
        checkpoint = last_checkpoint(self.job)
        frozen = self.spread.local.keys() - {held.name for held in self.spread.held}
        with_tables = self.job.kind == "dpo" and self.job.lora is None
        if with_tables:
            self._tables = stored_tables(self.job, self.inputs, self.mesh.axis("world"))
        make_tables = with_tables and self._tables is None
        if frozen or checkpoint is None or make_tables:  # a checkpoint holds what is trained
            if self.inputs.source is not None:
                self.spread.load(self.inputs.source)
            else:
                self.spread.initialise(self.job.seed, self.job.model.std)
            if self.job.lora is not None and checkpoint is None:
                start_adapters(self.spread, self.job.lora)
        self._start: dict[str, Any] = {"model": dump(self.inputs.spec)}
        if self.job.lora is not None:  # the rest of the model is in no checkpoint
            self._start["base"] = weights_checksum(self.spread, [
                name for name in self.spread.shards
                if ".adapter." not in name and not name.startswith("value.")])
        if make_tables:
            self._tables = made_tables(self.spread, self.job, self.inputs)
        facts = None if checkpoint is None else read_facts(checkpoint)
        if checkpoint is not None and facts is not None:
            self.loader.load_state_dict(facts["loader"])
            epochs = self.job.epochs
            if facts["step"] > self.steps if epochs is None else self.loader.epoch >= epochs:
                length = f"{self.steps} steps" if epochs is None else f"{epochs} epochs"
                raise CheckpointError(f"{checkpoint} is past the {length} of this job. "
                                      "Ask for more, or name another output folder.")
            if epochs is not None:  # they may have been fewer, with a last step that was not full
                self.steps = facts["step"] + self.loader.steps_left()
            self._check_start(facts)
            load_tensors(checkpoint, self.pieces(), self.mesh.axis("world"))
            self.spread.updated()  # brings what a rank holds to where the model reads it
            self.step = self._saved = facts["step"]
            self.tokens = facts["tokens"]
        self.optimizer.reloaded()
        return facts

    def _check_start(self, facts: dict[str, Any]) -> None:
        """That the model's files are those that the run started from, as far as it needs them."""
        changed = differences(facts.get("model") or {}, self._start["model"], ())
        if facts.get("base") != self._start.get("base"):
            changed = [*changed, "the weights under the adapters"]
        if changed:
            raise CheckpointError(
                f"The run in {self.output} started from another model than "
                f"{self.job.model.path or 'model.config'} is now: {', '.join(changed)} "
                f"{'differs' if len(changed) == 1 else 'differ'}. Put the model back as it was, or "
                "name another output folder.")

    def _finish(self) -> Ending:
        if self._saved != self.step:  # else the run was finished before
            self.score()
            self.save()
            self.checkpointer.wait()
        place = self.output / "checkpoints"
        if self.job.export:
            place = self.output / "model"
            export_model(self.spread, self.inputs, self.output, FLOATS[self.job.precision],
                         lora=self.job.lora, base=self.job.model.path,
                         reward_ends=self._ends() if self.job.kind == "reward" else None)
        return Ending(self.step, False, f"Finished {self.steps} steps over {self.tokens} tokens; "
                      f"the result is in {place}.")

    def _objective(self, data: Literal["train", "held_out"]) -> PairObjective | None:
        """How pairs are learned from; None for kinds that learn tokens, or without data."""
        job = self.job
        if job.kind not in OF_PAIRS or getattr(self.inputs.data, data) is None:
            return None
        found = None if self._tables is None else reference(self._tables, self.inputs.data, data)
        return PairObjective(job.dpo if job.kind == "dpo" else None, found)

    def _ends(self) -> set[int]:
        """The tokens that sequences end with: a template ends all answers alike, and some are
        enough to know it."""
        pack = next(corpus_packs(self.inputs.data.train, self.inputs.data.config))
        return set(pack.tokens_T[pack.cu_seqlens_S1[1:].long() - 1].tolist())

    def _means(self, pairs: PairObjective | None, count: int) -> dict[str, float]:
        return {} if pairs is None else pairs.take(count, self.mesh.axis("pp_dp_cp"))

    def _told_to(self, stop: threading.Event) -> bool:
        """Whether any rank was told to stop, has nobody who reads what it tells, or could not write
        the last checkpoint (which `save` then raises): all have to know before the same step."""
        told = stop.is_set() or self.monitor.unread or self.checkpointer.failed
        return bool(all_reduce_max(torch.tensor([int(told)]), self.mesh.axis("world")))

    def _evaluation_packs(self) -> Iterator[Pack]:
        dp, limit = self.mesh.axis("dp"), self.job.eval.batches
        packs = evaluation_packs(self.inputs.data, dp.index, dp.size)
        for turn, pack in enumerate(packs):  # every rank takes one pack a turn
            if limit and turn * dp.size >= limit:
                return
            within = not limit or turn * dp.size + dp.index < limit
            yield pack if within else pack.blank()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """SIGTERM, SIGINT and SIGHUP set the event; SIGINT after that is a `KeyboardInterrupt` as
    usual. A signal that is ignored stays so (`nohup`). Outside the main thread, which alone may
    handle signals, nothing sets it."""
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, told)
              for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
