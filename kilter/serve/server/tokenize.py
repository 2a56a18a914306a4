"""POST /tokenize and /detokenize: what the model sees of a text, and back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from kilter.serve.server.body import prepared, read_request
from kilter.serve.server.context import Context
from kilter.serve.server.errors import error_responses, json_response
from kilter.serve.server.logprobs import token_text
from kilter.serve.server.messages import Messages, Tools
from kilter.serve.server.openapi import body_of
from kilter.serve.server.prepare import check_ids, refused, render_chat
from kilter.serve.server.protocol import Strict


class TokenizeRequest(Strict):
    """A text, or a chat as its template writes it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="Begin a text as the tokenizer does.")
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages, not with prompt")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class DetokenizeResponse(BaseModel):
    prompt: str


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Tokens"])
    errors = error_responses(400, 401, 404, 408, 413, 415)

    @router.post("/tokenize", summary="The tokens of a text or a chat", response_model=None,
                 openapi_extra=body_of(TokenizeRequest),
                 responses={200: {"model": TokenizeResponse}, **errors})
    async def tokenize(request: Request) -> Response:
        given = await read_request(context, request, TokenizeRequest)
        return json_response(await prepared(context, _tokenize, context, given))

    @router.post("/detokenize", summary="The text of tokens", response_model=None,
                 openapi_extra=body_of(DetokenizeRequest),
                 responses={200: {"model": DetokenizeResponse}, **errors})
    async def detokenize(request: Request) -> Response:
        given = await read_request(context, request, DetokenizeRequest)
        return json_response(await prepared(context, _detokenize, context, given))

    return router


def _tokenize(context: Context, request: TokenizeRequest) -> dict[str, object]:
    context.check_model(request.model)
    if request.messages is not None:
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
                 for tool in request.tools or ()]
        text = render_chat(context, request.messages, tools, request.add_generation_prompt,
                           request.chat_template_kwargs)
        with refused("messages"):
            ids = context.tokenizer.encode(text, add_special_tokens=False)
    else:
        assert request.prompt is not None
        with refused("prompt"):
            ids = context.tokenizer.encode(request.prompt, request.add_special_tokens)
    answer: dict[str, object] = {"count": len(ids), "max_model_len": context.max_context,
                                 "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [token_text(context.tokenizer, token) for token in ids]
    return answer


def _detokenize(context: Context, request: DetokenizeRequest) -> dict[str, object]:
    context.check_model(request.model)
    check_ids(context, request.tokens, "tokens")
    return {"prompt": context.tokenizer.decode(request.tokens, request.skip_special_tokens)}
