"""The offline API: a model by name, prompts in, answers out.

    llm = kilter.LLM("smollm2-135m")
    answers = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
    print(answers[0].text)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.report.progress import progress as progress_bar
from kilter.serve.beam import BeamSearch
from kilter.serve.engine import Delta, Engine, Pooling
from kilter.serve.load import load_engine
from kilter.serve.params import BeamParams, SamplingParams
from kilter.serve.sampler import Choice, best_answers
from kilter.serve.scheduler import Policy
from kilter.weights.bridge import ModelSource
from kilter.weights.load import Storage
from kilter.weights.pull import resolve

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """One answer. `token_ids` holds an end token that ended it, `text` does not."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    choices: list[Choice] = field(default_factory=list)  # with log-probabilities where asked for
    error: str | None = None
    score: float | None = None  # beam search: its length-normalised log-probability

    @property
    def logprobs(self) -> list[float]:
        """The model's log-probability of each token; empty if they were not asked for."""
        return [c.logprob for c in self.choices if c.logprob is not None]


@dataclass
class Answer:
    """What a prompt brought: ``n`` completions, best first where ``best_of`` chose them."""

    prompt_ids: list[int]
    completions: list[Completion]
    prompt_choices: list[Choice] | None = None  # of the prompt's tokens after the first
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[float]:
        return self.completions[0].logprobs


