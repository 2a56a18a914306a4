"""The simplest batching server of `transformers`: what waits is padded into one `generate`.

    python -m bench.peers.padded FOLDER --port 8000 --batch 16

When the model is free, every waiting request (at most --batch) becomes one left-padded batch; its
answers stream token by token; what comes meanwhile waits for the next batch. Answers have exactly
``max_tokens`` tokens and are greedy: it serves the benchmark, nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


@dataclass
class Waiting:
    ids: list[int]
    new_tokens: int
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)


class Batcher:
    """Pads, generates and hands out tokens; runs `generate` in one thread."""

    def __init__(self, folder: Path, batch: int) -> None:
        transformers.logging.set_verbosity_error()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.batch = batch
        self.waiting: asyncio.Queue[Waiting] = asyncio.Queue()

    async def run(self) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        while True:
            batch = [await self.waiting.get()]
            await asyncio.sleep(0.005)  # clients that ask at the same time arrive together
            while len(batch) < self.batch and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            await loop.run_in_executor(thread, self._generate, batch, loop)

    def _generate(self, batch: list[Waiting], loop: asyncio.AbstractEventLoop) -> None:
        width = max(len(w.ids) for w in batch)
        ids = torch.tensor([[0] * (width - len(w.ids)) + w.ids for w in batch])
        mask = torch.tensor([[0] * (width - len(w.ids)) + [1] * len(w.ids) for w in batch])
        new = max(w.new_tokens for w in batch)
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new,
                                min_new_tokens=new, streamer=Rows(batch, loop))


class Rows(transformers.generation.BaseStreamer):
    """Hands a batch's tokens to those who wait for them, step by step."""

    def __init__(self, batch: list[Waiting], loop: asyncio.AbstractEventLoop) -> None:
        self.batch = batch
        self.loop = loop
        self.done = 0

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:  # the first call has the prompts, a matrix
            self.done += 1
            self.loop.call_soon_threadsafe(self._give, value.tolist(), self.done)

    def _give(self, row: list[int], done: int) -> None:
        for waiting, token in zip(self.batch, row, strict=True):
            if done <= waiting.new_tokens:
                waiting.tokens.put_nowait(token)
            if done == waiting.new_tokens:
                waiting.tokens.put_nowait(None)

    def end(self) -> None:
        pass  # every answer ended at its own length


def create_app(batcher: Batcher) -> FastAPI:
    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=running)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def answer(ids: list[int], body: dict[str, Any], chat: bool) -> Any:
        waiting = Waiting(ids, body["max_tokens"])
        batcher.waiting.put_nowait(waiting)
        usage = {"prompt_tokens": len(ids), "completion_tokens": waiting.new_tokens,
                 "total_tokens": len(ids) + waiting.new_tokens}

        async def pieces() -> AsyncIterator[str]:
            tokens: list[int] = []
            given = ""
            while (token := await waiting.tokens.get()) is not None:
                tokens.append(token)
                text = batcher.tokenizer.decode(tokens, skip_special_tokens=True)
                if not text.endswith("\ufffd"):
                    yield text[len(given):]
                    given = text

        if not body.get("stream"):
            text = "".join([piece async for piece in pieces()])
            choice = ({"message": {"role": "assistant", "content": text}} if chat
                      else {"text": text})
            return JSONResponse({"choices": [choice], "usage": usage})

        async def events() -> AsyncIterator[str]:
            async for piece in pieces():
                choice = {"delta": {"content": piece}} if chat else {"text": piece}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        return await answer(batcher.tokenizer(body["prompt"])["input_ids"], body, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        ids = batcher.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        return await answer(ids, body, chat=True)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(2)
    uvicorn.run(create_app(Batcher(args.folder, args.batch)), port=args.port,
                log_level="warning")


if __name__ == "__main__":
    main()
