"""Sampling inside the training process: the serving engine on the trainer's ranks, without HTTP.

    mesh = rollout_mesh(tp=2)                   # world = replicas x tp, consecutive ranks together
    engine = RolloutEngine(spec, tokenizer, RolloutConfig(precision="bf16"), mesh)
    engine.update(parts, version)               # this rank's tensors, some at a time
    mine = engine.generate(engine.share(prompts), params, seed=seed, step=step)
    every = engine.gather(mine)                 # of all replicas
    engine.sleep()                              # the KV cache's memory goes back

Every rank calls every method. Within a replica one rank schedules and samples and the others
follow (`kilter.serve.tensor`). What a sample is depends on its prompt, the weights, the settings
and (seed, step, its id), and on nothing that runs beside it, be it batch, replica or order.

Log-probabilities are those a trainer scores: of the logits divided by the temperature, in the
trainer's formats, so that the ratio of the two is exactly 1 for as long as the weights are the same
(`kilter.rl.gate`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilter.comm.collectives import split_sizes
from kilter.comm.objects import gather_objects
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear
from kilter.models.spec import ModelSpec
from kilter.ops.packed import FLOATS
from kilter.parallel.apply import kv_sharers
from kilter.parallel.tensor import apply_tensor
from kilter.rl.environment import Environment
from kilter.rl.experience import Rollout
from kilter.rl.partial_rollout import PartialRollout
from kilter.rl.rollout_config import Prompt, RolloutConfig, check_params, sample_seed
from kilter.serve.engine import Engine
from kilter.serve.executor import Executor, local_spec
from kilter.serve.pages import PagePool
from kilter.serve.params import SamplingParams
from kilter.serve.tensor import Ranks, TensorExecutor, follow_steps
from kilter.tokens import Tokenizer
from kilter.train.lora import add_adapters
from kilter.weights.load import put_weight

__all__ = ["Environment", "Prompt", "RolloutConfig", "RolloutEngine", "check_params",
           "rollout_mesh", "sample_seed"]

Partials = Literal["restart", "continue"]


def rollout_mesh(tp: int = 1, device_type: str = "cpu") -> Mesh:
    """All ranks as replicas of ``tp`` consecutive ones; every rank calls it.

    Raises:
        ValueError: if the ranks are no multiple of ``tp``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if tp < 1 or world % tp:
        raise ValueError(f"{world} ranks cannot roll out in replicas of {tp}; the rollout's "
                         f"tensor parallelism must divide their number.")
    if world == 1:
        return Mesh.single(device_type)
    return Mesh(Layout(dp=world // tp, tp=tp, sequence_parallel=False), device_type)


class RolloutEngine:
    """A replica of the policy that samples, on the ranks of a mesh's ``tp`` axis.

    Its weights come by `update`, of which the first has to bring all.

    Args:
        mesh: of `rollout_mesh`; default this process alone.

    Raises:
        ValueError: if the model cannot be spread over so many ranks, or for sizes that do not go
            together.
    """

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, config: RolloutConfig | None = None,
                 mesh: Mesh | None = None) -> None:
        self.config = config = config or RolloutConfig()
        self.mesh = mesh = mesh or Mesh.single()
        self._axis = mesh.axis("tp")
        self._device = (torch.device("cuda", torch.cuda.current_device())
                        if mesh.device_type == "cuda" else torch.device(mesh.device_type))
        with torch.device("meta"):
            model = Decoder(spec, exact=config.exact, kv_dtype=FLOATS[config.kv_dtype],
                            products=config.products, max_positions=config.engine.max_context)
        if config.lora is not None:
            add_adapters(model, config.lora)
        self.shards = apply_tensor(model, self._axis, kv_sharers(spec, mesh), sequence=False)
        self.model = model.eval().requires_grad_(False)
        self._ranks = Ranks(mesh, self._axis, self._device)
        self.engine: Engine | None = None  # of the replica's first rank
        if self._axis.size > 1 and self._axis.index == 0:
            self._executor: Executor = TensorExecutor(model, config.engine, self._ranks,
                                                      self.shards)
        else:
            pool = PagePool(local_spec(model), config.engine.num_pages, config.engine.page_size,
                            model.kv_dtype, self._device)
            self._executor = Executor(model, pool, config.engine.context_of(model.max_positions))
        if self._axis.index == 0:
            self.engine = Engine(model, tokenizer, config.engine, self._executor)
        self.version: int | None = None  # of the weights; None: not all are there
        self.steps = 0  # that the engine has taken, all phases together
        self._missing = set(self.shards)
        self._asleep = False
        self._interrupted = threading.Event()

    # ---- weights and memory ----

    def update(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> int:
        """Takes new weights, which are copied, and forgets what was cached of the old ones.

        Args:
            parts: tensors of this rank by our parameter names, in the shapes of ``shards``; a part
                at a time, so that no more than one has to be in memory beside the model. All
                parameters, or some once all are there.
            version: what tokens sampled with these weights are marked with.

        Returns:
            How many tensors came.

        Raises:
            ValueError: for a tensor that is not this model's, of another shape, or in another
                format than it is held in, or if one is still missing. The weights are then partly
                old and partly new, and `generate` refuses until they are complete again.
        """
        self._check_version(version)
        self._executor.forget()
        self.version = None
        taken = 0
        for part in parts:
            for name, value in part.items():
                self._check_weight(name, value)
                self._put(name, value.detach())
                self._missing.discard(name)
                taken += 1
        if self._missing:
            names = sorted(self._missing)
            raise ValueError(f"{len(names)} parameters of the rollout's model have no weights yet: "
                             f"{', '.join(names[:10])}{' …' if len(names) > 10 else ''}. The first "
                             "update has to bring all of them.")
        if self.engine is not None:
            self.engine.weights_changed(version)
        self.version = version
        return taken

    @property
    def kv_bytes(self) -> int:
        """Bytes that this rank's KV cache takes now; 0 while asleep."""
        return self._executor.pool.nbytes

    def sleep(self, *, weights: bool = False) -> None:
        """Gives the KV cache's memory back, and with ``weights`` the model's, which the next
        update then has to bring whole."""
        if self.engine is not None:
            self.engine.flush_cache()
        self._executor.forget()
        self._executor.pool.sleep()
        self._asleep = True
        if weights:
            self.version, self._missing = None, set(self.shards)
            for name, shard in self.shards.items():
                module, leaf = self._place(name)
                setattr(module, leaf, nn.Parameter(
                    torch.empty(shard.local_shape, device="meta"), requires_grad=False))

    def wake(self) -> None:
        """Takes the KV cache's memory again, if it was given back."""
        if self._asleep:
            self._executor.pool.wake()
            self._asleep = False

    # ---- sampling ----

    def share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """This replica's part of all prompts: neighbours, as many as the others' or one more."""
        axis = self.mesh.axis("dp")
        sizes = split_sizes(len(prompts), axis.size)
        start = sum(sizes[:axis.index])
        return list(prompts[start:start + sizes[axis.index]])

    def gather(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """All replicas' rollouts on every rank, in the order of the prompts that were shared."""
        every = gather_objects(list(rollouts), self.mesh.axis("dp"))
        return [rollout for part in every for rollout in part]

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, step: int,
                 environment: Environment | None = None) -> list[Rollout]:
        """Samples of this replica's prompts, n of each, in order; the same on all its ranks.

        Args:
            params: ``max_tokens`` counts what is sampled, over all turns; see `check_params`.
            seed, step: of the run; with a sample's id they are the seed of its stream.
            environment: called on the replica's first rank after every stop; what it returns is
                put into the sequence (as no action), and the sampling goes on.

        Returns:
            Rollouts with no rewards yet. ``finish`` is "stop" (an end token, which counts as
            sampled, or a stop string), "length" (max_tokens or the context), or, after
            `interrupt`, "abort": these can be given to `resume`.

        Raises:
            ValueError: for settings or prompts that cannot be; nothing was sampled.
            RuntimeError: asleep, without weights, or if the logits are broken.
        """
        samples = [PartialRollout(f"{prompt.id}/{i}", prompt.group, list(prompt.ids))
                   for prompt in prompts for i in range(prompt.n)]
        return self._phase(samples, params, seed, step, environment)

    def resume(self, partials: Sequence[Rollout], params: SamplingParams, *, seed: int, step: int,
               environment: Environment | None = None, in_flight: Partials = "continue"
               ) -> list[Rollout]:
        """Goes on with rollouts that were interrupted, under the weights there are now.

        Args:
            partials: with finish "abort".
            seed, step: as they were begun with, if an answer is to be the one it would have been
                (as long as the weights are the same).
            in_flight: ``continue`` computes the keys and values of all their tokens anew and goes
                on: what was sampled keeps its log-probabilities and versions. ``restart`` drops
                what came after the prompt and samples all of it again.

        Returns, raises: as `generate`.
        """
        if in_flight not in ("restart", "continue"):
            raise ValueError(f"in_flight is {in_flight!r} but must be restart or continue.")
        done = [rollout.id for rollout in partials if rollout.finish != "abort"]
        if done:
            raise ValueError(f"The rollouts {', '.join(done[:10])} are finished; only those with "
                             "finish \"abort\" can be resumed.")
        samples = [PartialRollout.of(rollout, whole=in_flight == "continue")
                   for rollout in partials]
        return self._phase(samples, params, seed, step, environment)

    def interrupt(self) -> None:
        """Makes the `generate` or `resume` that is running here return after its present step, what
        is not finished with "abort". For other threads and for environments, on the replica's first
        rank; between phases it does nothing."""
        self._interrupted.set()

    # ---- parts of a phase ----

    def _phase(self, samples: list[PartialRollout], params: SamplingParams, seed: int, step: int,
               environment: Environment | None) -> list[Rollout]:
        check_params(params)
        if self._asleep:
            raise RuntimeError("The rollout engine has given its KV cache back; call wake() first.")
        if self.version is None:
            raise RuntimeError("The rollout engine's weights are not complete; call update() with "
                               "all parameters first.")
        self._check_samples(samples, params)
        return self._together(lambda: self._run(samples, params, seed, step, environment))

    def _run(self, samples: list[PartialRollout], params: SamplingParams, seed: int, step: int,
             environment: Environment | None) -> list[Rollout]:
        """On the replica's first rank."""
        engine = self.engine
        assert engine is not None
        self._interrupted.clear()
        running: dict[int, PartialRollout] = {}

        def start(sample: PartialRollout) -> None:
            left = params.max_tokens - sample.actions
            if left <= 0 or len(sample.tokens) >= engine.max_context:
                sample.finish = "length"
                return
            sample.finish = None
            own = replace(params, max_tokens=left, seed=sample_seed(seed, step, sample.id),
                          logprobs=0, tempered_logprobs=True)
            running[engine.submit(sample.tokens, own, drawn=sample.actions)] = sample

        try:
            for sample in samples:
                start(sample)
            while running and not self._interrupted.is_set():
                self.steps += 1
                for delta in engine.step():
                    sample = running[delta.request]
                    for choice in delta.choices:
                        assert choice.logprob is not None
                        sample.act(choice.token_id, choice.logprob, delta.weights_version)
                    if delta.finish_reason is None:
                        continue
                    del running[delta.request]
                    if delta.finish_reason == "error":
                        raise RuntimeError(f"Sample {sample.id} cannot go on: {delta.error}")
                    sample.finish = delta.finish_reason
                    if delta.finish_reason == "stop" and environment is not None:
                        seen = environment(sample.rollout())
                        if seen:
                            sample.observe(seen, engine.max_context)
                        if seen and sample.finish is None:
                            start(sample)
        finally:
            for number in running:
                engine.abort(number)
            engine.drop_news(running.keys())
        for sample in running.values():
            sample.finish = "abort"
        return [sample.rollout() for sample in samples]

    def _together(self, work: Callable[[], list[Rollout]]) -> list[Rollout]:
        """What the replica's first rank makes, on all of them."""
        axis = self._axis
        if axis.size == 1:
            return work()
        made: list[Any] = [None]
        failure: BaseException | None = None
        if isinstance(self._executor, TensorExecutor):
            try:
                made = [work()]
            except BaseException as error:
                failure = error
                made = [error if isinstance(error, ValueError) else
                        str(error) or type(error).__name__]
            if failure is not None and not self._executor.together:
                raise failure  # the others hear nothing more, and fail as this rank leaves
            self._executor.release()
        else:
            follow_steps(self._executor, self._ranks, self.shards)
        dist.broadcast_object_list(made, axis.ranks[0], group=axis.members)
        if failure is not None:
            raise failure
        if isinstance(made[0], ValueError):  # of an environment: all ranks say the same
            raise made[0]
        if isinstance(made[0], str):
            raise RuntimeError(f"The first rank of this rollout replica failed: {made[0]}")
        rollouts: list[Rollout] = made[0]
        return rollouts

    # ---- checks ----

    def _check_samples(self, samples: Sequence[PartialRollout], params: SamplingParams) -> None:
        """On every rank alike, before anything is sent."""
        vocab, context = self.model.spec.vocab_size, self._executor.max_context
        params.check(vocab)
        seen: set[str] = set()
        for sample in samples:
            if sample.id in seen:
                raise ValueError(f"The sample {sample.id!r} comes twice; ids of prompts must be "
                                 "unique, since seeds come from them.")
            seen.add(sample.id)
            bad = next((t for t in sample.tokens if not 0 <= t < vocab), None)
            if not sample.tokens or bad is not None:
                what = "is empty" if bad is None else f"holds token id {bad}"
                raise ValueError(f"The prompt of sample {sample.id!r} {what}; give at least one "
                                 f"token, from 0 to {vocab - 1}.")
            if not sample.actions and len(sample.tokens) >= context:
                raise ValueError(f"The prompt of sample {sample.id!r} has {len(sample.tokens)} "
                                 f"tokens, which leaves no room for an answer in a context of "
                                 f"{context}; filter such prompts, or set engine.max_context and "
                                 "engine.kv_tokens higher.")

    def _check_version(self, version: int) -> None:
        if version < 0:
            raise ValueError(f"The version is {version} but must be 0 or more; -1 marks tokens "
                             "that were not sampled.")

    def _check_weight(self, name: str, value: Tensor) -> None:
        shard = self.shards.get(name)
        if shard is None:
            raise ValueError(f"{name} is not a parameter of the rollout's model.")
        if tuple(value.shape) != shard.local_shape:
            raise ValueError(f"{name} has the shape {list(value.shape)}, but this rank's part of "
                             f"it is {list(shard.local_shape)}.")
        module, leaf = self._place(name)
        matrix = leaf == "weight" and isinstance(module, Linear | Embedding)
        allowed = {torch.float32, FLOATS[self.config.precision]} if matrix else {torch.float32}
        if value.dtype not in allowed:
            raise ValueError(f"{name} came as {value.dtype}, but the trainer computes with it in "
                             f"{'float32' if len(allowed) == 1 else 'float32 or bfloat16'}; send "
                             "it so, or the two will differ.")

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def _put(self, name: str, value: Tensor) -> None:
        put_weight(self.model, name, value, self.config.precision, self._device)
        module, leaf = self._place(name)
        held = getattr(module, leaf)
        if isinstance(held, Tensor) and (held.untyped_storage().data_ptr()
                                         == value.untyped_storage().data_ptr()):
            # Nothing was rounded, moved or packed: it is the trainer's own memory.
            setattr(module, leaf, nn.Parameter(held.detach().clone(), requires_grad=False))
