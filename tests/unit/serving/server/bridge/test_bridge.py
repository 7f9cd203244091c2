"""Steps on their way to the event loop: those in a row are delivered together, and nothing waits for long."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from distillspec.serving.server.bridge import bridge

from ..conftest import Running, Serve, hold, wait_for

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
BODY = {**LONG, "model": "tiny", "stream": True, "speculation": {"trace": True}}


def events(running: Running, found: list[list[int]]) -> None:
    """Append the token ids of each event of a stream to `found`, as they come."""
    with running.http.stream("POST", "/v1/completions", json=BODY) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line.removeprefix("data: "))["choices"]):
                found.append([token["id"] for token in choices[0]["speculation"]["tokens"]])


@pytest.mark.parametrize(("together_s", "least", "most"), [(0.0, 20, 120), (60.0, 2, 3)])
def test_first_tokens_and_ends_do_not_wait(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, together_s: float, least: int, most: int
) -> None:
    """Of steps that would wait for a minute, the first comes at once, and the last brings all others."""
    monkeypatch.setattr(bridge, "TOGETHER_S", together_s)
    found: list[list[int]] = []
    events(serve(), found)
    assert least <= len(found) <= most
    assert sum(map(len, found)) == 120


def test_what_was_written_arrives_without_a_further_step(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "TOGETHER_S", 0.2)
    running, found = serve(), list[list[int]]()
    reader = threading.Thread(target=events, args=(running, found), daemon=True)
    reader.start()
    wait_for(lambda: bool(found))
    release = hold(running)
    unfinished = list(running.state.engine.sequences.unfinished.values())
    if unfinished:  # else the answer was done before the hold
        wait_for(lambda: sum(map(len, found)) == unfinished[0].output_length)
    release.set()
    reader.join(120)
    assert sum(map(len, found)) == 120
