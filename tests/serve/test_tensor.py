"""An engine over tensor-parallel ranks gives the bits of one rank."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.linear import Linear
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.serve import tensor
from kilter.serve.answer import Delta
from kilter.serve.engine import Engine
from kilter.serve.engine_config import EngineConfig
from kilter.serve.exactness import score_with_cache, score_without_cache
from kilter.serve.executor import Executor
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.scheduler import SchedulerConfig
from kilter.serve.tensor import TensorExecutor, follow_steps, load_part, ranks_of
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.export import State, export_hf
from kilter.weights.load import Storage, load_decoder
from kilter.weights.tokenizer import open_tokenizer
from tests.ranks import RankPool
from tests.serve.test_exactness import _real_text
from tests.serve.tiny_tokenizer import save_byte_tokenizer
from tests.weights import gguf_files

VOCAB, CONTEXT = 131, 96
PROMPT = [(7 * i) % 120 + 5 for i in range(40)]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=VOCAB)


def spec(**changes: Any) -> ModelSpec:
    """8 query and 4 KV heads, so 8 virtual shards; 20 feed-forward rows of each, which no group of
    32 ends with."""
    return dataclasses.replace(ModelSpec(
        architecture="Qwen3ForCausalLM", vocab_size=VOCAB, hidden_size=64, ffn_size=160,
        num_heads=8, num_kv_heads=4, head_dim=16, layers=(LayerSpec(RopeSpec()),) * 2,
        max_positions=128, qk_norm=True), **changes)


def export(folder: Path, seed: int, **changes: Any) -> Path:
    """A random model as a Hugging Face folder."""
    made = spec(**changes)
    tensors = {name: p.detach() for name, p in
               init_weights(Decoder(made), seed, std=0.1).named_parameters()}
    export_hf(State(made, tensors), folder)
    save_byte_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and other weights for it."""
    base = tmp_path_factory.mktemp("models")
    return export(base / "model", 0), export(base / "other", 1)


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same in a file's own blocks of 8 bits."""
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("gguf")
        torch.manual_seed(seed)
        made = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            initializer_range=0.1))
        gguf_files.write(made, folder / "model.gguf", quant="Q8_0")
        save_byte_tokenizer(folder, VOCAB)
        found.append(folder)
    return found[0], found[1]


@dataclass(frozen=True)
class Setting:
    """One way to serve a model."""

    degree: int
    storage: Storage = "auto"
    kv: str = "float32"
    page_size: int = 16
    chunk: int = 64  # tokens of a step
    kv_tokens: int = 640
    context: int = CONTEXT
    exact: bool = True

    @property
    def kv_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.kv)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(self.kv_tokens, self.page_size, scheduler=SchedulerConfig(
            prefill_tokens=self.chunk, mixed_tokens=self.chunk))


def one_rank(path: Path, setting: Setting) -> Engine:
    source = open_model(path)
    model = load_decoder(source, storage=setting.storage, kv_dtype=setting.kv_dtype,
                         max_positions=CONTEXT)
    return Engine(model, open_tokenizer(source), setting.config)


def rank(path: Path, setting: Setting, script: str, *args: Any) -> Any:
    """Rank 0 of a pool runs a function of this module on an engine; the others follow."""
    me = ranks_of(setting.degree, dist.get_rank())
    source = open_model(path)
    model, shards = load_part(source, me, storage=setting.storage, exact=setting.exact,
                              kv_dtype=setting.kv_dtype, max_positions=setting.context)
    if dist.get_rank():
        follow_steps(Executor.of(model, setting.config), me, shards)
        return None
    executor = TensorExecutor(model, setting.config, me, shards)
    engine = Engine(model, open_tokenizer(source), setting.config, executor)
    try:
        return globals()[script](engine, *args)
    finally:
        engine.close()


def drain(engine: Engine) -> list[Any]:
    """All deltas to idle, with their vectors, step by step."""
    found: list[Any] = []
    while engine.busy:
        found += [seen(delta) for delta in engine.step()]
    engine.check_integrity()
    return found


def seen(delta: Delta) -> tuple[Delta, bytes]:
    vector = delta.embedding
    return (dataclasses.replace(delta, time=0.0, embedding=None),
            b"" if vector is None else vector.tobytes())