class LLM:
    """A loaded model and the engine that runs it.

    Args:
        model: a pulled model's name, a folder or a .gguf file.
        weights: how large matrices are held; ``auto`` keeps exactly what the file has.
        exact: row-invariant arithmetic, the default; False takes torch's own kernels.
        kv_dtype: format of the KV cache.
        products: ``"bf16"`` rounds the factors of every matrix product to bfloat16
            (docs/engine.md).
        context: longest prompt plus answer, tokens; default the model's, at most 8192.
        kv_tokens: tokens the KV cache holds over all requests; default four contexts.
        page_size: tokens per page, 1 to 64.
        max_running: requests that run together.
        policy: order of waiting requests: fcfs, prefix or priority.
        tp: processes of this machine that the model is spread over (tensor parallelism), this one
            and others that it starts; `close`, or the end of this one, ends them. On the exact
            path answers have the same bits.
        threads: CPU threads, of each process if there are several; default all cores.

    Raises:
        ValueError: for a model that cannot be used or settings that do not go together.
        RanksLost: if one of several processes cannot start; and by all that computes, if one ends
            or hangs. Close the `LLM` then, and make a new one.
    """

    def __init__(self, model: str | Path, *, weights: Storage = "auto", device: str = "cpu",
                 exact: bool = True, kv_dtype: torch.dtype = torch.float32,
                 products: str = "fp32", context: int | None = None, kv_tokens: int | None = None,
                 page_size: int = 16, max_running: int = 64, policy: Policy = "fcfs", tp: int = 1,
                 threads: int | None = None) -> None:
        self.engine: Engine = load_engine(
            resolve(model), storage=weights, device=device, exact=exact, kv_dtype=kv_dtype,
            products=products, context=context, kv_tokens=kv_tokens, page_size=page_size,
            max_running=max_running, policy=policy, tensor_parallel=tp, threads=threads)
        self.tokenizer = self.engine.tokenizer
        self._turn = threading.RLock()  # an engine is for one thread: calls take turns

    def close(self) -> None:
        """Ends the other processes of a model that is spread over several; the `LLM` can do
        nothing afterwards. Alone it has nothing to end."""
        with self._turn:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 progress: Callable[[int, int], None] | bool | None = None) -> list[Answer]:
        """Answers to all prompts, in their order.

        Args:
            prompts: texts (special tokens are added as the tokenizer does) or token ids.
            params: for all prompts, or one for each.
            progress: called with (answers finished, answers in all); True shows a bar on stderr,
                None does so on a terminal where there are several answers.

        Raises:
            ValueError: for a prompt or settings that cannot be served; nothing was computed.
        """
        ids = [self._ids(prompt) for prompt in _listed(prompts)]
        settings = self._settings(params, len(ids))
        answers = [Answer(prompt, [Completion() for _ in range(s.best_of or s.n)])
                   for prompt, s in zip(ids, settings, strict=True)]
        total = sum(len(answer.completions) for answer in answers)
        done = 0
        requests: dict[int, Answer] = {}
        with self._turn, contextlib.ExitStack() as stack:
            stack.callback(self._forget, requests)  # also after a refusal or an interrupt
            update = progress
            if progress is True or (progress is None and total > 1):
                update = stack.enter_context(progress_bar("Generating"))
            for i, (answer, setting) in enumerate(zip(answers, settings, strict=True)):
                try:
                    requests[self.engine.submit(answer.prompt_ids, setting)] = answer
                except ValueError as error:
                    raise ValueError(f"Prompt {i} cannot be served. {error}") from error
            while self.engine.busy:
                for delta in self.engine.step():
                    if delta.request in requests:
                        _record(requests[delta.request], delta)
                        done += delta.finish_reason is not None
                if callable(update):
                    update(done, total)
        for answer, setting in zip(answers, settings, strict=True):
            if (setting.best_of or setting.n) > setting.n:
                _keep_best(answer, setting)
        return answers

    def chat(self, chats: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
             params: SamplingParams | Sequence[SamplingParams] | None = None,
             **template: Any) -> list[Answer]:
        """Answers to conversations (lists of ``{"role": …, "content": …}``; one or several).
        Further arguments go to the chat template."""
        several: Any = [chats] if chats and isinstance(chats[0], Mapping) else chats
        return self.generate([self.tokenizer.encode_chat(chat, **template) for chat in several],
                             params)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Log-probability of every token of each text after its first."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        return [[c.logprob for c in answer.prompt_choices or () if c.logprob is not None]
                for answer in self.generate(prompts, params)]

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "mean",
              normalize: bool = True) -> np.ndarray:
        """Vectors of all prompts, float32 [prompts, D], in their order.

        Args:
            pooling: ``mean`` of the hidden states (after the last norm) of all tokens, or that of
                the ``last``.
            normalize: whether each is scaled to length 1.

        Raises:
            ValueError: for a prompt that cannot be served; nothing was computed.
        """
        ids = [self._ids(prompt) for prompt in _listed(prompts)]
        vectors = np.empty((len(ids), self.engine.model.spec.hidden_size), dtype=np.float32)
        rows: dict[int, int] = {}
        with self._turn, contextlib.ExitStack() as stack:
            stack.callback(self._forget, rows)
            for i, prompt in enumerate(ids):
                try:
                    number = self.engine.submit_embedding(prompt, pooling=pooling,
                                                          normalize=normalize)
                except ValueError as error:
                    raise ValueError(f"Prompt {i} cannot be served. {error}") from error
                rows[number] = i
            while self.engine.busy:
                for delta in self.engine.step():
                    if delta.request in rows:
                        vectors[rows[delta.request]] = delta.embedding
        return vectors

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamParams) -> list[Answer]:
        """The ``width`` best continuations of each prompt. A beam is a request of one token whose
        prefix is in the cache: forks share pages and copy only the last, partly filled one."""
        if not isinstance(params, BeamParams):
            raise ValueError(f"Beam search takes BeamParams, not a {type(params).__name__}.")
        return [self._beams(self._ids(prompt), params) for prompt in _listed(prompts)]

    def update_weights(self, weights: ModelSource | Mapping[str, Tensor],
                       storage: Storage = "auto") -> int:
        """Takes new weights of the same model (see `Engine.update_weights`)."""
        with self._turn:
            return self.engine.update_weights(weights, storage=storage)

    def _beams(self, prompt: list[int], params: BeamParams) -> Answer:
        ends = self.engine.eos_token_ids
        room = self.engine.max_context - len(prompt)
        if room < params.max_tokens:  # as `generate` does; without any room it says so
            params = replace(params, max_tokens=max(room, 1))
        search = BeamSearch(params, ends)
        vocab = self.engine.model.spec.vocab_size
        width = min(max(2, 1 + len(search.ends)) * params.width, vocab)
        probe = SamplingParams(max_tokens=1, temperature=0, logprobs=width, ignore_eos=True)
        while not search.done:
            texts: list[Prompt] = [prompt + list(beam.tokens) for beam in search.running]
            rows_BV = np.full((len(texts), vocab), -np.inf, dtype=np.float32)
            answers = self.generate(texts, probe, progress=False)
            for row_V, answer in zip(rows_BV, answers, strict=True):
                if answer.completions[0].error is not None:
                    raise ValueError(f"The beams cannot go on. {answer.completions[0].error}")
                # No continuation past a beam's own `width` likeliest can be among the best.
                for token, logprob in answer.completions[0].choices[0].top:
                    row_V[token] = logprob
            search.advance(rows_BV)
        completions = []
        for best in search.finished:
            tokens = list(best.tokens)
            ended = bool(tokens) and tokens[-1] in search.ends
            completions.append(Completion(
                tokens, self.tokenizer.decode(tokens[:-1] if ended else tokens),
                "stop" if ended else "length", score=float(best.score)))
        return Answer(prompt, completions)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"A prompt must be a text or a sequence of token ids, but one is a "
                             f"{type(prompt).__name__} ({error}).") from error

    def _settings(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
                  ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(
                isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"Sampling settings must be a SamplingParams or a list of them, but "
                             f"are {params!r}.")
        if len(params) != count:
            raise ValueError(f"There are {count} prompts but {len(params)} sampling settings; give "
                             f"one for all or one for each.")
        return list(params)

    def _forget(self, requests: Collection[int]) -> None:
        """Ends what is left of these requests and drops their news."""
        for number in requests:
            self.engine.abort(number)
        self.engine.drop_news(requests)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValueError(f"Prompts must be texts or sequences of token ids, not a "
                         f"{type(prompts).__name__}.")
    if len(prompts) and isinstance(prompts[0], Integral):  # numpy's too
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _record(answer: Answer, delta: Delta) -> None:
    completion = answer.completions[delta.index]
    completion.token_ids += [choice.token_id for choice in delta.choices]
    completion.choices += delta.choices
    completion.text += delta.text
    completion.error = delta.error or completion.error
    completion.finish_reason = delta.finish_reason or completion.finish_reason
    if delta.prompt is not None:
        answer.prompt_choices = list(delta.prompt)
    if delta.index == 0:
        answer.cached_tokens = delta.cached_tokens


def _keep_best(answer: Answer, params: SamplingParams) -> None:
    best = best_answers([sum(c.logprobs) for c in answer.completions],
                        [len(c.token_ids) for c in answer.completions], params.n)
    answer.completions = [answer.completions[i] for i in best]
    if params.logprobs is None:  # the engine computed them to choose by
        for completion in answer.completions:
            completion.choices = [Choice(token) for token in completion.token_ids]
