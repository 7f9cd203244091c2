"""Reading a request's body into its schema, from the bytes: strict, and safe against deep nesting."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError

from distillspec.serving.server.errors import ApiError, bad_request, from_validation
from distillspec.serving.server.schemas import MOST_PROMPTS, Body

B = TypeVar("B", bound=Body)
SCHEMAS: list[type[Body]] = []  # those that routes read

MOST_PARTS = 4 * MOST_PROMPTS  # lists and objects of a body
TEXTS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # JSON strings; one without an end goes to the body's end


def read_as(schema: type[B]) -> Callable[[HttpRequest], Awaitable[B]]:
    """A dependency that gives the body as `schema`.

    Raises:
        ApiError: 415 for what does not call itself JSON (a page of another origin could send that unasked), 400 for
            what is none, or is not the schema's.
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
    """Refuse a body of very many lists and objects: to validate a million of them stops the event loop for seconds.

    A thread would not help: the validator holds the interpreter's lock.

    Raises:
        ApiError: 400.
    """
    if raw.count(b"[") + raw.count(b"{") <= MOST_PARTS:
        return
    bare = TEXTS.sub(b"", raw)
    if (count := bare.count(b"[") + bare.count(b"{")) > MOST_PARTS:
        problem = f"the body has {count} lists and objects; the most is {MOST_PARTS}"
        raise bad_request(problem, code="invalid_value")


def described(schema: type[Body]) -> dict[str, Any]:
    """The body's part of the OpenAPI document: the schema is read by `read_as`, so FastAPI does not see it."""
    SCHEMAS.append(schema)
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}
