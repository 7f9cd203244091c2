"""Steps by kind, and costs that are absent where nothing estimates them."""

from __future__ import annotations

from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.selecting import SelectionFigures
from distillspec.serving.server.observability.selection_metrics import SelectionMetrics


def names(metrics: SelectionMetrics) -> set[str]:
    """Return the metrics that have a value."""
    return {family.name for family in metrics.collect() if family.samples}


def test_steps_are_told_apart_by_kind() -> None:
    metrics = SelectionMetrics("", "tiny")
    assert metrics.steps() == {}
    metrics.figures.usual_s.extend([1.0, 2.0, 3.0])
    metrics.figures.reading_s.append(4.0)
    metrics.figures.switch_s.append(5.0)
    steps = metrics.steps()
    assert {kind: own["0.5"] for kind, own in steps.items()} == {"switch": 5.0, "reading": 4.0, "usual": 2.0}
    assert steps["usual"]["0.99"] > 2.9
    (family,) = [each for each in metrics.collect() if each.name == "selection_step_seconds"]
    assert {sample.labels["step"] for sample in family.samples} == {"switch", "reading", "usual"}


def test_costs_are_there_as_far_as_they_are_estimated() -> None:
    metrics = SelectionMetrics("", "tiny")
    assert metrics.trials() is None
    metrics.figures = SelectionFigures(explored=20, losses=Losses())
    metrics.figures.tokens["a"] = 75
    assert metrics.trials() == {"explored": 20 / 75, "lost": None, "regret": None}
    costs = {"selection_lost_tokens", "selection_regret_tokens"}
    assert not names(metrics) & costs
    metrics.figures.losses.add(0.0)
    assert metrics.trials() == {"explored": 20 / 75, "lost": 0.0, "regret": None}
    assert names(metrics) & costs == {"selection_lost_tokens"}
    metrics.figures.losses.add(5.0, 25.0)
    assert metrics.trials() == {"explored": 20 / 75, "lost": 5 / 80, "regret": 0.25}
    assert names(metrics) >= costs
