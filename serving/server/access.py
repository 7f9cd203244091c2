"""Dependencies that let people in: API keys for models, the admin key for steering, either for figures."""

from __future__ import annotations

from fastapi import Request as HttpRequest

from distillspec.serving.server.errors import ApiError
from distillspec.serving.server.keys import ADMIN_KEY
from distillspec.serving.server.parts import parts_of


async def tenant(request: HttpRequest) -> str:
    """Whose request this is; 401 without a right key where keys are set. The admin key opens these doors too."""
    parts = parts_of(request)
    header = request.headers.get("authorization")
    scheme, _, key = (header or "").partition(" ")
    if parts.keys and scheme.lower() == "bearer" and parts.admin.tenant(key.strip()) is not None:
        return "admin"
    return parts.keys.require(header)


async def watcher(request: HttpRequest) -> None:
    """Who may see the dashboard's figures, which cover all tenants."""
    parts = parts_of(request)
    if parts.config.metrics_key == "admin":
        await administrator(request)
    else:
        await tenant(request)


async def scraper(request: HttpRequest) -> None:
    """Of /metrics: the same people, but this machine's own and, where the operator says so, everybody."""
    config = parts_of(request).config
    if config.metrics_key == "admin" or (config.metrics_key == "any" and not config.is_local):
        await watcher(request)


async def administrator(request: HttpRequest) -> None:
    """401 without the admin key, 403 where the server has none."""
    parts = parts_of(request)
    if not parts.admin:
        raise ApiError(
            403,
            f"the admin routes have no key: start with server.admin_key_file=FILE or {ADMIN_KEY} in the environment",
            kind="permission_error",
            code="admin_disabled",
        )
    parts.admin.require(request.headers.get("authorization"))
