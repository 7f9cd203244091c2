"""`speculation.domain`: a short name, and only so many of them."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.serving.server.domains import Domains

from .conftest import Running, Serve, wait_for


def test_domains_are_told_apart_up_to_a_number() -> None:
    domains = Domains(2)
    given = ["a", "default", "b", "c", "a", "other", "d"]
    assert [domains.told_apart(name) for name in given] == ["a", "default", "b", "other", "a", "other", "other"]


@pytest.mark.parametrize("domain", ["", "x" * 65, "a\nb", 'a"b', 3, None])
def test_a_domain_is_a_short_name(served: Running, domain: Any) -> None:
    reply = served.complete(speculation={"domain": domain})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "speculation.domain")


def test_acceptance_is_followed_by_domain(serve: Serve) -> None:
    running = serve(engine={"drafts": True}, max_domains=1)
    for domain in ("SQL queries", "poems", "letters"):
        running.complete(max_tokens=20, speculation={"domain": domain})
    wait_for(lambda: running.parts.telemetry.requests == 3)
    ((version, seen),) = running.parts.telemetry.state()["acceptance"].items()
    assert set(seen["domains"]) == {"SQL queries", "other"}
    text = running.http.get("/metrics").text
    for domain in seen["domains"]:
        assert f'draft_tokens_judged_total{{domain="{domain}",draft_version="{version}",model_name="tiny"}}' in text
