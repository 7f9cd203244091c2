"""Metrics without names: series by domain and by draft are added up, and all else stays."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from distillspec.serving.server.observability.without_names import WithoutNames


def test_domains_and_drafts_are_added_up() -> None:
    registry = CollectorRegistry()
    judged = Counter("judged", "By version and domain", ["draft_version", "domain"], registry=registry)
    for version, domain, count in (("a", "sql", 1), ("a", "merger", 2), ("b", "sql", 4)):
        judged.labels(version, domain).inc(count)
    chosen = Gauge("chosen", "By draft", ["draft"], registry=registry)
    for draft, count in (("general", 5), ("merger", 7)):
        chosen.labels(draft).set(count)
    Gauge("running", "Answers", registry=registry).set(3)
    lines = generate_latest(WithoutNames(registry)).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'judged_total{domain="all",draft_version="a"} 3.0',
        'judged_total{domain="all",draft_version="b"} 4.0',
        'chosen{draft="all"} 12.0',
        "running 3.0",
    ]
    assert 'domain="merger"' in generate_latest(registry).decode(), "the registry itself is as it was"
