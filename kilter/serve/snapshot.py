"""A picture of an engine between two steps, for somebody to look at: plain data, ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypedDict

from kilter.serve.answer import Embedding, Task
from kilter.serve.radix import RadixTree
from kilter.serve.request import Request
from kilter.serve.scheduler import Scheduler


class RequestView(TypedDict):
    """An answer that waits or runs. Tokens: ``cached <= computed <= length <= max_length``."""

    id: int
    index: int
    kind: str  # "answer" or "embedding"
    status: str  # "running" or "waiting"
    prompt_tokens: int
    cached: int
    computed: int
    length: int
    max_length: int
    pages: int
    preemptions: int


class NodeView(TypedDict):
    """A node of the prefix tree.

    id: the same as long as the node lives; parent: its parent's, None below a root.
    pages, tokens: how many its own run has.
    last_used: on the tree's own clock; a larger one is more recent.
    holders: requests that hold its first page.
    """

    id: int
    parent: int | None
    pages: int
    tokens: int
    last_used: int
    holders: int


class BatchView(TypedDict):
    """An answer's part in the last step."""

    id: int
    index: int
    tokens: int


class Snapshot(TypedDict):
    """Attributes:
    requests: those that run, oldest first, then those that wait, in the queue's order; at most
        ``limit``. requests_total: how many there are.
    pages: one character per page: "0" free, "c" cached, "1" to "9" held by so many requests (9: or
        more). page_size: tokens of a page.
    nodes: of the prefix tree, those nearer to a root first, at most ``limit``.
    tree_pages, tree_tokens: how many are in the whole tree.
    batch: the last step.
    """

    requests: list[RequestView]
    requests_total: int
    pages: str
    page_size: int
    nodes: list[NodeView]
    tree_pages: int
    tree_tokens: int
    batch: list[BatchView]


def snapshot(scheduler: Scheduler, tasks: Mapping[Request, Task],
             batch: Iterable[tuple[int, int, int]], limit: int) -> Snapshot:
    """See `Engine.snapshot`.

    Args:
        batch: of the last step: (request number, answer's index, tokens).
    """
    tree, pages = scheduler.tree, scheduler.pages
    running, waiting = scheduler.running[:limit], scheduler.waiting
    shown = running + waiting[:limit - len(running)]
    return Snapshot(
        requests=[_request(request, tasks[request]) for request in shown],
        requests_total=len(scheduler.running) + len(waiting),
        pages=pages.page_map(), page_size=pages.page_size,
        nodes=_nodes(tree, limit), tree_pages=tree.num_pages, tree_tokens=tree.num_tokens,
        batch=[BatchView(id=number, index=index, tokens=tokens)
               for number, index, tokens in batch])


def _request(request: Request, task: Task) -> RequestView:
    return RequestView(
        id=task.number, index=task.index,
        kind="embedding" if isinstance(task, Embedding) else "answer",
        status=request.status.value, prompt_tokens=request.prompt_length, cached=request.cached,
        computed=request.computed, length=request.length, max_length=request.max_length,
        pages=len(request.pages), preemptions=request.preemptions)


def _nodes(tree: RadixTree, limit: int) -> list[NodeView]:
    nodes = list(islice(tree.walk(), limit))
    # A root has no serial of its own: it is 0.
    return [NodeView(id=node.serial, parent=node.parent.serial or None if node.parent else None,
                     pages=len(node.pages), tokens=node.tokens,
                     last_used=node.used, holders=tree.pages.holders(node.pages[0]))
            for node in nodes]
