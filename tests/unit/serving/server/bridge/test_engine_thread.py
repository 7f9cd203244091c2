"""The engine's thread behind the server: clients that leave, full queues, deadlines, draining, a dead engine."""

from __future__ import annotations

import json
import signal
import socket
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.requests import SequenceDelta
from distillspec.serving.server import listening
from distillspec.serving.server.bridge.request_stream import RequestStream

from ..conftest import WAIT_S, Running, Serve, held_at, hold, wait_for

LONG: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class Client(threading.Thread):
    """A request in another thread. `reply` is None until it arrives."""

    def __init__(self, running: Running, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.running, self.fields = running, fields
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.reply = self.running.http.post("/v1/completions", json={**LONG, **self.fields})

    def result(self) -> httpx.Response:
        self.join(120)
        assert self.reply is not None
        return self.reply


def test_a_reader_that_leaves_ends_its_answer(serve: Serve) -> None:
    running = serve()
    body = {**LONG, "stream": True, "speculation": {"trace": True}}  # every token is an event, also without text
    with held_at(running, 20) as held:
        with running.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # dropped, it would close the connection
            assert next(lines).startswith("data: {")
            assert held.wait(WAIT_S)
        wait_for(lambda: running.state.bridge.open_answers == 0)  # while the engine is still busy with a step
    assert_left_early(running)


def test_a_waiting_client_that_leaves_ends_its_answer(serve: Serve) -> None:
    running = serve()
    release = hold(running)
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(LONG)
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: running.state.bridge.open_answers == 1)
    wait_for(lambda: running.state.bridge.open_answers == 0)
    release.set()
    assert_left_early(running)


def counted(running: Running, name: str) -> float:
    """Return the value of a counter in /metrics."""
    value = running.state.metrics.registry.get_sample_value(f"distillspec:{name}_total", {"model_name": "tiny"})
    assert value is not None
    return value


def assert_left_early(running: Running) -> None:
    """Assert that the answer was aborted long before its end, and that its slots are free."""
    running.wait_until_idle()
    assert 0 <= counted(running, "generation_tokens") < LONG["max_tokens"]
    assert counted(running, "client_disconnects") == 1
    assert running.complete().status_code == 200


def test_a_full_queue_is_refused_with_a_time_to_wait(serve: Serve) -> None:
    running = serve(max_queue=1, engine={"max_slots": 1})
    release = hold(running)
    first, second = Client(running, max_tokens=5), Client(running, max_tokens=5)
    wait_for(lambda: running.state.bridge.open_answers == 2)
    refusal = running.complete()
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "queue_full")
    assert int(refusal.headers["Retry-After"]) >= 1
    assert running.complete(n=3).json()["error"]["param"] == "n"  # never possible: not worth a retry
    release.set()
    assert first.result().json()["choices"] == second.result().json()["choices"]
    assert running.complete().status_code == 200


def test_full_may_be_503(serve: Serve) -> None:
    running = serve(max_queue=0, full_status=503, engine={"max_slots": 1})
    release = hold(running)
    first = Client(running, max_tokens=5)
    wait_for(lambda: running.state.bridge.open_answers == 1)
    assert running.complete().status_code == 503
    release.set()
    assert first.result().status_code == 200


def test_the_event_loop_answers_while_the_engine_computes(serve: Serve) -> None:
    running = serve()
    release = hold(running)
    client = Client(running, max_tokens=3)
    wait_for(lambda: running.state.bridge.open_answers == 1)
    assert running.http.get("/health").status_code == 200
    assert running.http.get("/metrics").status_code == 200
    release.set()
    assert client.result().status_code == 200


def test_a_deadline_ends_a_request(serve: Serve) -> None:
    running = serve(deadline_s=0.05)
    release = hold(running)
    whole, streamed = Client(running), Client(running, stream=True)
    wait_for(lambda: running.state.bridge.open_answers == 2)
    threading.Event().wait(0.1)  # the clock must pass the deadline
    release.set()
    assert whole.result().status_code == 504
    assert whole.result().json()["error"]["code"] == "deadline_exceeded"
    last = streamed.result().text.split("\n\n")[-3:]
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert last[1:] == ["data: [DONE]", ""]