def life(engine: Engine, other: Path) -> list[Any]:
    """All that an engine does for its users; everything it said."""
    said = []
    engine.submit(PROMPT, dataclasses.replace(GREEDY, prompt_logprobs=VOCAB))
    said += drain(engine)
    # In company, of every kind.
    engine.submit(PROMPT[:9], SamplingParams(max_tokens=7, seed=5, top_p=0.9, n=3, logprobs=2))
    engine.submit([9], SamplingParams(max_tokens=20, seed=1, stop=("e", "Z"), min_tokens=2))
    engine.submit(PROMPT[5:30], SamplingParams(
        max_tokens=9, seed=2, grammar=GrammarSpec("regex", "[a-c]{2,5}"), logprobs=1))
    engine.submit(PROMPT[::-1], SamplingParams(
        max_tokens=5, temperature=0, repetition_penalty=1.3, logit_bias={40: 2.0}))
    engine.submit_embedding(PROMPT[3:25])
    engine.submit_embedding(PROMPT[:33], pooling="last", normalize=False)
    said += drain(engine)
    # A prefix that ends inside a page, which is copied.
    engine.submit(PROMPT[:21] + [3, 4, 5], GREEDY)
    prefix = drain(engine)
    assert prefix[0][0].cached_tokens == 21
    # One of two is ended on its way.
    engine.submit(PROMPT[:30] + [8], GREEDY)
    number = engine.submit(PROMPT, GREEDY)
    said += prefix + [seen(d) for d in engine.step()]
    engine.abort(number)
    said += drain(engine)
    # Other weights while somebody is answered; then once more from an empty cache.
    for in_flight in ("restart", "continue"):
        engine.submit(PROMPT, GREEDY)
        said += [seen(d) for _ in range(3) for d in engine.step()]
        engine.update_weights(open_model(other), storage="fp32", in_flight=in_flight)
        said += drain(engine)
    engine.flush_cache()
    engine.submit(PROMPT, GREEDY)
    return said + drain(engine)


def crowded(engine: Engine) -> list[Any]:
    """Long answers where short ones were expected, and more than the pages hold at a time."""
    said = []
    for ends in (tuple(range(VOCAB)), ()):
        for i in range(6):
            engine.submit(PROMPT[i:i + 20], dataclasses.replace(GREEDY, max_tokens=30,
                                                                stop_token_ids=ends))
        said += drain(engine)
    assert engine.stats().preemptions > 0
    return said


@pytest.mark.parametrize("setting", [
    Setting(2, chunk=5), Setting(3, chunk=7, page_size=3), Setting(2, "bf16", kv="float16"),
    Setting(4, kv="bfloat16", page_size=1), Setting(3, "int8", chunk=7),
    Setting(8, "int4", page_size=64)],
    ids=lambda s: f"tp{s.degree}-{s.storage}-{s.kv}-pages{s.page_size}-chunks{s.chunk}")
def test_an_engine_over_ranks_says_what_one_rank_says(
        ranks: RankPool, folders: tuple[Path, Path], setting: Setting) -> None:
    expected = life(one_rank(folders[0], setting), folders[1])
    assert ranks.run(setting.degree, rank, folders[0], setting, "life", folders[1])[0] == expected


@pytest.mark.parametrize("storage", ["auto", "int8", "int4"])
def test_a_files_own_blocks(ranks: RankPool, ggufs: tuple[Path, Path], storage: Storage) -> None:
    """Also where the ranks' columns begin inside one."""
    setting = Setting(2, storage)
    expected = life(one_rank(ggufs[0], setting), ggufs[1])
    assert ranks.run(2, rank, ggufs[0], setting, "life", ggufs[1])[0] == expected


def test_preempted_and_computed_again(ranks: RankPool, folders: tuple[Path, Path]) -> None:
    setting = Setting(2, kv_tokens=64, page_size=4)
    expected = crowded(one_rank(folders[0], setting))
    assert ranks.run(2, rank, folders[0], setting, "crowded")[0] == expected


def scores(engine: Engine, texts: list[list[int]]) -> list[tuple[int, torch.Tensor]]:
    """(which text, its log-probabilities): in company, and the beginnings token by token."""
    executor, begins = engine.executor, [text[:8] for text in texts[:3]]
    return [*enumerate(score_with_cache(executor, texts, 33)),
            *enumerate(score_with_cache(executor, begins, 1))]


def test_the_real_models_scores(ranks: RankPool, smollm2: Path) -> None:
    """Through the cache of three ranks the bits of one pass of one rank without a cache."""
    texts = _real_text(smollm2, 80)[:3]
    whole = score_without_cache(load_decoder(open_model(smollm2), max_positions=512), texts)
    setting = Setting(3, context=512)
    for text, found in ranks.run(3, rank, smollm2, setting, "scores", texts)[0]:
        assert torch.equal(found, whole[text][:len(found)])


@pytest.mark.parametrize("exact", [True, False])
def test_many_texts_at_a_time(ranks: RankPool, folders: tuple[Path, Path], exact: bool) -> None:
    """More than one message holds; on the fast path as good as equal."""
    texts = [PROMPT[i:] + PROMPT[:i] for i in range(25)]
    whole = score_without_cache(load_decoder(open_model(folders[0])), texts)
    setting = Setting(2, kv_tokens=2048, exact=exact)
    for text, found in ranks.run(2, rank, folders[0], setting, "scores", texts)[0]:
        difference = (found - whole[text][:len(found)]).abs().max()
        assert difference == 0 if exact else difference < 1e-4


