"""The ASGI application: routes, errors in OpenAI's shape, and the life of the bridge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from distillspec import __version__
from distillspec.serving.server.bodies import SCHEMAS
from distillspec.serving.server.errors import ApiError, bad_request
from distillspec.serving.server.guard import Guard, error_response
from distillspec.serving.server.parts import Parts
from distillspec.serving.server.routes import admin, dashboard, openai, operations, tokens

log = logging.getLogger(__name__)

POINT_S = 1.0
FOLLOW_S = 2.0  # between looks at online adaptation
ERROR = {"description": "OpenAI's error body", "content": {"application/json": {"schema": {"type": "object"}}}}


def create_app(parts: Parts) -> FastAPI:
    """The application around an engine; it steps from startup to shutdown."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        parts.bridge.start()
        watching = [asyncio.create_task(_tick(parts)), asyncio.create_task(_follow_online(parts))]
        yield
        for task in watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await parts.bridge.stop()

    app = FastAPI(title="distillspec", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.parts = parts
    for room in (openai, tokens, operations, admin, dashboard):
        app.include_router(room.router, responses={"4XX": ERROR, "5XX": ERROR})
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_parameter)
    app.openapi = lambda: _openapi(app, parts.model)  # type: ignore[method-assign]
    if parts.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=parts.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    local = parts.config.is_local and not parts.keys
    app.add_middleware(Guard, config=parts.config, metrics=parts.metrics, local_names_only=local)
    return app


async def _tick(parts: Parts) -> None:
    """Close a second of telemetry every second, and notice when the engine dies."""
    while True:
        await asyncio.sleep(POINT_S)
        parts.telemetry.point()
        if parts.bridge.dead is not None:
            parts.metrics.engine_died()


async def _follow_online(parts: Parts) -> None:
    while parts.online is not None:
        try:
            await parts.look_at_online()
        except Exception:  # what is shown stays as it was; it is looked at again
            log.exception("online adaptation does not tell how it stands")
        await asyncio.sleep(FOLLOW_S)


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """No such path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _wrong_parameter(request: HttpRequest, error: Exception) -> Response:
    return error_response(bad_request("a part of the path or query is not what it should be"))


def _openapi(app: FastAPI, model: str) -> dict[str, Any]:
    """FastAPI's document with the bodies that are read from bytes, and the one model that they may name."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        pairs = [(schema, "validation") for schema in SCHEMAS]
        _, found = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        for schema in found["$defs"].values():
            if "model" in schema.get("required", ()):
                schema["properties"]["model"]["enum"] = [model]
        document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
