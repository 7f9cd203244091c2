"""Separation of tenants: cached prompts, places in the queue, names in figures."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from distillspec.serving.server.bridge.online_figures import JudgedVersion, OnlineFigures
from distillspec.serving.server.http.keys import KeyRing

from ..conftest import ADMIN_KEY, Running, Serve

SECRET = "the merger with Initech is signed on Friday"
KEYS = (("alice", "alice-key"), ("alice", "alice-second-key"), ("bob", "bob-key-1"))


def cached(running: Running, key: str, **fields: Any) -> int:
    """Return the prompt tokens that a request with this key found in the cache."""
    reply = running.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": SECRET, "max_tokens": 2, "temperature": 0, **fields},
        headers={"Authorization": f"Bearer {key}"},
    )
    assert reply.status_code == 200, reply.text
    found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_prompt_is_cached_for_its_own_tenant_alone(serve: Serve) -> None:
    running = serve(keys=KeyRing(KEYS), engine={"max_slots": 8})
    assert cached(running, "alice-key") == 0
    assert cached(running, "bob-key-1") == 0
    assert cached(running, "bob-key-1", user="alice", speculation={"domain": "alice"}, cache_salt="alice") == 0
    assert cached(running, "alice-key") > 16
    assert cached(running, "alice-second-key") > 16  # another key of the same tenant
    assert cached(running, "bob-key-1") > 16
    assert cached(running, "alice-key", n=2, prompt=SECRET + "!") > 16


def test_a_salt_parts_the_prompts_of_one_tenant(serve: Serve) -> None:
    running = serve(keys=KeyRing(KEYS), engine={"max_slots": 8})
    assert cached(running, "alice-key", cache_salt="one") == 0
    assert cached(running, "alice-key", cache_salt="two") == 0
    assert cached(running, "alice-key") == 0
    assert cached(running, "bob-key-1", cache_salt="one") == 0
    assert cached(running, "alice-key", cache_salt="one") > 16


def test_without_keys_everybody_shares_the_cache(serve: Serve) -> None:
    running = serve()
    assert cached(running, "none") == 0
    assert cached(running, "none", user="bob") > 16


def test_one_tenant_does_not_fill_the_queue(serve: Serve) -> None:
    running = serve(keys=KeyRing(KEYS), engine={"max_slots": 2}, max_queue=2, tenant_share=0.5)

    def ask(key: str, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "temperature": 0, **fields}
        return running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    assert ask("alice-key", n=3).json()["error"]["param"] == "n"  # more than it may ever have
    held = running.state.bridge.reserve(2, "alice")
    with held:  # as two requests of hers do, while they are open
        full = ask("alice-second-key")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert "of yours" in full.json()["error"]["message"]
        assert int(full.headers["Retry-After"]) >= 1
        assert ask("bob-key-1").status_code == 200
    assert ask("alice-key", n=2).status_code == 200
    running.wait_until_idle()
    assert running.state.bridge.places.total() == 0


def figures(running: Running, key: str | None) -> tuple[str, str]:
    """Return /metrics and the first event of the page's figures, as the holder of this key gets them."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with running.http.stream("GET", "/dashboard/events", headers=headers) as reply:
        event = next((line for line in reply.iter_lines() if line.startswith("data: ")), "")
    return running.http.get("/metrics", headers=headers).text, event


def ask_in_domain(running: Running, key: str) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "speculation": {"domain": "merger"}}
    assert running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).is_success
    running.wait_until_idle()
    running.state.telemetry.online = OnlineFigures("on", judged=(JudgedVersion("v1", "refused", "-3% on merger"),))


def judged_tokens(metrics: str) -> float:
    return sum(map(float, re.findall(r"^distillspec:draft_tokens_judged_total\S* (\S+)$", metrics, re.MULTILINE)))


def test_figures_name_domains_of_several_tenants_to_the_operator_alone(serve: Serve) -> None:
    running = serve(keys=KeyRing(KEYS), admin=KeyRing([("admin", ADMIN_KEY)]), engine={"drafts": True})
    ask_in_domain(running, "alice-key")
    metrics, event = figures(running, ADMIN_KEY)
    assert 'domain="merger"' in metrics
    assert event.count("merger") == 2, "acceptance, and the reason of a verdict"
    assert judged_tokens(metrics) > 0
    for key in ("alice-key", "bob-key-1", None):
        shown, event = figures(running, key)
        assert "merger" not in shown + event
        assert judged_tokens(shown) == judged_tokens(metrics)


@pytest.mark.parametrize(
    "settings",
    [
        {"keys": KeyRing(KEYS[:2]), "admin": KeyRing([("admin", ADMIN_KEY)])},  # one tenant: the names are its own
        {"keys": KeyRing(KEYS)},  # nobody else could see them
        {"keys": KeyRing(KEYS), "admin": KeyRing([("admin", ADMIN_KEY)]), "metrics_key": "none"},
    ],
)
def test_figures_name_domains_to_all_where_nothing_is_hidden(serve: Serve, settings: dict[str, Any]) -> None:
    running = serve(**settings, engine={"drafts": True})
    ask_in_domain(running, "alice-key")
    metrics, event = figures(running, "alice-key")
    assert 'domain="merger"' in metrics
    assert event.count("merger") == 2
