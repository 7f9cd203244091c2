"""Separation of tenants: cached prompts and places in the queue."""

from __future__ import annotations

from typing import Any

import httpx

from distillspec.serving.server.http.keys import KeyRing

from ..conftest import Running, Serve

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
