"""Access by key to models, metrics, the dashboard and /admin."""

from __future__ import annotations

import json

import pytest

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.http.keys import KeyRing, load_admin_key
from distillspec.serving.server.http.wrong_keys import WrongKeys

from ..conftest import ADMIN_KEY, API_KEY, Running, Serve

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0}


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


def test_wrong_keys_are_slowed_down_and_right_ones_pass(guarded: Running) -> None:
    def status(path: str, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        reply = guarded.http.get(path, headers=headers)
        if reply.status_code == 429:
            assert reply.json()["error"]["code"] == "too_many_wrong_keys"
            assert int(reply.headers["Retry-After"]) >= 1
        return reply.status_code

    now_s = 1000.0
    guarded.state.wrong_keys = WrongKeys(lambda: now_s)
    assert [status("/v1/models", f"wrong-key-{guess}") for guess in range(12)] == [401] * 10 + [429] * 2
    for path in ("/v1/models", "/dashboard/events", "/admin/drafts"):
        assert (status(path, "wrong-key-here"), status(path, None)) == (429, 429)
    assert (status("/v1/models", API_KEY), status("/v1/models", ADMIN_KEY)) == (200, 200)
    assert status("/admin/controller", ADMIN_KEY) == 200
    assert 'requests_refused_total{model_name="tiny",reason="unauthorised"} 18.0' in guarded.http.get("/metrics").text
