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
from distillspec.serving.server.answers.app_state import AppState, app_state_of
from distillspec.serving.server.bridge.adjustable import LengthOverride
from distillspec.serving.server.bridge.catalogue import DraftCatalogue, NotInCatalogue, NotOffered
from distillspec.serving.server.bridge.online_control import OnlineControl
from distillspec.serving.server.http.bodies import described, read_as
from distillspec.serving.server.http.errors import ApiError, bad_request, not_found, switched_off
from distillspec.serving.server.http.schemas import ControllerBody, DraftBody, ExclusionBody, TenantBody
from distillspec.serving.server.routes.access import check_admin_access

FORGET_S = 30.0  # that a deletion waits for the engine
SWITCH_S = 10.0  # that a change of drafts waits for it
# The keys of a plan's JSON stay, whatever its fields are called. One of them holds two fields.
JSON_KEYS = {"drafts_block": "at_once", "promised_ratio": "usual"}
RAW_GOODPUTS = ("predicted_plain_goodput", "predicted_best_goodput")

router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(check_admin_access)])
Draft = Annotated[DraftBody, Depends(read_as(DraftBody))]
T = TypeVar("T")


@router.get("/drafts")
async def list_drafts(request: HttpRequest) -> dict[str, Any]:
    """List the drafts that can be loaded, and the one in use."""
    state = app_state_of(request)
    entries = await _with_drafts(state, lambda drafts: drafts.list())
    return {"drafts": [dataclasses.asdict(entry) for entry in entries]}


@router.post("/drafts/load", openapi_extra=described(DraftBody))
async def load_draft(request: HttpRequest, body: Draft) -> dict[str, Any]:
    """Use another draft from the next step on. Running answers go on. A restart goes back to the promoted draft.

    The answer comes when it is in use (`switched`), or after some seconds with `switched: false` and a note.
    """
    state = app_state_of(request)
    return {"version": await _with_drafts(state, lambda drafts: drafts.load(body.draft)), **await _switched(state)}


@router.post("/drafts/promote", openapi_extra=described(DraftBody))
async def promote_draft(request: HttpRequest, body: Draft) -> dict[str, Any]:
    """Use a version from the next step on, and after restarts. `switched` is as for a load."""
    state = app_state_of(request)
    return {"version": await _with_drafts(state, lambda drafts: drafts.promote(body.draft)), **await _switched(state)}


@router.post("/drafts/unload", openapi_extra=described(DraftBody))
async def unload_draft(request: HttpRequest, body: Draft) -> dict[str, Any]:
    """Drop one of several drafts from the next step on. Running answers go on with the others."""
    state = app_state_of(request)
    await _with_drafts(state, lambda drafts: drafts.unload(body.draft))
    return {"unloaded": body.draft, **await _switched(state)}


@router.post("/drafts/rollback")
async def roll_back(request: HttpRequest, draft: str | None = None) -> dict[str, Any]:
    """Go back to the previous draft. `draft` names one of several that learn. `switched` is as for a load."""
    state = app_state_of(request)
    return {"version": await _with_drafts(state, lambda drafts: drafts.rollback(draft)), **await _switched(state)}


@router.get("/controller")
async def controller(request: HttpRequest) -> dict[str, Any]:
    """Return the policy and bound of speculation lengths, and the reasons of the last plan."""
    return _controller(app_state_of(request))


@router.patch("/controller", openapi_extra=described(ControllerBody))
async def set_controller(
    request: HttpRequest, body: Annotated[ControllerBody, Depends(read_as(ControllerBody))]
) -> dict[str, Any]:
    """Change the policy or the bound from the next step on."""
    state = app_state_of(request)
    length, most = body.speculation_length, state.controller.speculation_length
    if length is not None and length > most:
        raise bad_request(f"speculation_length={length} is above the engine's {most}", "speculation_length")
    given = {name: getattr(body, name) for name in body.model_fields_set}
    state.controller.override = dataclasses.replace(state.controller.override, **given)
    return _controller(state)


@router.get("/online")
async def online_status(request: HttpRequest) -> dict[str, Any]:
    """Return the state of online adaptation."""
    return _as_json(await _with_online(app_state_of(request), lambda online: online.status()))


@router.post("/online/pause")
async def pause(request: HttpRequest) -> dict[str, Any]:
    """Log and train nothing new until resumed."""
    await _with_online(app_state_of(request), lambda online: online.pause())
    return await online_status(request)


@router.post("/online/resume")
async def resume(request: HttpRequest) -> dict[str, Any]:
    """Go on after a pause, or after a quarantine whose cause is fixed."""
    await _with_online(app_state_of(request), lambda online: online.resume())
    return await online_status(request)


@router.post("/online/trigger")
async def trigger(request: HttpRequest) -> dict[str, Any]:
    """Train a new version as soon as possible."""
    await _with_online(app_state_of(request), lambda online: online.trigger())
    return await online_status(request)


@router.get("/online/verdicts")
async def verdicts(request: HttpRequest) -> dict[str, Any]:
    """List the gate's decisions and their reasons."""
    return {"verdicts": _as_json(await _with_online(app_state_of(request), lambda online: online.verdicts()))}


