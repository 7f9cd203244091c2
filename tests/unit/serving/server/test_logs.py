"""Log lines: JSON that machines read, with the id of the request they belong to; no prompt, no answer, no key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from distillspec.serving.server.logs import JsonLines, TextLines

from .conftest import API_KEY, Running


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the project's loggers write as JSON meanwhile."""
    text, logger = io.StringIO(), logging.getLogger("distillspec")
    handler, level = logging.StreamHandler(text), logger.level
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_every_line_of_a_request_has_its_id(guarded: Running, written: io.StringIO, stream: bool) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-Id": f"mine-{stream}"}
    body = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 5, "user": "bob", "stream": stream}
    reply = guarded.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200
    guarded.wait_until_idle()
    own = [line for line in lines(written) if line["request_id"] == f"mine-{stream}"]
    generation = next(line for line in own if line.get("event") == "generation")
    http = next(line for line in own if line.get("event") == "http")
    assert (generation["tenant"], generation["user"], generation["outcome"]) == ("alice", "bob", "done")
    assert (generation["completion_tokens"], generation["stream"]) == (5, stream)
    assert (http["route"], http["status"], http["method"]) == ("/v1/completions", 200, "POST")
    assert API_KEY not in written.getvalue()
    assert "secret prompt" not in written.getvalue()


def test_a_failure_is_one_line_with_its_traceback() -> None:
    try:
        raise RuntimeError("the device is lost")
    except RuntimeError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "step %d failed", (3,), (type(error), error, None))
    record.fields = {"event": "step"}
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["message"], told["event"]) == ("error", "step 3 failed", "step")
    assert "the device is lost" in told["exception"]
    assert "event=step" in TextLines().format(record)
