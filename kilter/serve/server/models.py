"""GET /v1/models: what is served here."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from kilter.serve.server.context import Context
from kilter.serve.server.errors import error_responses


class ModelCard(BaseModel):
    """max_model_len: longest prompt plus answer, tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kilter"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=context.created, max_model_len=context.max_context)

    @router.get("/v1/models", summary="The names of the model that is served",
                responses=error_responses(401))
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in context.config.names])

    @router.get("/v1/models/{name:path}", summary="One model", responses=error_responses(401, 404))
    async def model(name: str) -> ModelCard:
        context.check_model(name)
        return card(name)

    return router
