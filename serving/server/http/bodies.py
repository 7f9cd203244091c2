"""Strict parsing of request bodies, bounded against deep or wide nesting."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError

from distillspec.config.serving import MOST_PROMPTS
from distillspec.serving.server.http.errors import ApiError, bad_request, from_validation
from distillspec.serving.server.http.schemas import Body

B = TypeVar("B", bound=Body)
SCHEMAS: list[type[Body]] = []  # of all routes, for the OpenAPI document

MOST_PARTS = 4 * MOST_PROMPTS  # lists and objects of a body
TEXTS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # JSON strings. An unterminated one ends with the body


def read_as(schema: type[B]) -> Callable[[HttpRequest], Awaitable[B]]:
    """Return a dependency that parses the body as `schema`.

    Raises:
        ApiError: 415 unless Content-Type is application/json: pages of other origins can send other types without
            permission. 400 for invalid JSON or a body that does not match the schema.
    """

    async def read(request: HttpRequest) -> B:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type is {kind or 'missing'}; send application/json")
        try:
            raw = await request.body()
            check_shape(raw)
            return schema.model_validate_json(raw)
        except ValidationError as error:
            raise from_validation(error) from error

    return read


def check_shape(raw: bytes) -> None:
    """Raise ApiError 400 for a body of more than `MOST_PARTS` lists and objects.

    Validating a million of them stops the event loop for seconds. A thread would not help: the validator holds the
    GIL.
    """
    if raw.count(b"[") + raw.count(b"{") <= MOST_PARTS:
        return
    bare = TEXTS.sub(b"", raw)
    if (count := bare.count(b"[") + bare.count(b"{")) > MOST_PARTS:
        problem = f"the body has {count} lists and objects; send at most {MOST_PARTS}"
        raise bad_request(problem, code="invalid_value")


def described(schema: type[Body]) -> dict[str, Any]:
    """Return the body's part of the OpenAPI document, which FastAPI cannot derive from `read_as`."""
    SCHEMAS.append(schema)
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}
