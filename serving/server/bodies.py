"""Reading a request's body into its schema, from the bytes: strict, and safe against deep nesting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError

from distillspec.serving.server.errors import ApiError, from_validation
from distillspec.serving.server.schemas import Body

B = TypeVar("B", bound=Body)
SCHEMAS: list[type[Body]] = []  # those that routes read


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
            return schema.model_validate_json(await request.body())
        except ValidationError as error:
            raise from_validation(error) from error

    return read


def described(schema: type[Body]) -> dict[str, Any]:
    """The body's part of the OpenAPI document: the schema is read by `read_as`, so FastAPI does not see it."""
    SCHEMAS.append(schema)
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}
