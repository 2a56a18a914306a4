"""The engine's own tests, as they stand, on an engine over tensor-parallel ranks: what they compare
it with is one rank, and to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import ModelSpec
from kilter.serve import tensor
from kilter.serve.engine import Engine
from kilter.serve.engine_config import EngineConfig
from kilter.serve.executor import Executor
from kilter.serve.scheduler import SchedulerConfig
from kilter.serve.tensor import Ranks, TensorExecutor, follow_steps, load_part, ranks_of
from kilter.weights.bridge import ModelSource
from tests.ranks import RankPool
from tests.serve import test_cases, test_embeddings, test_engine, test_stats, tiny_engine

MODULES = (test_engine, test_cases, test_embeddings, test_stats)


class Memory(ModelSource):
    """A version of the tiny model's weights, as a checkpoint that need not be written."""

    def __init__(self, version: int) -> None:
        model = init_weights(Decoder(tiny_engine.spec()), version, std=0.05)
        vars(self).update(path=Path(f"/{version}"), spec=model.spec)
        self.tensors: dict[str, Tensor]
        vars(self)["tensors"] = {name: p.detach() for name, p in model.named_parameters()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> Any:
        return SimpleNamespace(shape=tuple(self.tensors[name].shape))

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        whole = self.tensors[name][rows or slice(None)]
        return whole[:, columns] if columns is not None else whole


def run_over_ranks(tests: Sequence[Callable[[], object]], degree: int, heads: tuple[int, int]
                   ) -> None:
    """Rank 0 runs tests; whenever one makes an engine the others follow that."""
    me = ranks_of(degree, dist.get_rank())
    plain_spec = tiny_engine.spec

    def spec(*args: Any, **kwargs: Any) -> ModelSpec:
        return replace(plain_spec(*args, **kwargs), num_heads=heads[0], num_kv_heads=heads[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_engine, "spec", spec)
        patch.setattr(tiny_engine, "frozen_model", cache(tiny_engine.frozen_model.__wrapped__))
        patch.setattr(tensor, "open_model", lambda path: Memory(int(path.name)))
        if dist.get_rank():
            while (config := _told(None)) is not None:
                model, shards = load_part(Memory(0), me, storage="fp32")
                follow_steps(Executor.of(model, config), me, shards)
            return
        leader = _Leader(me)
        for module in MODULES:
            patch.setattr(module, "make_engine", leader.make_engine)
            patch.setattr(module, "weights", Memory, raising=False)
            patch.setattr(module, "frozen_model", tiny_engine.frozen_model, raising=False)
        for test in tests:
            test()
        leader.release()
        _told(None)


class _Leader:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._newest: TensorExecutor | None = None  # only with this one the others are in step

    def release(self) -> None:
        if self._newest is not None:
            self._newest.release()

    def make_engine(self, kv_tokens: int = 256, page_size: int = 16, **scheduler: Any) -> Engine:
        """As the one it stands for."""
        self.release()
        config = _told(EngineConfig(kv_tokens, page_size, eos_token_ids=(tiny_engine.EOT,),
                                    scheduler=SchedulerConfig(**scheduler)))
        model, shards = load_part(Memory(0), self._ranks, storage="fp32")
        self._newest = TensorExecutor(model, config, self._ranks, shards)
        return Engine(model, tiny_engine.tokenizer(), config, self._newest)


def _told(config: EngineConfig | None) -> Any:
    """Rank 0's, on all."""
    box = [config]
    dist.broadcast_object_list(box, 0)
    return box[0]


def anything_that_may_happen() -> None:
    run_state_machine_as_test(test_engine.EngineMachine, settings=settings(
        max_examples=15, stateful_step_count=25, deadline=None, database=None,
        suppress_health_check=list(HealthCheck)))


TESTS = [
    anything_that_may_happen,
    test_engine.test_nothing_is_queued_for_a_bad_request,
    partial(test_engine.test_prompt_logprobs_survive_chunks_preemption_and_a_warm_cache, 5, 3),
    *(partial(test_engine.test_weights_change_under_a_preempted_answer_and_a_half_scored_prompt, m)
      for m in ("restart", "continue", "abort")),
    test_engine.test_tokens_after_a_weight_update_belong_to_the_new_weights_or_to_the_old_cache,
    test_engine.test_a_grammar_that_is_complete_ends_the_answer,
    partial(test_cases.test_5_the_same_bits_cold_cached_chunked_and_in_company, 16),
    test_cases.test_10_many_requests_on_a_pool_for_one,
    partial(test_cases.test_12_a_fully_cached_prompt, 4),
    *(partial(test_embeddings.test_the_same_bits_in_any_chunk_and_company, 5, pooling)
      for pooling in test_embeddings.POOLINGS),
    partial(test_embeddings.test_preempted_embeddings_are_the_same_bits, "mean"),
    partial(test_embeddings.test_a_vector_is_of_one_version_of_the_weights, "continue"),
    test_stats.test_counters_are_what_happened,
    partial(test_stats.test_a_snapshot_is_a_recount, 4),
]


@pytest.mark.parametrize(("degree", "heads"), [(2, (2, 1)), (4, (8, 4))])
def test_the_engines_tests_over_ranks(ranks: RankPool, degree: int, heads: tuple[int, int]) -> None:
    """Two that share a KV head, and four with one each."""
    ranks.run(degree, run_over_ranks, TESTS, degree, heads, timeout=300)
