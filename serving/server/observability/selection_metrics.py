"""Figures of several drafts in Prometheus and for the dashboard. Empty with one draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distillspec.serving.selection.losses import share_lost
from distillspec.serving.selection.selecting import SelectionFigures

BY_DRAFT = {
    "requests": ("selected_answers", "Answers that a draft drafted for first"),
    "tokens": ("selected_tokens", "Tokens written while a draft was chosen"),
    "seconds": ("selected_draft_seconds", "Seconds of a draft's own passes"),
    "row_seconds": ("selected_row_seconds", "Seconds of steps, each shared by its rows, while a draft was chosen"),
    "switches": ("selected_switches", "Running answers that came to a draft from another"),
}
STEPS_BY = ("step", "quantile")  # labels
QUANTILES = ("0.5", "0.99")


class SelectionMetrics(Collector):
    """Collector of the figures of selection. `figures` is the engine's own, which its thread counts on.

    `health` returns the drafts of a pool, False for those that raised, gave NaN or collapsed. None without a pool.
    """

    def __init__(self, prefix: str, model: str) -> None:
        self.figures = SelectionFigures()
        self.health: Callable[[], Mapping[str, bool]] | None = None
        self._prefix, self._model = prefix, model

    def collect(self) -> Iterable[Metric]:
        for name, (metric, about) in BY_DRAFT.items():
            family = CounterMetricFamily(self._prefix + metric, about, labels=["model_name", "draft"])
            for draft, count in _copied(getattr(self.figures, name)).items():
                family.add_metric([self._model, draft], count)
            yield family
        yield from self._collected_costs()
        yield from self._collected_health()
        about = "Seconds of the last steps in which an answer changed its draft, in which one read ahead, and of others"
        gauge = GaugeMetricFamily(self._prefix + "selection_step_seconds", about, labels=["model_name", *STEPS_BY])
        for kind, quantiles in self.steps().items():
            for quantile, seconds in quantiles.items():
                gauge.add_metric([self._model, kind, quantile], seconds)
        yield gauge

    def _collected_costs(self) -> Iterable[Metric]:
        """Yield what trials and choices have cost. A figure that is not estimated has no sample, and is not 0."""
        losses = self.figures.losses
        for metric, about, value in (
            ("selection_explored_tokens", "Tokens of answers whose draft was on trial", self.figures.explored),
            ("selection_lost_tokens", "Tokens that trials are estimated to have cost", losses.trials),
            ("selection_regret_tokens", "Tokens that choices are estimated to have cost, all together", losses.regret),
        ):
            family = CounterMetricFamily(self._prefix + metric, about, labels=["model_name"])
            if value is not None:
                family.add_metric([self._model], value)
            yield family

    def _collected_health(self) -> Iterable[Metric]:
        health = None if self.health is None else self.health()
        each = GaugeMetricFamily(
            self._prefix + "draft_healthy",
            "1 for a draft that may draft, 0 after it raised, gave NaN or collapsed",
            labels=["model_name", "draft"],
        )
        count = GaugeMetricFamily(self._prefix + "drafts_healthy", "Drafts that may draft", labels=["model_name"])
        if health is not None:
            for draft, healthy in health.items():
                each.add_metric([self._model, draft], healthy)
            count.add_metric([self._model], sum(health.values()))
        yield from (each, count)

    def steps(self) -> dict[str, dict[str, float]]:
        """Return seconds by kind of step, `switch`, `reading` or `usual`, and quantile, of kinds that have any.

        Steps that read ahead of a switch are no usual ones: they take longer.
        """
        figures = self.figures
        kinds = {
            "switch": tuple(figures.switch_s),
            "reading": tuple(figures.reading_s),
            "usual": tuple(figures.usual_s),
        }
        return {
            kind: dict(zip(QUANTILES, numpy.quantile(seconds, tuple(map(float, QUANTILES))).tolist(), strict=True))
            for kind, seconds in kinds.items()
            if seconds
        }

    def trials(self) -> dict[str, float | None] | None:
        """Return the share of tokens that trials wrote, and of tokens a second that trials and all choices cost.

        A cost that the selection does not estimate is None. All is None before any token.
        """
        if not (tokens := sum(_copied(self.figures.tokens).values())):
            return None
        costs = {"lost": self.figures.losses.trials, "regret": self.figures.losses.regret}
        shares = {name: None if lost is None else share_lost(lost, tokens) for name, lost in costs.items()}
        return {"explored": self.figures.explored / tokens, **shares}

    def table(self) -> list[dict[str, Any]]:
        """Return one row a draft for the dashboard: name, health (None: it is gone), and sums since the start."""
        columns = {name: _copied(getattr(self.figures, name)) for name in BY_DRAFT}
        health = {} if self.health is None else self.health()
        answers = sum(columns["requests"].values())
        return [
            {
                "draft": draft,
                "healthy": health.get(draft),
                "share": count / answers if answers else None,
                **{name: columns[name].get(draft, 0) for name in ("tokens", "seconds", "row_seconds", "switches")},
            }
            for draft, count in columns["requests"].items()
        ]


def _copied(counts: Mapping[str, float]) -> dict[str, float]:
    """Return a copy in one bytecode: the engine's thread may add a draft meanwhile."""
    return dict(counts)
