"""The dashboard at /: one page without external resources, and a stream of its figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict
from importlib.resources import files

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import HTMLResponse

from distillspec.serving.server.answers.app_state import AppState, app_state_of
from distillspec.serving.server.answers.stream import EventStream, event
from distillspec.serving.server.bridge.online_figures import tiles, troubles, without_names
from distillspec.serving.server.routes.access import check_dashboard_access, sees_names

router = APIRouter(tags=["dashboard"])
POLL_S = 0.5  # between checks for a new point
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """Return the page. It needs no key and asks for one if its figures do."""
    text = files("distillspec.serving.server.routes").joinpath("dashboard.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})


@router.get("/dashboard/events", dependencies=[Depends(check_dashboard_access)])
async def events(request: HttpRequest) -> EventStream:
    """Stream the figures as server-sent events: the last minutes first, then one point a second."""
    state = app_state_of(request)
    return EventStream(_figures(state, sees_names(request)))


async def _figures(state: AppState, names: bool) -> AsyncGenerator[bytes]:
    telemetry = state.telemetry
    seen, history = telemetry.points, list(telemetry.history)
    yield event({"model": state.model, "history": history, "state": _current(state, names)})
    while not state.closing.is_set():
        await asyncio.sleep(POLL_S)
        if seen < telemetry.points:  # by number: clocks are set back
            new = list(telemetry.history)[seen - telemetry.points :]
            seen = telemetry.points
            yield event({"history": new, "state": _current(state, names)})


def _current(state: AppState, names: bool) -> dict[str, object]:
    override, figures = state.controller.override, state.telemetry.state(names=names)
    online = state.telemetry.online if names else without_names(state.telemetry.online)
    rates, drafts = state.telemetry.rates(), state.metrics.selection
    return {
        **figures,
        "online": asdict(online),
        "learning": {"tiles": tiles(online), "trouble": " ".join(troubles(online))},
        "drafts": [{**draft, "acceptance": rates.get(draft["draft"])} for draft in drafts.table()] if names else [],
        "draft_steps": drafts.steps(),
        "draft_trials": drafts.trials(),
        "verification": state.engine.settings.verification,
        "policy": override.policy,
        "speculation_length": override.speculation_length,
        "draining": state.bridge.draining,
        "dead": state.bridge.dead,
    }