@router.get("/replay")
async def replay(request: HttpRequest) -> dict[str, Any]:
    """Return the sizes of the replay log and its answers by tenant."""
    return _as_json(await _with_online(app_state_of(request), lambda online: online.stats()))


@router.post("/replay/delete", openapi_extra=described(TenantBody))
async def delete_tenant(
    request: HttpRequest, body: Annotated[TenantBody, Depends(read_as(TenantBody))]
) -> dict[str, Any]:
    """Delete the answers that are kept of a tenant: logged ones, and those that proposers look up.

    Versions trained on them stay. `deleted` counts the logged ones. Answers once all are gone.
    """
    state, deleted = app_state_of(request), 0
    if state.online is not None or not state.engine.keeps_answers:
        deleted = await _with_online(state, lambda online: online.delete_tenant(body.tenant))
    await _forgotten_by_engine(state, body.tenant)
    return {"tenant": body.tenant, "deleted": deleted}


@router.post("/replay/exclude", openapi_extra=described(ExclusionBody))
async def exclude_tenant(
    request: HttpRequest, body: Annotated[ExclusionBody, Depends(read_as(ExclusionBody))]
) -> dict[str, Any]:
    """Log nothing of a tenant from now on, after restarts too, or log it again. What is logged stays."""
    await _with_online(app_state_of(request), lambda online: online.exclude_tenant(body.tenant, body.excluded))
    return {"tenant": body.tenant, "excluded": body.excluded}


@router.post("/drain")
async def drain(request: HttpRequest) -> dict[str, Any]:
    """Refuse new requests from now on and let running ones finish. /health answers 503."""
    state = app_state_of(request)
    state.bridge.draining = True
    return {"draining": True, "open_answers": state.bridge.open_answers}


async def _with_drafts(state: AppState, work: Callable[[DraftCatalogue], T]) -> T:
    catalogue = state.catalogue
    if catalogue is None:
        raise switched_off("loading drafts", "online=on, server.drafts_folder=FOLDER or drafts=[A,B]")
    try:
        result = await asyncio.shield(asyncio.ensure_future(state.in_admin_thread(lambda: work(catalogue))))
        await state.update_online_figures()
        return result
    except NotInCatalogue as error:
        raise not_found(str(error), "draft_not_found") from error
    except NotOffered as error:
        raise ApiError(501, str(error), kind="server_error", code="not_enabled") from error
    except ConfigError as error:
        raise bad_request(str(error), "draft", "draft_refused") from error
    except RunError as error:
        raise ApiError(409, str(error), code="conflict") from error


async def _switched(state: AppState) -> dict[str, Any]:
    """Wait for the engine's next step, in which drafts change. Return whether it has begun, and if not, a note."""
    outcome = asyncio.wrap_future(state.engine.changes_made())
    state.bridge.thread.wake()
    await asyncio.wait([outcome], timeout=SWITCH_S)
    if outcome.done():
        return {"switched": True}
    note = f"the engine began no step within {SWITCH_S:g} s; the drafts change before its next one"
    return {"switched": False, "note": note}


async def _with_online(state: AppState, work: Callable[[OnlineControl], T]) -> T:
    online = state.online
    if online is None:
        raise switched_off("online adaptation", "online=on")
    try:
        result = await asyncio.shield(asyncio.ensure_future(state.in_admin_thread(lambda: work(online))))
        await state.update_online_figures()
    except RunError as error:
        raise ApiError(500, str(error), kind="server_error", code="online_failed") from error
    return result


async def _forgotten_by_engine(state: AppState, tenant: str) -> None:
    """Wait until the engine has deleted what its proposers keep of a tenant."""
    outcome = asyncio.wrap_future(state.engine.forget_tenant(tenant))
    state.bridge.thread.wake()
    await asyncio.wait([outcome], timeout=FORGET_S)
    problem = outcome.exception() if outcome.done() else f"the engine took no step for {FORGET_S:g} s"
    if problem is not None:
        raise ApiError(
            500,
            f"the logged answers of {tenant} are deleted, and those that proposers keep are not: {problem}",
            kind="server_error",
            code="deletion_failed",
        )


def _controller(state: AppState) -> dict[str, Any]:
    override: LengthOverride = state.controller.override
    return {
        "policy": override.policy,
        "speculation_length": override.speculation_length,
        "engine_controller": state.engine.settings.controller,
        "engine_speculation_length": state.controller.speculation_length,
        "last_plan": _as_json(state.engine.explain_last_plan()),
    }


def _as_json(value: Any) -> Any:
    """Return any value as JSON: dataclasses as their `repr` shows them, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields_as_json(value)
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _fields_as_json(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by their keys in JSON."""
    fields = {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    goodputs = {"raw": [fields.pop(name) for name in RAW_GOODPUTS]} if RAW_GOODPUTS[0] in fields else {}
    return {**{JSON_KEYS.get(name, name): shown for name, shown in fields.items()}, **goodputs}
