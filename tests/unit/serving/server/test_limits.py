"""What must not come in, does not: keys, sizes, nesting, headers, slow senders, other names of this machine."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.keys import ADMIN_KEY as ADMIN_VARIABLE
from distillspec.serving.server.keys import API_KEYS, KeyRing, load_admin_key, load_api_keys
from distillspec.serving.server.listening import bind, check_exposure

from .conftest import ADMIN_KEY, API_KEY, WAIT_S, Running, Serve

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@contextmanager
def connection(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        yield raw


def exchange(running: Running, request: str | bytes) -> str:
    """Send bytes as they are; everything that comes until the server closes."""
    with connection(running) as raw:
        raw.sendall(request.encode("latin-1") if isinstance(request, str) else request)
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while piece := raw.recv(65536):
            received += piece
    return received.decode("utf-8", "replace")


def read_until(raw: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = raw.recv(65536)
        assert piece, received
        received += piece
    return received


def status_of(reply: str) -> int:
    return int(reply.split(" ", 2)[1])


@pytest.mark.parametrize("given", [None, "Bearer wrong-key-here", f"Basic {API_KEY}", API_KEY, "Bearer", "Bearer é"])
def test_a_wrong_key_is_refused_everywhere(guarded: Running, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/dashboard/events")):
        reply = guarded.http.request(method, path, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert API_KEY not in reply.text
    assert guarded.http.get("/admin/drafts", headers=headers).status_code == 401
    assert guarded.http.get("/health").status_code == 200


def test_a_right_key_opens_models_but_not_admin(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with caplog.at_level("INFO", "distillspec"):
        assert guarded.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        guarded.wait_until_idle()
    assert guarded.http.get("/admin/controller", headers=headers).status_code == 401
    assert guarded.http.get("/admin/controller", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert any(line.get("tenant") == "alice" for line in lines)
    assert API_KEY not in caplog.text + json.dumps(lines)


@pytest.mark.parametrize(
    ("settings", "opened_by"),
    [
        ({}, {"none", "api", "admin"}),  # this machine's own
        ({"host": "0.0.0.0"}, {"api", "admin"}),
        ({"host": "0.0.0.0", "metrics_key": "none"}, {"none", "api", "admin"}),
        ({"host": "0.0.0.0", "metrics_key": "admin"}, {"admin"}),
        ({"metrics_key": "admin"}, {"admin"}),
    ],
)
def test_metrics_need_a_key_beyond_this_machine(serve: Serve, settings: dict[str, str], opened_by: set[str]) -> None:
    running = serve(keys=KeyRing([("alice", API_KEY)]), admin=KeyRing([("admin", ADMIN_KEY)]), **settings)
    keys = {"none": None, "wrong": "wrong-key-here", "api": API_KEY, "admin": ADMIN_KEY}
    statuses = {}
    for name, key in keys.items():
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        statuses[name] = running.http.get("/metrics", headers=headers).status_code
    opened_by = opened_by | ({"wrong"} if "none" in opened_by else set())
    assert statuses == {name: 200 if name in opened_by else 401 for name in keys}


def test_an_operator_may_keep_the_figures_of_the_page(serve: Serve) -> None:
    running = serve(keys=KeyRing([("alice", API_KEY)]), admin=KeyRing([("admin", ADMIN_KEY)]), metrics_key="admin")
    for key, status in ((API_KEY, 401), (ADMIN_KEY, 200)):
        headers = {"Authorization": f"Bearer {key}"}
        with running.http.stream("GET", "/dashboard/events", headers=headers) as reply:
            assert reply.status_code == status


def test_a_server_without_keys_shows_its_metrics(serve: Serve) -> None:
    assert serve(host="0.0.0.0", allow_open=True).http.get("/metrics").status_code == 200
    with pytest.raises(ConfigError, match=r"server\.metrics_key=admin needs an admin key"):
        load_admin_key(ServerConfig(metrics_key="admin"))


def test_admin_without_a_key_is_closed(served: Running) -> None:
    reply = served.http.get("/admin/drafts")
    assert reply.status_code == 403
    assert "server.admin_key_file" in reply.json()["error"]["message"]


def test_keys_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice: alice-key-1\n\nbare-key-22\n")
    monkeypatch.setenv(API_KEYS, "from-env-1, from-env-2")
    ring = load_api_keys(ServerConfig(api_key_file=str(file)))
    tenants = [ring.tenant(key) for key in ("alice-key-1", "bare-key-22", "from-env-2", "alice", "")]
    assert tenants == ["alice", "default", "default", None, None]
    assert "alice-key-1" not in repr(ring._keys)
    monkeypatch.setenv(ADMIN_VARIABLE, "admin-key-1")
    assert load_admin_key(ServerConfig()).tenant("admin-key-1") == "admin"


@pytest.mark.parametrize("text", ["", "# nothing\n", "alice:short\n", "alice:käse-käse-käse\n"])
def test_an_unusable_key_file_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_api_keys(ServerConfig(api_key_file=str(file)))
    assert "short" not in str(refusal.value)
    assert "käse" not in str(refusal.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.0.2.1"])
def test_listening_wider_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allow_open"):
        check_exposure(ServerConfig(host=host), has_keys=False)
    check_exposure(ServerConfig(host=host), has_keys=True)
    check_exposure(ServerConfig(host=host, allow_open=True), has_keys=False)
    check_exposure(ServerConfig(host="::1"), has_keys=False)


def test_a_port_in_use_is_named() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind(ServerConfig(host="192.0.2.1", port=0))


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watch(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("distillspec.serving.server.keys.hmac.compare_digest", watch)
    ring = KeyRing([("a", "first-key"), ("b", "second-key"), ("c", "third-key")])
    assert ring.tenant("first-key") == "a"
    assert len(compared) == 3  # no early end, whichever key it was
    assert {len(one) for pair in compared for one in pair} == {32}  # digests: lengths tell nothing


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
    running = serve(header_timeout_s=0.5, body_timeout_s=0.5)
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
    ask = {"Access-Control-Request-Method": "POST"}
    good = running.http.options("/v1/completions", headers={**ask, "Origin": "https://good.example"})
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    bad = running.http.options("/v1/completions", headers={**ask, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in bad.headers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "speculation": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"-1": 1}}',
        b"\x1f\x8b\x08\x00garbage",
    ],
)
def test_bodies_that_are_no_request_are_refused(served: Running, body: bytes) -> None:
    reply = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert len(reply.text) < 1000


VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**30,
    0.5,
    -1e308,
    "",
    "x",
    "\0",
    "é" * 50,
    [],
    [[]],
    {},
    {"a": []},
)


def mutated(body: dict[str, Any], dice: random.Random) -> bytes:
    """A body with one to three things changed: fields, values, or bytes."""
    changed = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 3)):
        choice = dice.random()
        name = dice.choice([*body, "n", "stop", "logprobs", "seed", "stream", "logit_bias", "speculation", "x"])
        if choice < 0.2:
            changed.pop(name, None)
        elif choice < 0.9:
            changed[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    if dice.random() < 0.3 and raw:
        for _ in range(dice.randint(1, 4)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


def test_mutated_bodies_do_no_harm(serve: Serve) -> None:
    served = serve(engine={"max_model_len": 32, "drafts": True})
    quiet = served.complete(max_tokens=5).json()["choices"]
    dice = random.Random(0)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    statuses = set()
    for round_ in range(200):
        path, body = (("completions", BODY), ("chat/completions", chat))[round_ % 2]
        raw = mutated(body, dice)
        reply = served.http.post(f"/v1/{path}", content=raw, headers={"Content-Type": "application/json"})
        statuses.add(reply.status_code)
        assert reply.status_code in (200, 400, 404), (raw, reply.text)
    assert statuses == {200, 400, 404}
    served.wait_until_idle()
    assert served.complete(max_tokens=5).json()["choices"] == quiet
