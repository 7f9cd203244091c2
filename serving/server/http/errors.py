"""Errors in the format of OpenAI's API, with its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

UNRECOGNISED = "Unrecognized request argument supplied"
MOST_ERRORS = 1000  # in a body with more errors, the first one is not searched for


class ApiError(Exception):
    """A refusal or failure, as the client gets it.

    Args:
        status: HTTP status.
        message: one sentence that names the value and the fix.
        kind: OpenAI's `type`.
        param: the invalid field.
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
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, code: str | None = None) -> ApiError:
    """Return a 404."""
    return ApiError(404, message, code=code)


def full(status: int, message: str, retry_s: int = 1) -> ApiError:
    """Return a refusal with `server.full_status`: this server has no room now."""
    kind = "rate_limit_exceeded" if status == 429 else "server_error"
    return ApiError(status, message, kind=kind, code="queue_full", headers={"Retry-After": str(retry_s)})


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503: this server cannot serve now, another one may."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "1"})


def switched_off(feature: str, setting: str) -> ApiError:
    """Return a 501 for a feature that is off. `setting` switches it on."""
    return ApiError(501, f"{feature} is switched off; start with {setting}", kind="server_error", code="not_enabled")


def from_validation(error: ValidationError) -> ApiError:
    """Return a 400 for the first error of a body, naming its field."""
    if error.error_count() > MOST_ERRORS:
        problem = f"the body has {error.error_count()} errors; see /openapi.json for its fields"
        return bad_request(problem, code="invalid_value")
    errors = error.errors(include_url=False, include_input=False)
    # Each branch of a union reports an error. The branch that got furthest into the field is the intended one.
    same = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda item: len(_field_path(item)))
    path, kind = ".".join(_field_path(first)), first["type"]
    if kind == "json_invalid":
        return bad_request(f"The body is not valid JSON: {_short(first['msg'])}", code="invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"{UNRECOGNISED}: {_short(path)}", param=_short(path), code="unknown_parameter")
    context = first.get("ctx", {})
    refused = kind in ("none_required", "literal_error") and context.get("expected") is None
    if refused or context.get("max_length") == 0:
        return bad_request(f"{path} is not supported by this server", param=path, code="unsupported_parameter")
    if kind == "missing":
        return bad_request(f"you must provide {path}", param=path, code="missing_required_parameter")
    prefix = f"{_short(path)}: " if path else ""
    return bad_request(f"{prefix}{_short(first['msg'])}", param=_short(path) or None, code="invalid_value")


def _field_path(item: Any) -> list[str]:
    """Return the path of fields and indices, without pydantic's names of union branches (`list[str]`)."""
    *groups, last = item["loc"] or ("",)
    kept = [part for part in groups if not _is_union_branch(part)]
    if item["type"] == "extra_forbidden" or not _is_union_branch(last):
        kept.append(last)
    return [str(part) for part in kept if part != ""]


def _is_union_branch(part: Any) -> bool:
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "bool", "constrained-str"})


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
