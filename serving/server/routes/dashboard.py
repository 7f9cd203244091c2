"""/ and what feeds it: one page without outside resources, and a stream of its figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from importlib.resources import files

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import HTMLResponse

from distillspec.serving.server.access import watcher
from distillspec.serving.server.parts import Parts, parts_of
from distillspec.serving.server.stream import EventStream, event

router = APIRouter(tags=["dashboard"])
TICK_S = 0.5  # how often a watcher looks for a new point
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """The page; it asks for a key itself where one is needed."""
    text = files("distillspec.serving.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})


@router.get("/dashboard/events", dependencies=[Depends(watcher)])
async def events(request: HttpRequest) -> EventStream:
    """First the last minutes, then a point a second, as server-sent events."""
    parts = parts_of(request)
    return EventStream(_figures(parts))


async def _figures(parts: Parts) -> AsyncGenerator[bytes]:
    telemetry = parts.telemetry
    yield event({"model": parts.model, "history": list(telemetry.history), "state": _state(parts)})
    seen = telemetry.history[-1]["t"] if telemetry.history else 0.0
    while not parts.closing.is_set():
        await asyncio.sleep(TICK_S)
        new = [point for point in telemetry.history if point["t"] > seen]
        if new:
            seen = new[-1]["t"]
            yield event({"history": new, "state": _state(parts)})


def _state(parts: Parts) -> dict[str, object]:
    hand = parts.controller.hand
    return {
        **parts.telemetry.state(),
        "policy": hand.policy,
        "max_length": hand.max_length,
        "draining": parts.bridge.draining,
        "dead": parts.bridge.dead,
    }
