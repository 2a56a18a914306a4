"""From a model's path to an engine that answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from kilter.ops.cpu import library
from kilter.serve.engine import Engine, EngineConfig
from kilter.serve.scheduler import Policy, SchedulerConfig
from kilter.weights.bridge import open_model
from kilter.weights.load import Storage, load_decoder
from kilter.weights.tokenizer import open_tokenizer

_DEFAULT_CONTEXT = 8192  # tokens; longer contexts are asked for, since their cache costs memory


def load_engine(path: Path, *, storage: Storage = "auto", device: str = "cpu", exact: bool = True,
                kv_dtype: torch.dtype = torch.float32, products: str = "fp32",
                context: int | None = None,
                kv_tokens: int | None = None, page_size: int = 16, max_running: int = 64,
                policy: Policy = "fcfs", tensor_parallel: int = 1, threads: int | None = None,
                step_timeout: float | None = None,
                progress: Callable[[int, int], None] | None = None) -> Engine:
    """Opens, checks and loads a model and its tokenizer.

    Args:
        path: a folder or a .gguf file (see `kilter.weights.pull.resolve` for names).
        products: what factors of matrix products are rounded to, as `Decoder` has it.
        context: longest prompt plus answer, tokens; default the model's, at most 8192.
        kv_tokens: tokens the KV cache holds over all requests; default four contexts, fewer if
            fewer requests may run.
        tensor_parallel: processes of this machine that the model is spread over, this one and
            others that it starts; `Engine.close` ends them.
        threads: CPU threads, of each of them if there are several; default an equal share of the
            cores. It counts for all that this process computes.
        step_timeout: seconds after which a step over several processes is taken to hang.
        progress: called with (tensors done, tensors in all).

    Raises:
        ValueError: as `open_model` and `load_decoder` do, for a context the model was not
            trained for, or if it cannot be spread over so many processes.
        RanksLost: if one of several processes cannot start.
    """
    if tensor_parallel < 1:
        raise ValueError(f"The model was to be spread over {tensor_parallel} processes; it must be "
                         f"at least 1.")
    if threads is not None:
        library.set_num_threads(threads)
        torch.set_num_threads(threads)
    source = open_model(path)
    spec = source.spec
    if kv_tokens is not None and kv_tokens < 2:
        raise ValueError(f"kv_tokens is {kv_tokens}, but a cache must hold at least 2 tokens.")
    if context is None:
        context = min(spec.max_positions, _DEFAULT_CONTEXT, kv_tokens or _DEFAULT_CONTEXT)
    elif kv_tokens is not None and kv_tokens < context:
        raise ValueError(f"A context of {context} tokens was asked for, but a cache of "
                         f"{kv_tokens}, which would never hold one; give the cache at least as "
                         f"many.")
    if not 2 <= context <= spec.max_positions:
        raise ValueError(f"A context of {context} tokens was asked for, but it must be from 2 to "
                         f"this model's {spec.max_positions}.")
    config = EngineConfig(
        kv_tokens=kv_tokens or context * min(max_running, 4), page_size=page_size,
        max_context=context, eos_token_ids=source.eos_token_ids,
        scheduler=SchedulerConfig(max_running=max_running, policy=policy))
    if tensor_parallel > 1:
        from kilter.serve.tensor_launch import STEP_TIMEOUT, TensorOptions, start_tensor_engine

        threads = threads or max(1, len(os.sched_getaffinity(0)) // tensor_parallel)
        options = TensorOptions(tensor_parallel, storage, device, exact,
                                str(kv_dtype).removeprefix("torch."), products, context, threads)
        return start_tensor_engine(source, options, config, progress=progress,
                                   step_timeout=step_timeout or STEP_TIMEOUT)
    tokenizer = open_tokenizer(source)
    model = load_decoder(source, storage=storage, device=device, exact=exact, kv_dtype=kv_dtype,
                         products=products, max_positions=context, progress=progress)
    return Engine(model, tokenizer, config)
