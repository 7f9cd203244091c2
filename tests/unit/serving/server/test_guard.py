"""Refusals of the guard: sizes, headers, slow senders, other names of this machine. Which of them are counted."""

from __future__ import annotations

import json
import re

import pytest

from .conftest import ADMIN_KEY, API_KEY, Running, Serve, wait_for
from .raw_http import HEAD, connection, exchange, read_until, status_of

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0}


def test_a_large_body_is_refused_before_and_while_it_comes(serve: Serve) -> None:
    running = serve(max_body_kib=4)
    assert running.complete(prompt="x" * 5000).status_code == 413
    head = HEAD + "Transfer-Encoding: chunked\r\n\r\n"
    with connection(running) as raw:
        raw.sendall(
            head.encode() + b"1000\r\n" + b"x" * 4096 + b"\r\n1000\r\n" + b"x" * 4096 + b"\r\n"
        )  # without an end
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    assert running.complete().status_code == 200


def test_slow_headers_and_slow_bodies_are_cut(serve: Serve) -> None:
    running = serve(header_timeout_s=2.0, body_timeout_s=2.0)  # long enough for what is sent at once
    with connection(running) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
        assert raw.recv(100) == b""
    with connection(running) as raw:
        raw.sendall(b"")
        assert raw.recv(100) == b""
    with connection(running) as raw:
        raw.sendall((HEAD + "Content-Length: 1000\r\n\r\n{").encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")
    with connection(running) as raw:  # a second request on a connection that began well
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"transformers" in read_until(raw, b"}")
        raw.sendall(b"GET /version HTTP/1.1\r\nHo")
        assert raw.recv(4096) == b""
    assert running.complete().status_code == 200


def test_a_client_that_leaves_while_it_sends_is_no_failure(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    running = serve()
    with connection(running) as raw:
        raw.sendall((HEAD + "Content-Length: 1000\r\n\r\n{").encode())
    wait_for(lambda: 'status="499"' in running.state.metrics.text().decode())
    assert "a request failed" not in caplog.text
    assert 'status="500"' not in running.state.metrics.text().decode()


def test_nobody_goes_on_sending_after_a_refusal(guarded: Running) -> None:
    with connection(guarded) as raw:
        raw.sendall((HEAD + "Content-Length: 100000\r\n\r\n{").encode())
        reply = b""
        while piece := raw.recv(65536):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 99999999999999999999999\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        "Host: other\r\n",
        "X-Big: " + "x" * 40000 + "\r\n",
        "X-Null: a\0b\r\n",
        " folded: x\r\n",
    ],
)
def test_smuggled_headers_are_refused(served: Running, headers: str) -> None:
    reply = exchange(served, HEAD + headers + "\r\n0\r\n\r\nGET /admin/drafts HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert status_of(reply) in (400, 413, 415, 431, 501)
    assert reply.count("HTTP/1.1") <= 2
    assert '"drafts"' not in reply


def test_long_headers_are_refused_that_come_in_one_piece(served: Running) -> None:
    """h11 bounds those that come in several pieces alone."""
    reply = exchange(served, f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Big: {'x' * 40_000}\r\n\r\n")
    assert status_of(reply) == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""])
def test_other_names_of_this_machine_are_refused_without_a_key(served: Running, host: str) -> None:
    assert served.http.get("/v1/models", headers={"Host": host}).status_code == 421
    assert served.http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_a_page_of_another_origin_cannot_post(served: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = served.http.post("/v1/completions", content=json.dumps(BODY), headers={"Content-Type": kind})
        assert reply.status_code == 415
    reply = served.http.options(
        "/v1/completions", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers


def test_named_origins_may_call(serve: Serve) -> None:
    running = serve(cors_origins=["https://good.example"])
    headers = "authorization,content-type,x-request-id,x-stainless-lang,x-stainless-retry-count"  # of OpenAI's client
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    good = running.http.options("/v1/completions", headers={**ask, "Origin": "https://good.example"})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    bad = running.http.options("/v1/completions", headers={**ask, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in bad.headers


def refusals(running: Running) -> dict[str, int]:
    """Return the refusals that were counted, by reason, without those of which there are none."""
    text = running.http.get("/metrics").text
    found = re.findall(r'^distillspec:requests_refused_total\{.*reason="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {reason: int(count) for reason, count in found if int(count)}


def test_refused_keys_and_requests_for_the_model_are_counted(guarded: Running) -> None:
    own = {"Authorization": f"Bearer {API_KEY}"}
    for path in ("/v1/models", "/admin/drafts", "/dashboard/events", "/tokenize"):
        guarded.http.request("POST" if path == "/tokenize" else "GET", path)
    assert refusals(guarded) == {"unauthorised": 4}
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        assert guarded.http.post(path, json={"what": 1}, headers=own).status_code == 400
    assert guarded.http.get("/v1/models/other", headers=own).status_code == 404
    assert refusals(guarded) == {"unauthorised": 4, "invalid": 3, "other": 1}
    for path in ("/favicon.ico", "/v1/nothing", "/tokenizer", "/admin/nothing"):
        assert guarded.http.get(path, headers=own).status_code == 404
    assert refusals(guarded) == {"unauthorised": 4, "invalid": 3, "other": 1}, "nobody asked for anything"


def test_a_probe_of_a_server_that_drains_is_no_refused_request(guarded: Running) -> None:
    guarded.http.post("/admin/drain", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert [guarded.http.get("/health").status_code for _ in range(3)] == [503] * 3
    assert refusals(guarded) == {}
    asked = guarded.http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {API_KEY}"})
    assert asked.status_code == 503
    assert refusals(guarded) == {"draining": 1}
