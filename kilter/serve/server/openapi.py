"""/openapi.json: bodies are parsed by hand (see `body`), so their schemas are put in by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's ``openapi_extra``: that its body is this model."""
    schema = model.model_json_schema(ref_template=_REFERENCE)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Makes the app's schema whole: definitions inside bodies move to the components, where their
    references point."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes,
                                   description="OpenAI's API, and what goes beyond it.")
            components = document.setdefault("components", {}).setdefault("schemas", {})
            for path in document["paths"].values():
                for operation in path.values():
                    answers = operation.get("responses", {}).values()
                    for part in (operation.get("requestBody", {}), *answers):
                        for content in part.get("content", {}).values():
                            components.update(content.get("schema", {}).pop("$defs", {}))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def streamed(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """For a route's 200: JSON, or server-sent events of which each one's data is a chunk (the
    last one's is ``[DONE]``)."""
    schema = chunk.model_json_schema(ref_template=_REFERENCE)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema,
            "description": "A chunk as JSON; the last event's is [DONE], unless there was an error "
                           "meanwhile: that is an ErrorResponse."}
    event = {"type": "object", "required": ["data"], "properties": {"data": data},
             "$defs": schema.pop("$defs", {})}
    return {"model": whole, "description": "The answer; with stream: true, events.",
            "content": {"text/event-stream": {"schema": event}}}
