"""The figures of online adaptation in Prometheus. All series exist from the start, adapting or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distillspec.serving.server.bridge.figure import Figure
from distillspec.serving.server.bridge.online_figures import OnlineFigures, declarations


class OnlineMetrics(Collector):
    """Collector of every declared figure that has a metric. `figures` holds the newest values."""

    def __init__(self, prefix: str, model: str) -> None:
        self.figures = OnlineFigures()
        self._prefix, self._model = prefix, model

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each figure with a metric, in the order of the declarations."""
        for name, figure in declarations().items():
            if figure.metric is not None:
                yield self._family(figure.metric, figure, getattr(self.figures, name))

    def _family(self, metric: str, figure: Figure, value: Any) -> Metric:
        labels = ["model_name"] if figure.label is None else ["model_name", figure.label]
        kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
        family = kind(self._prefix + metric, figure.help, labels=labels)
        for label_values, number in figure.series(value):
            family.add_metric([self._model, *label_values], number)
        return family
