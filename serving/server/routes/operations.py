"""/health, /metrics and /version. /metrics may need a key."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from distillspec import __version__
from distillspec.serving.server.answers.app_state import app_state_of
from distillspec.serving.server.routes.access import check_metrics_access, sees_names

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: HttpRequest) -> dict[str, str]:
    """Answer 200 while requests are accepted, 503 when the engine is dead or the server drains."""
    app_state_of(request).bridge.check_ready()
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(check_metrics_access)])
async def metrics(request: HttpRequest) -> Response:
    """Return the metrics in Prometheus' text format."""
    text = app_state_of(request).metrics.text(names=sees_names(request))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, Any]:
    """Return the versions of distillspec, torch and transformers."""
    return {"version": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
