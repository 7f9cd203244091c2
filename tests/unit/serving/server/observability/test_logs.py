"""Log lines: valid JSON with the id of their request, and without prompts, answers or keys."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from distillspec.serving.server.observability.logs import JsonLines, TextLines

from ..conftest import API_KEY, Running, held_at, wait_for


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Collect the JSON lines of the project's loggers."""
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
    wait_for(lambda: '"event": "http"' in written.getvalue())  # written after the reply has gone out
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
    first, *traceback = TextLines().format(record).split("\n")
    assert first.endswith("step 3 failed event=step")
    assert all(part.startswith("  ") for part in traceback)


FORGED = "bob\n2026-01-01 00:00:00,000 INFO    request tenant=admin\r\x1b[2J\u2028\x7f\x85"


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_nothing_that_clients_choose_forges_a_line_or_a_field(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        record = logging.LogRecord("x", logging.INFO, "f", 1, "no model %s", (FORGED,), (type(error), error, None))
    record.fields = {"user": FORGED, "id": "a tenant=admin", "tenant": 'a"b', "none": None, "seconds": 0.25}
    text = formatter.format(record)
    first, *rest = text.splitlines()
    assert all(line.startswith("  ") for line in rest)
    assert all(letter.isprintable() for letter in text if letter != "\n")
    if isinstance(formatter, JsonLines):
        assert not rest
        assert json.loads(text)["user"] == FORGED
    else:
        assert first.endswith(
            r' user="bob\n2026-01-01 00:00:00,000 INFO    request tenant=admin\r\u001b[2J\u2028\u007f\u0085"'
            r' id="a tenant=admin" tenant="a\"b" seconds=0.25'
        )


def test_a_user_cannot_write_lines_into_the_log(served: Running) -> None:
    text, logger = io.StringIO(), logging.getLogger("distillspec")
    handler, level = logging.StreamHandler(text), logger.level
    handler.setFormatter(TextLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert served.complete(user=FORGED).status_code == 200
        served.wait_until_idle()
        wait_for(lambda: "event=generation" in text.getvalue())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "\n2026-01-01 00:00:00" not in text.getvalue()
    assert all(" tenant=default " in line for line in text.getvalue().splitlines() if "event=generation" in line)


def test_a_client_that_leaves_is_logged_with_what_it_was_sent(guarded: Running, written: io.StringIO) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-Id": "left"}
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 200, "ignore_eos": True, "stream": True}
    body["speculation"] = {"trace": True}  # every token is an event, also without text
    with held_at(guarded, 20):
        with guarded.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            assert next(reply.iter_lines()).startswith("data: {")
        wait_for(lambda: '"outcome": "client_left"' in written.getvalue())
    line = next(line for line in lines(written) if line.get("event") == "generation")
    assert line["prompt_tokens"] == 5
    assert 0 < line["completion_tokens"] < 200
    assert line["first_token_s"] > 0
