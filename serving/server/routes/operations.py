"""/health, /metrics, /version: for load balancers, Prometheus and people; /metrics may need a key."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from distillspec import __version__
from distillspec.serving.server.access import scraper
from distillspec.serving.server.parts import parts_of

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: HttpRequest) -> dict[str, str]:
    """200 while requests are taken; 503 when the engine is dead or the server drains."""
    parts_of(request).bridge.check_ready()
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(scraper)])
async def metrics(request: HttpRequest) -> Response:
    """Prometheus' text format."""
    return Response(parts_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, Any]:
    """Of distillspec and of what it stands on."""
    return {"version": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
