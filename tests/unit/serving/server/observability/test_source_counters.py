"""Tokens and seconds by the source that proposed them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.server.observability.source_counters import SourceCounters


def test_each_source_has_its_tokens_and_seconds() -> None:
    registry = CollectorRegistry()
    counters = SourceCounters("x:", "tiny", registry)
    trials = (Trial(1, 0, "maths", False), Trial(1, 1, "sql", True), Trial(2, 0, "maths", True))
    rows = (RowResult("a", 2, 4, 2, 3, trials), RowResult.chain("b", 2, 1, 2, source="sql"), RowResult("c", 0, 0, 0, 1))
    spent = {"maths": 0.25, "sql": 0.5, "ngram": 0.0}
    counters.observe(StepResult(rows, BatchView(()), Plan(()), 0, 0.75, 1.0, 2.0, drafted_s=spent))

    def value(name: str, source: str) -> float | None:
        return registry.get_sample_value(f"x:source_{name}_total", {"model_name": "tiny", "source": source})

    assert [value("tokens_tried", own) for own in ("maths", "sql", "ngram")] == [2, 3, None]
    assert [value("tokens_accepted", own) for own in ("maths", "sql", "ngram")] == [1, 2, None]
    assert [value("seconds", own) for own in ("maths", "sql", "ngram")] == [0.25, 0.5, 0.0]
