"""A tiny random model with an engine, and a plain engine to compare it with.

`Reference` answers one request alone: one forward over all its tokens without a cache per version
of the weights, the sampler on each row, and text and stops by plain string search.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.serve.engine import Delta, Engine, EngineConfig
from kilter.serve.exactness import random_model
from kilter.serve.grammar import GrammarCompiler
from kilter.serve.params import SamplingParams
from kilter.serve.sampler import Choice, SamplingError, SamplingState, score_tokens
from kilter.serve.scheduler import SchedulerConfig
from kilter.tokens import Detokenizer, Tokenizer

PAD, EOS, EOT = 0, 1, 2
# Letters, pairs of them, the bytes of "é" and "€" and a lone lead byte, as a byte-level BPE
# writes them.
PIECES = ["<pad>", "<eos>", "<eot>", "a", "b", "c", "d", "ab", "ba", "cab", "Ġ", "bb",
          "Ã", "©", "â", "Ĥ", "¬", "x", "y", "z", "-", ".", "1", "2"]
VOCAB = len(PIECES)
CONTEXT = 48


@cache
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>", "<eot>"])
    return Tokenizer(backend, {"eos_token": "<eos>", "pad_token": "<pad>"})


def spec(vocab: int = VOCAB, positions: int = CONTEXT) -> ModelSpec:
    rope = RopeSpec()
    return ModelSpec(
        architecture="test", vocab_size=vocab, hidden_size=32, ffn_size=48, num_heads=2,
        num_kv_heads=1, head_dim=16, layers=(LayerSpec(rope, window=9), LayerSpec(rope)),
        max_positions=positions, qk_norm=True, tied_head=False)


@cache
def frozen_model(version: int = 0, vocab: int = VOCAB, positions: int = CONTEXT) -> Decoder:
    """A model of these weights; nobody may change it."""
    return random_model(spec(vocab, positions), "fp32", seed=version)


def weights(version: int) -> dict[str, Tensor]:
    """The same weights by name."""
    return {name: p.detach()
            for name, p in init_weights(Decoder(spec()), version, std=0.05).named_parameters()}


def make_engine(kv_tokens: int = 256, page_size: int = 16, *, eos: tuple[int, ...] = (EOT,),
                context: int = CONTEXT, model: Decoder | None = None,
                **scheduler: object) -> Engine:
    return Engine(
        model or random_model(spec(positions=context), "fp32"), tokenizer(),
        EngineConfig(kv_tokens, page_size, eos_token_ids=eos,
                     scheduler=SchedulerConfig(**scheduler)))  # type: ignore[arg-type]


@dataclass
class Result:
    """What came of one answer."""

    choices: list[Choice] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights, per token
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    prompt: tuple[Choice, ...] | None = None
    prompt_version: int = 0
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return [choice.token_id for choice in self.choices]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the end"
        self.choices += delta.choices
        self.versions += [delta.weights_version] * len(delta.choices)
        self.pieces.append(delta.text)
        self.finish_reason, self.error = delta.finish_reason, delta.error
        self.cached = delta.cached_tokens
        if delta.prompt is not None:
            assert self.prompt is None
            self.prompt, self.prompt_version = delta.prompt, delta.weights_version


def drain(engine: Engine, steps: int = 5000) -> dict[tuple[int, int], Result]:
    """Runs to idle: results by (request, index)."""
    results: dict[tuple[int, int], Result] = {}
    for _ in range(steps):
        if not engine.busy:
            engine.check_integrity()
            assert engine.tree.pages.num_held == 0, "pages leaked"
            return results
        for delta in engine.step():
            results.setdefault((delta.request, delta.index), Result()).take(delta)
    raise AssertionError(f"still busy after {steps} steps")


def serve(engine: Engine, prompt: Sequence[int], params: SamplingParams, *,
          salt: Hashable = None) -> Result:
    """The first answer to one request, run to its end."""
    number = engine.submit(prompt, params, salt=salt)
    return drain(engine)[number, 0]


@torch.inference_mode()
def rows_of(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits after each token, without a cache."""
    return model(Batch.of([list(tokens)]))


