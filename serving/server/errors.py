"""Errors as OpenAI's clients know them: one body, the usual codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

UNRECOGNISED = "Unrecognized request argument supplied"
MOST_ERRORS = 1000  # of a body, that are looked at one by one


class ApiError(Exception):
    """A refusal or failure that the client is told of.

    Args:
        status: HTTP status.
        message: one sentence that names the value and the fix.
        kind: OpenAI's `type`.
        param: the field at fault.
        code: OpenAI's machine-readable `code`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, code: str | None = None) -> ApiError:
    return ApiError(404, message, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot serve now, and another may: 503."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "1"})


def switched_off(what: str, setting: str) -> ApiError:
    """A part that was not switched on: 501, naming the setting."""
    return ApiError(501, f"{what} is switched off; start with {setting}", kind="server_error", code="not_enabled")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, by the name of its field."""
    if error.error_count() > MOST_ERRORS:
        problem = f"the body has {error.error_count()} errors; /openapi.json says what it may hold"
        return bad_request(problem, code="invalid_value")
    found = error.errors(include_url=False, include_input=False)
    # Each branch of a union reports: the one that got furthest into the field is the one that was meant.
    same = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=lambda item: len(_place(item)))
    path, kind = ".".join(_place(first)), first["type"]
    if kind == "json_invalid":
        return bad_request(f"The body is not valid JSON: {_short(first['msg'])}", code="invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"{UNRECOGNISED}: {_short(path)}", param=_short(path), code="unknown_parameter")
    if kind in ("none_required", "literal_error") and first.get("ctx", {}).get("expected") is None:
        return bad_request(f"{path} is not supported by this server", param=path, code="unsupported_parameter")
    if kind == "missing":
        return bad_request(f"you must provide {path}", param=path, code="missing_required_parameter")
    where = f"{_short(path)}: " if path else ""
    return bad_request(f"{where}{_short(first['msg'])}", param=_short(path) or None, code="invalid_value")


def _place(item: Any) -> list[str]:
    """Fields and places, without the union branches that pydantic names among them (`list[str]`)."""
    *way, last = item["loc"] or ("",)
    kept = [part for part in way if not _is_union_branch(part)]
    if item["type"] == "extra_forbidden" or not _is_union_branch(last):
        kept.append(last)
    return [str(part) for part in kept if part != ""]


def _is_union_branch(part: Any) -> bool:
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "bool", "constrained-str"})


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
