"""Earnings and costs of each of several sources, for Prometheus: drafts, n-grams, lookups."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from distillspec.serving.base.plans import StepResult


class SourceCounters:
    """Prometheus counters of tokens by the source that proposed them.

    Where several sources draft for the same tokens of a row, those of the earlier ones are tried first. So the accepted
    tokens of a source are what it earned beside the others.
    """

    def __init__(self, prefix: str, model: str, registry: CollectorRegistry) -> None:
        self._model = model

        def counter(name: str, about: str) -> Counter:
            return Counter(prefix + name, about, ["model_name", "source"], registry=registry)

        self._tried = counter("source_tokens_tried", "Drafted tokens that verification tried")
        self._accepted = counter("source_tokens_accepted", "Of these, the accepted ones")
        self._seconds = counter("source_seconds", "Seconds of proposing, where several sources stand side by side")

    def observe(self, result: StepResult) -> None:
        """Count a step."""
        counts: dict[str, tuple[int, int]] = {}
        for row in result.rows:
            for trial in row.trials:
                tried, accepted = counts.get(trial.source, (0, 0))
                counts[trial.source] = tried + 1, accepted + trial.accepted
        for source, (tried, accepted) in counts.items():
            self._tried.labels(self._model, source).inc(tried)
            self._accepted.labels(self._model, source).inc(accepted)
        for source, seconds in result.drafted_s.items():
            self._seconds.labels(self._model, source).inc(max(0.0, seconds))
