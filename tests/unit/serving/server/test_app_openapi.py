"""The OpenAPI document describes every body and every content type."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Running


@pytest.fixture(scope="module")
def document(served: Running) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/openapi.json").json()
    return found


def test_every_body_is_described_and_closed(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path in document["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    assert {"CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody", "DraftBody", "ControllerBody"} <= set(
        bodies
    )
    assert all(schemas[body]["additionalProperties"] is False for body in bodies)
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["tiny"]


def test_streams_and_metrics_are_not_called_json(document: dict[str, Any]) -> None:
    kinds = {
        path: set(operation["responses"]["200"]["content"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
    }
    assert kinds["/v1/completions"] == kinds["/v1/chat/completions"] == {"application/json", "text/event-stream"}
    assert kinds["/metrics"] == {"text/plain"}
    assert kinds["/"] == {"text/html"}
