"""Steps on their way to the event loop: those in a row are delivered together, and nothing waits for long."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from distillspec.serving.server.bridge import bridge
from distillspec.serving.step.output import StepOutput

from ..conftest import Running, Serve, hold, wait_for

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
BODY = {**LONG, "model": "tiny", "stream": True, "speculation": {"trace": True}}


def events(running: Running, found: list[list[int]]) -> None:
    """Append the token ids of each event of a stream to `found`, as they come."""
    with running.http.stream("POST", "/v1/completions", json=BODY) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line.removeprefix("data: "))["choices"]):
                found.append([token["id"] for token in choices[0]["speculation"]["tokens"]])


def test_steps_come_one_by_one_where_nothing_waits(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "TOGETHER_S", 0.0)
    found: list[list[int]] = []
    events(serve(), found)
    assert len(found) > 3
    assert sum(map(len, found)) == 120


@pytest.mark.timeout(120)
def test_first_tokens_and_ends_do_not_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that would wait for an hour, the first comes at once, and the last brings all others."""
    monkeypatch.setattr(bridge, "TOGETHER_S", 3600.0)
    running, found = serve(), list[list[int]]()
    assert running.complete().status_code == 200  # from here on every step is less than an hour after another
    step, begun, until_s = running.state.engine.step, threading.Event(), time.monotonic() + 60

    def once_the_first_is_read() -> StepOutput:
        """The second step could else end before the event loop comes to deliver the first."""
        while begun.is_set() and not found and time.monotonic() < until_s:
            time.sleep(0.005)
        output = step()
        if output.deltas:
            begun.set()
        return output

    monkeypatch.setattr(running.state.engine, "step", once_the_first_is_read)
    events(running, found)
    assert 2 <= len(found) <= 3
    assert len(found[0]) == 1
    assert sum(map(len, found)) == 120


def test_a_delivery_that_fails_holds_up_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running, found, failed = serve(), list[list[int]](), list[int]()

    def fails(report: object) -> None:
        failed.append(1)
        raise RuntimeError("a counter is broken")

    monkeypatch.setattr(running.state.metrics, "observe_step", fails)
    events(running, found)
    assert sum(map(len, found)) == 120
    assert failed


def test_what_was_written_arrives_without_a_further_step(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "TOGETHER_S", 0.2)
    running, found = serve(), list[list[int]]()
    step = running.state.engine.step

    def slowly() -> StepOutput:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(running.state.engine, "step", slowly)
    reader = threading.Thread(target=events, args=(running, found), daemon=True)
    reader.start()
    wait_for(lambda: bool(found))
    release = hold(running)
    (unfinished,) = running.state.engine.sequences.unfinished.values()
    wait_for(lambda: sum(map(len, found)) == unfinished.output_length)
    release.set()
    reader.join(120)
    assert sum(map(len, found)) == 120
