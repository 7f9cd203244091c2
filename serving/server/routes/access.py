"""Access checks of the routes: API keys for models, the admin key for /admin, either for figures."""

from __future__ import annotations

from fastapi import Request as HttpRequest

from distillspec.serving.server.answers.app_state import app_state_of
from distillspec.serving.server.http.errors import ApiError
from distillspec.serving.server.http.keys import ADMIN_KEY, KeyRing


async def tenant(request: HttpRequest) -> str:
    """Return the request's tenant. Raise ApiError 401 or 429 if keys are set and the request has none of them.

    The admin key is accepted too.
    """
    state = app_state_of(request)
    if state.keys and _has_admin_key(request):
        return "admin"
    return _require(request, state.keys)


async def check_dashboard_access(request: HttpRequest) -> None:
    """Check the key for the dashboard's figures, which cover all tenants. `sees_names` says what they may name."""
    state = app_state_of(request)
    if state.config.metrics_key == "admin":
        await check_admin_access(request)
    else:
        await tenant(request)


async def check_metrics_access(request: HttpRequest) -> None:
    """Check the key for /metrics. None is needed for a local server or with `server.metrics_key=none`."""
    config = app_state_of(request).config
    if config.metrics_key == "admin" or (config.metrics_key == "any" and not config.is_local):
        await check_dashboard_access(request)


def sees_names(request: HttpRequest) -> bool:
    """Return True if figures may name domains and drafts, and give reasons of verdicts, to the sender of the request.

    With an admin key and several tenants this takes the admin key, unless `server.metrics_key=none` opens /metrics.
    """
    state = app_state_of(request)
    if state.config.metrics_key == "none" or not state.admin or len(state.keys.tenants) < 2:
        return True
    return _has_admin_key(request)


async def check_admin_access(request: HttpRequest) -> None:
    """Raise ApiError 401 or 429 for a missing or wrong admin key, 403 if the server has none."""
    state = app_state_of(request)
    if not state.admin:
        raise ApiError(
            403,
            f"the admin routes have no key: start with server.admin_key_file=FILE or {ADMIN_KEY} in the environment",
            kind="permission_error",
            code="admin_disabled",
        )
    _require(request, state.admin)


def _has_admin_key(request: HttpRequest) -> bool:
    return app_state_of(request).admin.tenant_of(request.headers.get("authorization")) is not None


def _require(request: HttpRequest, keys: KeyRing) -> str:
    """Return the tenant of the request's key. Raise ApiError 401, or 429 while the client's address is slowed down."""
    header = request.headers.get("authorization")
    try:
        return keys.require(header)
    except ApiError:
        address = request.client.host if request.client else ""
        app_state_of(request).wrong_keys.check(address, given=bool(header))
        raise
