"""The ASGI application: routes, error handlers, and start and stop of the engine's thread."""

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
from distillspec.serving.server.answers.app_state import AppState
from distillspec.serving.server.guard import Guard, error_response
from distillspec.serving.server.http.bodies import SCHEMAS
from distillspec.serving.server.http.errors import ApiError, bad_request
from distillspec.serving.server.routes import admin, dashboard, openai, operations, tokens

log = logging.getLogger(__name__)

POINT_S = 1.0
ONLINE_POLL_S = 2.0  # between readings of online adaptation's figures
ERROR = {"description": "OpenAI's error body", "content": {"application/json": {"schema": {"type": "object"}}}}


def create_app(state: AppState) -> FastAPI:
    """Return the application around an engine, which steps from startup to shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.bridge.start()
        watching = [asyncio.create_task(_tick(state)), asyncio.create_task(_poll_online(state))]
        yield
        for task in watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await state.bridge.stop()

    app = FastAPI(title="distillspec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    for module in (openai, tokens, operations, admin, dashboard):
        app.include_router(module.router, responses={"4XX": ERROR, "5XX": ERROR})
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_parameter)
    app.openapi = lambda: _openapi(app, state.model)  # type: ignore[method-assign]
    _add_middleware(app, state)
    return app


def _add_middleware(app: FastAPI, state: AppState) -> None:
    """Add CORS for the configured origins and, around everything, the guard."""
    if state.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients send a dozen of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    local = state.config.is_local and not state.keys
    app.add_middleware(Guard, config=state.config, metrics=state.metrics, local_names_only=local)


async def _tick(state: AppState) -> None:
    """Close a second of telemetry every second, and note in the metrics if the engine has died."""
    while True:
        await asyncio.sleep(POINT_S)
        state.telemetry.point()
        if state.bridge.dead is not None:
            state.metrics.up.set(0)


async def _poll_online(state: AppState) -> None:
    while state.online is not None:
        await state.update_online_figures()
        await asyncio.sleep(ONLINE_POLL_S)


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _wrong_parameter(request: HttpRequest, error: Exception) -> Response:
    return error_response(bad_request("a path or query parameter is invalid"))


def _openapi(app: FastAPI, model: str) -> dict[str, Any]:
    """Return FastAPI's document, with the bodies of `read_as` and the name of the served model added."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        pairs = [(schema, "validation") for schema in SCHEMAS]
        _, schemas = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        for schema in schemas["$defs"].values():
            if "model" in schema.get("required", ()):
                schema["properties"]["model"]["enum"] = [model]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
