"""`speculation.domain`: a short name, and a bounded number of labels."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.observability.domains import Domains

from ..conftest import Running, Serve, wait_for


def test_domains_have_labels_up_to_a_number() -> None:
    domains = Domains(2)
    given = ["a", "default", "b", "c", "a", "other", "d"]
    found = []
    for name in given:
        found.append(domains.label_of(name))
        domains.accept(name)
    assert found == ["a", "default", "b", "other", "a", "other", "other"]


def test_reading_a_label_takes_no_place() -> None:
    domains = Domains(1)
    assert [domains.label_of(name) for name in "abc"] == ["a", "b", "c"]
    domains.accept("c")
    assert domains.label_of("a") == "other"


def test_a_domain_out_of_use_makes_room_and_a_used_one_does_not() -> None:
    now, dropped = [0.0], []
    domains = Domains(2, idle_s=10, clock=lambda: now[0], on_dropped=dropped.append)
    domains.accept("old")
    domains.accept("busy")
    now[0] = 9
    domains.accept("busy")
    for flood in range(100):
        domains.accept(f"junk {flood}")
    assert [domains.label_of(name) for name in ("old", "busy", "junk 0")] == ["old", "busy", "other"]
    now[0] = 10
    domains.accept("new")
    domains.accept("newer")
    assert [domains.label_of(name) for name in ("old", "busy", "new", "newer")] == ["other", "busy", "new", "other"]
    assert dropped == ["old"]


def test_an_operator_may_fix_the_names() -> None:
    domains = Domains(2, fixed=["sql", "chat"], idle_s=0)
    for name in ("x", "sql", "y", "chat"):
        domains.accept(name)
    assert [domains.label_of(name) for name in ("x", "sql", "y", "chat", "default")] == [
        *("other", "sql", "other", "chat", "default")
    ]
    with pytest.raises(ConfigError, match=r"server\.max_domains=1"):
        ServerConfig(domains=["a", "b"], max_domains=1)


@pytest.mark.parametrize("domain", ["", "x" * 65, "a\nb", 'a"b', 3, None])
def test_a_domain_is_a_short_name(served: Running, domain: Any) -> None:
    reply = served.complete(speculation={"domain": domain})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "speculation.domain")


def test_acceptance_is_followed_by_domain(serve: Serve) -> None:
    running = serve(engine={"drafts": True}, max_domains=1)
    for domain in ("SQL queries", "poems", "letters"):
        running.complete(max_tokens=20, speculation={"domain": domain})
    wait_for(lambda: running.state.telemetry.requests == 3)
    ((version, seen),) = running.state.telemetry.state()["acceptance"].items()
    assert set(seen["domains"]) == {"SQL queries", "other"}
    text = running.http.get("/metrics").text
    for domain in seen["domains"]:
        assert f'draft_tokens_judged_total{{domain="{domain}",draft_version="{version}",model_name="tiny"}}' in text


def test_refused_requests_take_no_place(serve: Serve) -> None:
    running = serve(max_domains=1)
    for name, fields in (("a", {"prompt": "x" * 300}), ("b", {"n": 17}), ("c", {"model": "none"})):
        assert running.complete(**fields, speculation={"domain": name}).status_code in (400, 404)
    assert running.complete(speculation={"domain": "d"}).status_code == 200
    assert [running.state.domains.label_of(name) for name in "abcd"] == ["other", "other", "other", "d"]


def test_the_series_of_a_replaced_domain_go(serve: Serve) -> None:
    running = serve(engine={"drafts": True}, max_domains=1)
    running.state.domains.idle_s = 0.0
    for domain in ("SQL queries", "poems"):
        running.complete(max_tokens=20, speculation={"domain": domain})
        running.wait_until_idle()
    text = running.http.get("/metrics").text
    assert 'domain="poems"' in text
    assert 'domain="SQL queries"' not in text
    ((_, seen),) = running.state.telemetry.state()["acceptance"].items()
    assert set(seen["domains"]) == {"poems"}