def check_result(result: Result, prompt: list[int], params: SamplingParams, index: int = 0, *,
                 context: int = CONTEXT, eos: Sequence[int] = (EOS, EOT),
                 compiler: GrammarCompiler | None = None) -> None:
    """Asserts that an answer is, token by token, what the plain engine gives; where the weights
    changed on the way, that each token is the right one for the weights that chose it."""
    end = min(params.max_tokens, context - len(prompt))
    grammar = (compiler.compile(params.grammar).start()
               if params.grammar is not None and compiler is not None else None)
    state = SamplingState(params, prompt, end_ids=eos, index=index, grammar=grammar)
    everything = prompt + result.tokens
    rows = {version: rows_of(frozen_model(version, positions=context), everything)
            for version in {*result.versions, result.prompt_version}}
    text = _Text(prompt, params)
    reason: str | None = "length" if end == 0 else None
    for i, choice in enumerate(result.choices):
        assert reason is None, "the answer went on after its end"
        model_rows = rows[result.versions[i]]
        row_V = model_rows[len(prompt) + i - 1]
        token = state.choose(row_V.numpy())
        assert choice.token_id == token
        assert choice == expected_choice(row_V, token, params.logprobs)
        state.accept(token)
        ended = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        if not ended:
            text.push(token, checked=i + 1 > params.min_tokens)
        if ended or text.stopped or (grammar is not None and grammar.is_finished):
            reason = "stop"
        elif i + 1 == end:
            reason = "length"
        if reason is not None:
            text.finish()
            reason = "stop" if text.stopped else reason
    if reason is None:  # no token may come
        assert result.finish_reason == "error"
        row_V = rows_of(frozen_model(result.prompt_version), everything)[-1]
        try:
            state.choose(row_V.numpy())
        except SamplingError:
            return
        raise AssertionError(f"it ended with {result.error} but could have gone on")
    assert result.finish_reason == reason
    assert result.text == text.final
    if params.prompt_logprobs is None or index > 0:
        assert result.prompt is None
    else:
        expected = score_tokens(rows[result.prompt_version][:len(prompt) - 1], prompt[1:],
                                [params.prompt_logprobs] * (len(prompt) - 1),
                                frozen_model().ops) if len(prompt) > 1 else []
        assert result.prompt == tuple(expected)


def expected_choice(row_V: Tensor, token: int, logprobs: int | None) -> Choice:
    if logprobs is None:
        return Choice(token)
    ops = frozen_model().ops
    own = float(ops.token_logprobs(row_V[None], torch.tensor([token]))[0])
    all_V = ops.log_softmax(row_V[None])[0].tolist()
    assert all_V[token] == own
    best = sorted(range(len(all_V)), key=lambda i: (-float(row_V[i]), i))[:logprobs]
    return Choice(token, own, tuple((i, all_V[i]) for i in best))


class _Text:
    """Text and stops by plain search."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer(),
                                        skip_special_tokens=params.skip_special_tokens,
                                        prompt_tail=prompt)
        self._params = params
        self.final = ""
        self.stopped = False

    def push(self, token: int, checked: bool) -> None:
        self._look(self._detokenizer.push(token), checked)

    def finish(self) -> None:
        if not self.stopped:  # a character that the prompt began is no answer without a token
            self._look(self._detokenizer.finish(), checked=True)

    def _look(self, piece: str, checked: bool) -> None:
        for character in piece:
            self.final += character
            for stop in sorted(self._params.stop, key=len, reverse=True):
                if checked and self.final.endswith(stop):
                    self.stopped = True
                    if not self._params.include_stop:
                        self.final = self.final.removesuffix(stop)
                    return


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)
