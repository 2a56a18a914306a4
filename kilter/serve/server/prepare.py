"""From a request to jobs for the engine: what takes time, so it runs in a prepare thread."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.server.context import Context
from kilter.serve.server.errors import ApiError
from kilter.serve.server.generation import Job
from kilter.serve.server.protocol import GenerationRequest, Strict, StructuredOutputs


def check_common(context: Context, request: GenerationRequest) -> None:
    """Raises ApiError for a model that is not served, or a priority that nobody would look at."""
    context.check_model(request.model)
    if request.priority and not context.priorities:
        raise ApiError(400, "This server does not order requests by priority; start it with "
                            "--policy priority, or leave it out.", param="priority")


def make_job(context: Context, request: GenerationRequest, prompt: list[int], param: str, *,
             max_tokens: int | None, grammar: GrammarSpec | None,
             grammar_from: str = "structured_outputs", text: str | None = None,
             **settings: Any) -> Job:
    """A job whose prompt, settings and grammar the engine will take.

    Args:
        param: the request's field that the prompt came from; grammar_from: the grammar's.
        max_tokens: None: as many as there is room for.
        settings: further fields of SamplingParams.

    Raises:
        ApiError: 400 for what it would not.
    """
    check_prompt(context, prompt, max_tokens, param)
    with refused():
        params = sampling_params(
            request, max_tokens=context.max_context - len(prompt) if max_tokens is None
            else max_tokens, grammar=grammar, **settings)
        params.check(context.vocab_size)
    if grammar is not None:
        with refused(grammar_from):
            context.compile_grammar(params)
    return Job(prompt, params, text, request.priority or 0, request.cache_salt)


def render_chat(context: Context, messages: Sequence[Strict], tools: Sequence[Mapping[str, Any]],
                add_generation_prompt: bool, variables: Mapping[str, Any] | None) -> str:
    """A chat as its template writes it, with all that a text begins with.

    Raises:
        ApiError: where the template does not render it, or a variable has the name of an argument.
    """
    taken = {"messages", "tools", "add_generation_prompt"} & set(variables or ())
    if taken:
        raise ApiError(400, f"chat_template_kwargs sets {', '.join(sorted(taken))}, which the "
                            f"request has fields for.", param="chat_template_kwargs")
    with refused("messages"):
        template = context.tokenizer.chat_template(tools or None)
        given = [message.model_dump(exclude_none=True) for message in messages]
        if "developer" not in template.source:  # older templates know the role by its older name
            for message in given:
                if message["role"] == "developer":
                    message["role"] = "system"
        return template.render(given, tools or None, add_generation_prompt, **(variables or {}))


def encode_text(context: Context, text: str, param: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ApiError: for what is no text, or far too long: megabytes would take seconds to encode, and
            all that has to be known of them is that they do not fit.
    """
    with refused(param):
        # So many more tokens in a part cannot become few by what follows it.
        room = max(context.max_context, 4096)
        if len(text) > 16 * room:
            tokens = len(context.tokenizer.encode(text[:16 * room]))
            if tokens > 2 * room:
                raise _too_long(context, f"more than {tokens // 2}", param)
        return context.tokenizer.encode(text, add_special_tokens)


def check_prompt(context: Context, prompt: list[int], max_tokens: int | None, param: str) -> None:
    """Raises ApiError for a prompt that is empty, too long or not of this vocabulary."""
    if not prompt:
        raise ApiError(400, "The prompt has no tokens; give at least one.", param=param)
    check_ids(context, prompt, param)
    room = context.max_context - len(prompt)
    if room < (0 if max_tokens == 0 else 1):
        raise _too_long(context, str(len(prompt)), param)


def _too_long(context: Context, tokens: str, param: str) -> ApiError:
    return ApiError(
        400, f"This model's maximum context length is {context.max_context} tokens, but the prompt "
             f"has {tokens}, which leaves no room for an answer; shorten it.",
        param=param, code="context_length_exceeded")


def check_ids(context: Context, ids: Sequence[int], param: str) -> None:
    """Raises ApiError for a token id outside the model's vocabulary."""
    highest = max(ids, default=0)
    if highest >= context.vocab_size:
        raise ApiError(400, f"{param} holds token id {highest}, outside the vocabulary of "
                            f"{context.vocab_size} tokens.", param=param)


def sampling_params(request: GenerationRequest, **settings: Any) -> SamplingParams:
    """The request's settings; null is a setting's default.

    Raises:
        ValueError: for what does not go together.
    """
    given = {
        "temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p,
        "min_p": request.min_p, "seed": request.seed, "n": request.n, "stop": request.stop,
        "stop_token_ids": request.stop_token_ids, "ignore_eos": request.ignore_eos,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty, "logit_bias": request.logit_bias,
        "include_stop": request.include_stop_str_in_output, "min_tokens": request.min_tokens,
        "skip_special_tokens": request.skip_special_tokens,
        "prompt_logprobs": request.prompt_logprobs, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("top_p") == 0:  # the smallest set of tokens there is: the likeliest one
        given.update(top_p=1.0, temperature=0.0)
    if "seed" in given:
        given["seed"] %= 2**64
    return SamplingParams(**given)


def structured_grammar(outputs: StructuredOutputs) -> GrammarSpec:
    """Raises ApiError for one that cannot be written down."""
    with refused("structured_outputs"):
        if outputs.json_schema is not None:
            return GrammarSpec.json_schema(outputs.json_schema)
        if outputs.regex is not None:
            return GrammarSpec("regex", outputs.regex)
        if outputs.grammar is not None:
            return GrammarSpec("ebnf", outputs.grammar)
        assert outputs.choice is not None
        texts = [json.dumps(text, ensure_ascii=False) for text in outputs.choice]
        return GrammarSpec("ebnf", f"start: {' | '.join(texts)}\n")


@contextlib.contextmanager
def refused(param: str | None = None) -> Iterator[None]:
    """Makes a ValueError inside a 400 that blames ``param``."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from None
