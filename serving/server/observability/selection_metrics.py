"""Figures of several drafts in Prometheus and for the dashboard. Empty with one draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from distillspec.serving.selection.selecting import SelectionFigures

BY_DRAFT = {
    "requests": ("selected_answers", "Answers that a draft drafted for first"),
    "tokens": ("selected_tokens", "Tokens written while a draft was chosen"),
    "seconds": ("selected_draft_seconds", "Seconds of a draft's own passes"),
    "switches": ("selected_switches", "Running answers that came to a draft from another"),
}


class SelectionMetrics(Collector):
    """Collector of the figures of selection. `figures` is the engine's own, which its thread counts on."""

    def __init__(self, prefix: str, model: str) -> None:
        self.figures = SelectionFigures()
        self._prefix, self._model = prefix, model

    def collect(self) -> Iterable[Metric]:
        for name, (metric, about) in BY_DRAFT.items():
            family = CounterMetricFamily(self._prefix + metric, about, labels=["model_name", "draft"])
            for draft, count in _copied(getattr(self.figures, name)).items():
                family.add_metric([self._model, draft], count)
            yield family
        for metric, about, value in (
            ("selection_explored_tokens", "Tokens of answers whose draft was on trial", self.figures.explored),
            ("selection_lost_tokens", "Tokens that trials are estimated to have cost", self.figures.lost),
        ):
            family = CounterMetricFamily(self._prefix + metric, about, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def table(self) -> list[dict[str, Any]]:
        """Return one row a draft for the dashboard: its name, and shares and rates since the start."""
        columns = {name: _copied(getattr(self.figures, name)) for name in BY_DRAFT}
        answers = sum(columns["requests"].values())
        return [
            {
                "draft": draft,
                "share": count / answers if answers else None,
                **{name: columns[name].get(draft, 0) for name in ("tokens", "seconds", "switches")},
            }
            for draft, count in columns["requests"].items()
        ]


def _copied(counts: Mapping[str, float]) -> dict[str, float]:
    """Return a copy in one bytecode: the engine's thread may add a draft meanwhile."""
    return dict(counts)