def test_a_stream_has_the_text_before_its_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written, and the end by the deadline, reach a slow reader in one delta."""
    running = serve()
    wanted = running.http.post("/v1/completions", json={**LONG, "max_tokens": 8}).json()["choices"][0]["text"]
    put = RequestStream.put

    def late(stream: RequestStream, output: SequenceDelta, row: RowResult | None) -> None:
        put(stream, replace(output, finish_reason="abort") if output.finish_reason else output, row)

    monkeypatch.setattr(RequestStream, "put", late)
    reply = running.http.post("/v1/completions", json={**LONG, "stream": True, "max_tokens": 8})
    events = [
        json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line.startswith("data: {")
    ]
    choices = [each["choices"][0] for each in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == wanted != ""
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    whole = running.complete(max_tokens=1)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_draining_lets_answers_finish_and_takes_no_new_ones(serve: Serve) -> None:
    running = serve()
    release = hold(running)
    client = Client(running, max_tokens=5)
    wait_for(lambda: running.state.bridge.open_answers == 1)
    running.server.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: running.state.bridge.draining)
    assert running.http.get("/health").status_code == 503
    refusal = running.complete()
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "draining")
    assert running.thread.is_alive()
    release.set()
    assert client.result().json()["usage"]["completion_tokens"] == 5
    running.thread.join(120)
    assert not running.thread.is_alive()
    assert running.server.aborted_answers == 0


@pytest.mark.parametrize("end", ["limit", "second signal"])
def test_unfinished_answers_are_aborted_with_a_reason(serve: Serve, end: str) -> None:
    running = serve(drain_s=0.05 if end == "limit" else 100)
    release = hold(running)
    whole, streamed = Client(running), Client(running, stream=True)
    wait_for(lambda: running.state.bridge.open_answers == 2)
    running.server.handle_exit(signal.SIGTERM, None)
    if end == "second signal":
        running.server.handle_exit(signal.SIGTERM, None)
    error = whole.result().json()["error"]
    assert (whole.result().status_code, error["code"]) == (503, "shutting_down")
    assert "SIGTERM" in error["message"]
    assert '"shutting_down"' in streamed.result().text
    release.set()
    running.thread.join(120)
    assert running.server.aborted_answers == 2


def test_one_failed_step_is_survived(serve: Serve) -> None:
    running = serve()
    quiet = running.complete(max_tokens=20).json()["choices"]

    def fail() -> None:
        raise RuntimeError("once")

    client = Client(running, max_tokens=20)
    running.state.engine.at_next_step(fail)
    assert client.result().json()["choices"] == quiet
    assert running.http.get("/health").status_code == 200


def test_a_dead_engine_is_reported_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = serve()
    release = hold(running)
    client = Client(running)
    wait_for(lambda: running.state.bridge.open_answers == 1)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(running.state.engine.sampler, "verify", fail)
    release.set()
    error = client.result().json()["error"]
    assert (client.result().status_code, error["code"]) == (500, "engine_dead")
    assert "the device is lost" in error["message"]
    assert running.http.get("/health").status_code == 503
    assert running.complete().status_code == 503
    assert 'requests_refused_total{model_name="tiny",reason="engine_dead"} 1.0' in running.http.get("/metrics").text
    wait_for(lambda: b'engine_up{model_name="tiny"} 0.0' in running.state.metrics.text())


def test_a_panic_ends_the_engine_at_once(serve: Serve) -> None:
    """Libraries written in Rust raise what is no Exception. The thread would end, and nobody would know."""
    running = serve()
    release = hold(running)
    client = Client(running)
    wait_for(lambda: running.state.bridge.open_answers == 1)

    class Panic(BaseException):
        pass

    def fail() -> None:
        raise Panic("index out of bounds")

    running.state.engine.at_next_step(fail)
    release.set()
    error = client.result().json()["error"]
    assert (client.result().status_code, error["code"]) == (500, "engine_dead")
    assert "index out of bounds" in error["message"]
    assert running.http.get("/health").status_code == 503


def test_a_server_whose_engine_is_dead_ends_by_itself(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "DEAD_S", 0.2)
    running = serve()

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(running.state.engine.sampler, "verify", fail)
    assert running.complete().status_code == 500
    running.thread.join(120)
    assert not running.thread.is_alive()
    assert running.server.signal_number is None


def test_nan_logits_end_one_request_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = serve()
    sampler = running.state.engine.sampler
    verify = sampler.verify

    def spoil(logits: Any, windows: Any) -> Any:
        logits = logits.clone()
        first = 0
        for window in windows:
            if window.sequence.params.max_tokens == 7:
                logits[first] = float("nan")
            first += 1 + len(window.tree)
        return verify(logits, windows)

    monkeypatch.setattr(sampler, "verify", spoil)
    assert running.complete(max_tokens=7).json()["error"]["code"] == "model_error"
    assert running.complete(max_tokens=8).status_code == 200
