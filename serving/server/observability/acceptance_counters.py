"""Acceptance by draft version and domain, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter

from distillspec.serving.base.acceptance import AcceptanceCounter, RowResult, by_version

VERSIONS = 20  # draft versions: series of older ones are dropped, but for those in use


class AcceptanceCounters:
    """Prometheus counters of α = accepted / judged, by draft version and domain.

    A window is judged up to and with its first rejected token, and siblings by the first of them. Tokens of sources
    without a model count under the empty version, which is never dropped.
    """

    def __init__(self, prefix: str, model: str, registry: CollectorRegistry) -> None:
        labels = ["model_name", "draft_version", "domain"]
        self._model = model
        self._judged = Counter(
            prefix + "draft_tokens_judged", "Drafted tokens up to the first rejection", labels, registry=registry
        )
        self._accepted = Counter(
            prefix + "draft_tokens_accepted", "Of these, the accepted ones", labels, registry=registry
        )
        self._domains: dict[str, set[str]] = {}  # by version: domains that have a series

    def observe(self, versions: Mapping[str, str], rows: Iterable[RowResult]) -> None:
        """Count the rows of a step that used the drafts of these `versions`, by source."""
        counters: dict[tuple[str, str], AcceptanceCounter] = {}
        for row in rows:
            for booked, trials in by_version(row.trials, versions).items():
                if (counter := counters.get((booked, row.domain))) is None:
                    counter = counters[booked, row.domain] = AcceptanceCounter()
                counter.add(trials)
        for (booked, domain), counter in counters.items():
            self._domains.setdefault(booked, set()).add(domain)
            labels = self._model, booked, domain
            self._judged.labels(*labels).inc(counter.tried)
            self._accepted.labels(*labels).inc(counter.firsts)
        named = [name for name in self._domains if name]
        idle = [name for name in named if name not in versions.values()]
        for name in idle[: max(0, len(named) - VERSIONS)]:
            self._drop(name)

    def forget_domain(self, name: str) -> None:
        """Drop a domain's series, of all versions."""
        for version, domains in self._domains.items():
            if name in domains:
                domains.remove(name)
                self._remove(version, name)

    def _drop(self, version: str) -> None:
        for domain in self._domains.pop(version):
            self._remove(version, domain)

    def _remove(self, version: str, domain: str) -> None:
        self._judged.remove(self._model, version, domain)
        self._accepted.remove(self._model, version, domain)
