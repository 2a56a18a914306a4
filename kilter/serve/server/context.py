"""What every route of a server shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kilter.serve.async_engine import AsyncEngine
from kilter.serve.engine import Engine
from kilter.serve.grammar import Grammar
from kilter.serve.params import SamplingParams
from kilter.serve.server.config import ServerConfig
from kilter.serve.server.errors import ApiError
from kilter.serve.server.limits import Admission
from kilter.serve.server.metrics import Metrics
from kilter.serve.tool_parsers import ToolFormat, tool_format
from kilter.tokens import Tokenizer


@dataclass
class Context:
    """One server's engine, limits and facts about its model.

    Attributes:
        prepare: threads for what would hold up the event loop.
        compile_grammar: of settings that have one; `AsyncEngine.stream` then finds it compiled.
        max_context: longest prompt plus answer, tokens.
        vocab_size: of the model; the tokenizer may know fewer.
        priorities: whether a request's priority makes a difference.
        tool_format: how the model writes tool calls, or None.
        created: when the server started, Unix seconds.
    """

    config: ServerConfig
    engine: AsyncEngine
    tokenizer: Tokenizer
    metrics: Metrics
    admission: Admission
    prepare: ThreadPoolExecutor
    compile_grammar: Callable[[SamplingParams], Grammar | None]
    max_context: int
    vocab_size: int
    priorities: bool
    tool_format: ToolFormat | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop."""
        return self.admission.draining

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless a request's ``model`` is the one served (or left out)."""
        if name is not None and name not in self.config.names:
            raise ApiError(404, f"The model {name!r} is not served here; the model is "
                                f"{self.config.served_name!r}.", param="model",
                           code="model_not_found")

    def close(self) -> None:
        """Ends the threads; what still runs is aborted."""
        self.engine.stop()
        self.prepare.shutdown(wait=False, cancel_futures=True)


def build_context(engine: Engine, config: ServerConfig) -> Context:
    """The context of a server for an engine, whose thread is started with the app (or by the first
    `AsyncEngine.start`)."""
    tokenizer = engine.tokenizer
    metrics = Metrics()
    serving = AsyncEngine(engine)
    metrics.bind(lambda: serving.stats, engine.executor.pids)
    format = config.tool_format
    if format is None and tokenizer.has_chat_template:
        format = tool_format(tokenizer.chat_template(tools=[{}]).source)
    return Context(
        config=config, engine=serving, tokenizer=tokenizer, metrics=metrics,
        admission=Admission(engine.scheduler.config.max_running, config.max_queue),
        prepare=ThreadPoolExecutor(config.prepare_threads, "kilter-prepare"),
        compile_grammar=engine.compile_grammar, max_context=engine.max_context,
        vocab_size=engine.model.spec.vocab_size,
        priorities=engine.scheduler.config.policy == "priority", tool_format=format)
