"""/admin: drafts, the length controller, online adaptation, the replay log, draining. Needs the admin key."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest

from distillspec.errors import ConfigError, RunError
from distillspec.serving.server.access import administrator
from distillspec.serving.server.adjustable import Hand
from distillspec.serving.server.bodies import described, read_as
from distillspec.serving.server.catalogue import DraftCatalogue, NotInCatalogue, NotOffered
from distillspec.serving.server.errors import ApiError, bad_request, not_found, switched_off
from distillspec.serving.server.online_control import OnlineControl
from distillspec.serving.server.parts import Parts, parts_of
from distillspec.serving.server.schemas import ControllerBody, DraftBody, TenantBody

router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(administrator)])
Draft = Annotated[DraftBody, Depends(read_as(DraftBody))]
T = TypeVar("T")


@router.get("/drafts")
async def list_drafts(request: HttpRequest) -> dict[str, Any]:
    """The drafts that can be loaded, and which one is in use."""
    parts = parts_of(request)
    entries = await _with_drafts(parts, lambda drafts: drafts.list())
    return {"drafts": [dataclasses.asdict(entry) for entry in entries]}


@router.post("/drafts/load", openapi_extra=described(DraftBody))
async def load_draft(request: HttpRequest, body: Draft) -> dict[str, str]:
    """Draft with another one from the next step on; running answers go on. A restart goes back to the promoted one."""
    return {"version": await _with_drafts(parts_of(request), lambda drafts: drafts.load(body.draft))}


@router.post("/drafts/promote", openapi_extra=described(DraftBody))
async def promote_draft(request: HttpRequest, body: Draft) -> dict[str, str]:
    """Make a version the one that restarts use."""
    return {"version": await _with_drafts(parts_of(request), lambda drafts: drafts.promote(body.draft))}


@router.post("/drafts/rollback")
async def roll_back(request: HttpRequest) -> dict[str, str]:
    """Go back to the draft before."""
    return {"version": await _with_drafts(parts_of(request), lambda drafts: drafts.rollback())}


@router.get("/controller")
async def controller(request: HttpRequest) -> dict[str, Any]:
    """Who chooses speculation lengths, within which bound, and why the last ones were chosen."""
    return _controller(parts_of(request))


@router.patch("/controller", openapi_extra=described(ControllerBody))
async def set_controller(
    request: HttpRequest, body: Annotated[ControllerBody, Depends(read_as(ControllerBody))]
) -> dict[str, Any]:
    """Change the policy or the bound from the next step on."""
    parts = parts_of(request)
    longest = parts.controller.longest
    if body.max_length is not None and body.max_length > longest:
        raise bad_request(f"max_length={body.max_length} is above the engine's {longest}", "max_length")
    given = {name: getattr(body, name) for name in body.model_fields_set}
    parts.controller.hand = dataclasses.replace(parts.controller.hand, **given)
    return _controller(parts)


@router.get("/online")
async def online_status(request: HttpRequest) -> dict[str, Any]:
    """What online adaptation is doing."""
    return _as_json(await _with_online(parts_of(request), lambda online: online.status()))


@router.post("/online/pause")
async def pause(request: HttpRequest) -> dict[str, Any]:
    """Log and train nothing new until resumed."""
    await _with_online(parts_of(request), lambda online: online.pause())
    return await online_status(request)


@router.post("/online/resume")
async def resume(request: HttpRequest) -> dict[str, Any]:
    """Go on after a pause, or after a quarantine that somebody has looked into."""
    await _with_online(parts_of(request), lambda online: online.resume())
    return await online_status(request)


@router.post("/online/trigger")
async def trigger(request: HttpRequest) -> dict[str, Any]:
    """Train a new version as soon as may be."""
    await _with_online(parts_of(request), lambda online: online.trigger())
    return await online_status(request)


@router.get("/online/verdicts")
async def verdicts(request: HttpRequest) -> dict[str, Any]:
    """What the gate let in or kept out, and why."""
    return {"verdicts": _as_json(await _with_online(parts_of(request), lambda online: online.verdicts()))}


@router.get("/replay")
async def replay(request: HttpRequest) -> dict[str, Any]:
    """How much the replay log holds, of whom."""
    return _as_json(await _with_online(parts_of(request), lambda online: online.stats()))


@router.post("/replay/delete", openapi_extra=described(TenantBody))
async def delete_tenant(
    request: HttpRequest, body: Annotated[TenantBody, Depends(read_as(TenantBody))]
) -> dict[str, Any]:
    """Delete what was logged of a tenant; versions that learnt from it stay."""
    deleted = await _with_online(parts_of(request), lambda online: online.delete_tenant(body.tenant))
    return {"tenant": body.tenant, "deleted": deleted}


@router.post("/drain")
async def drain(request: HttpRequest) -> dict[str, Any]:
    """Take nothing new from now on, and let what runs finish; /health says 503."""
    parts = parts_of(request)
    parts.bridge.draining = True
    return {"draining": True, "open_answers": parts.bridge.open_answers}


async def _with_drafts(parts: Parts, work: Callable[[DraftCatalogue], T]) -> T:
    catalogue = parts.catalogue
    if catalogue is None:
        raise switched_off("loading drafts", "online=on or server.drafts_folder=FOLDER")
    try:
        found = await asyncio.shield(asyncio.ensure_future(parts.slowly(lambda: work(catalogue))))
        await parts.look_at_online()
        return found
    except NotInCatalogue as error:
        raise not_found(str(error), "draft_not_found") from error
    except NotOffered as error:
        raise ApiError(501, str(error), kind="server_error", code="not_enabled") from error
    except ConfigError as error:
        raise bad_request(str(error), "draft", "draft_refused") from error
    except RunError as error:
        raise ApiError(409, str(error), code="conflict") from error


async def _with_online(parts: Parts, work: Callable[[OnlineControl], T]) -> T:
    online = parts.online
    if online is None:
        raise switched_off("online adaptation", "online=on")
    try:
        found = await asyncio.shield(asyncio.ensure_future(parts.slowly(lambda: work(online))))
        await parts.look_at_online()
    except RunError as error:
        raise ApiError(500, str(error), kind="server_error", code="online_failed") from error
    return found


def _controller(parts: Parts) -> dict[str, Any]:
    hand: Hand = parts.controller.hand
    return {
        "policy": hand.policy,
        "max_length": hand.max_length,
        "engine_controller": parts.engine.settings.controller,
        "longest": parts.controller.longest,
        "last_plan": _as_json(parts.engine.explain_last_plan()),
    }


def _as_json(value: Any) -> Any:
    """Anything as JSON: dataclasses as objects, what is not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