def few_tokens(engine: Engine, text: str) -> list[Any]:
    engine.submit(engine.tokenizer.encode(text),
                  dataclasses.replace(GREEDY, max_tokens=3, logprobs=20, prompt_logprobs=2))
    return drain(engine)


@pytest.mark.parametrize("degree", [2, 3])
def test_the_real_model(ranks: RankPool, smollm2: Path, degree: int) -> None:
    """9 query and 3 KV heads: two ranks have 6 and 3 of them."""
    setting = Setting(degree)
    text = "The river that crosses the old town was low that summer"
    expected = few_tokens(one_rank(smollm2, setting), text)
    assert ranks.run(degree, rank, smollm2, setting, "few_tokens", text)[0] == expected


def columns_held(path: Path, setting: Setting) -> list[tuple[str, torch.Tensor, str]]:
    model, shards = load_part(open_model(path), ranks_of(2, dist.get_rank()),
                              storage=setting.storage)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.endswith(("out", "down")):
            (box,) = shards[f"{name}.weight"].boxes
            found.append((name, box.slices, module.weight.dequantize(), module.weight.storage))
    return found


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_columns_of_a_quantised_matrix_are_its_numbers(ranks: RankPool,
                                                       folders: tuple[Path, Path],
                                                       storage: Storage) -> None:
    """Of `down` two ranks have 80 of 160 columns each: the third group of 32 is on both."""
    whole = load_decoder(open_model(folders[0]), storage=storage)
    held = ranks.run(2, columns_held, folders[0], Setting(2, storage))
    for name, place, values, kind in [entry for found in held for entry in found]:
        linear = whole.get_submodule(name)
        assert torch.equal(values, linear.weight.dequantize()[place])
        assert kind == ("fp32" if name.endswith("down") else storage)


def bytes_read(path: Path, degree: int) -> tuple[int, int]:
    """What a rank reads of a checkpoint, and what it has of the model."""
    source, read = open_model(path), []
    plain = type(source).read

    def counted(source: ModelSource, *args: Any) -> torch.Tensor:
        weight = plain(source, *args)
        read.append(weight.nbytes)
        return weight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "read", counted)
        _, shards = load_part(source, ranks_of(degree, dist.get_rank()))
    return sum(read), 4 * sum(math.prod(shard.local_shape) for shard in shards.values())


def test_a_rank_reads_its_own_bytes(ranks: RankPool, folders: tuple[Path, Path]) -> None:
    source = open_model(folders[0])
    whole = sum(source.info(name).nbytes for name in source.names())
    for read, held in ranks.run(4, bytes_read, folders[0], 4):
        assert read == held < whole / 3


def interrupted(engine: Engine) -> tuple[str, str]:
    """What the engine says to weights without a path, and after a step that did not come to its
    end here."""
    with pytest.raises(ValueError) as refused:
        engine.update_weights({"norm.weight": torch.zeros(64)})
    gathered = tensor._gathered

    def interrupt(*args: Any) -> torch.Tensor:
        tensor._gathered = gathered
        gathered(*args)
        raise KeyboardInterrupt

    tensor._gathered = interrupt
    engine.submit([3, 4, 5], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.submit([3, 4, 5], GREEDY)
    with pytest.raises(RuntimeError) as error:
        drain(engine)
    # The other rank is in fact well; so that it can be told to end:
    engine.executor.together = True  # type: ignore[attr-defined]
    return str(refused.value), str(error.value)


def test_ranks_that_are_out_of_step_do_nothing_more(ranks: RankPool, folders: tuple[Path, Path]
                                                    ) -> None:
    refused, error = ranks.run(2, rank, folders[0], Setting(2), "interrupted")[0]
    assert "from a folder or GGUF file only" in refused
    assert "out of step" in error


def another_shape(engine: Engine, other: Path) -> str:
    before = drain(engine)
    with pytest.raises(ValueError) as error:
        engine.update_weights(open_model(other))
    engine.submit([3, 4, 5], GREEDY)
    assert not before and drain(engine)
    return str(error.value)


def test_weights_with_a_head_of_their_own_are_not_those_of_a_tied_model(
        ranks: RankPool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    tied = export(tmp_path / "tied", 0, tied_head=True)
    assert "head.weight" in ranks.run(2, rank, tied, Setting(2), "another_shape", folders[0])[0]


def waits(path: Path) -> list[Any] | None:
    """Longer than torch's own timeout, which new process groups have."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(milliseconds=200)
    try:
        return rank(path, Setting(2), "late")  # type: ignore[no-any-return]
    finally:
        distributed_c10d.default_pg_timeout = timedelta(minutes=30)


def late(engine: Engine) -> list[Any]:
    time.sleep(0.6)
    engine.submit([3, 4, 5], GREEDY)
    return drain(engine)


def test_an_idle_engine_waits_as_long_as_it_takes(ranks: RankPool, folders: tuple[Path, Path]
                                                  ) -> None:
    assert ranks.run(2, waits, folders[0])[0]
