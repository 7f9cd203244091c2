"""Online adaptation in Prometheus: what it last told, as one collector; there from the start, adapting or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distillspec.serving.server.online_control import DECISIONS, DROPS, STAGES, OnlineFigures


class OnlineMetrics(Collector):
    """Shows `figures`, which whoever follows the adaptation replaces. Counters begin anew with the server, but for
    the trainer's own and the refused shards, which the folder remembers."""

    def __init__(self, prefix: str, model: str) -> None:
        self.figures = OnlineFigures()
        self._prefix, self._model = prefix, model

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        f = self.figures
        yield self._gauge("online_enabled", "1 with online=on or decoupled", f.mode != "off")
        yield self._gauge("online_paused", "1 while logging and training are paused by hand", f.paused)
        yield self._gauge("acceptance_collapsed", "1 while acceptance is a part of what it was", f.collapsed)
        yield self._gauge("draft_suspected", "1 while the draft's acceptance looks worse, unconfirmed", f.suspected)
        yield self._gauge("replay_answers", "Answers in the replay log", f.answers)
        yield self._gauge("replay_tokens", "Their tokens", f.tokens)
        yield self._gauge("replay_bytes", "Their bytes on disk", f.bytes)
        yield self._gauge("replay_waiting_tokens", "Tokens in memory that wait to be written", f.waiting_tokens)
        yield self._counter("replay_logged_answers", "Answers taken into the log", f.logged)
        yield self._by("replay_dropped_answers", "Answers left out of the log", "reason", DROPS, f.dropped)
        yield self._counter("replay_refused_shards", "Files of the log found damaged or foreign", f.refused_shards)
        yield self._by("gate_verdicts", "Candidates judged", "decision", DECISIONS, f.verdicts)
        yield self._counter("draft_promotions", "Versions promoted, by the gate or by hand", f.promotions)
        yield self._counter("draft_rollbacks", "Versions rolled back, by themselves or by hand", f.rollbacks)
        yield self._counter("online_alarms", "Alarms of online adaptation", f.alarms)
        yield self._stage(f.stage)
        yield self._counter("trainer_starts", "Starts of the embedded trainer's process", f.starts)
        yield self._counter("trainer_updates", "Updates made", f.updates)
        yield self._counter("trainer_cpu_seconds", "Processor time of updates", f.trainer_cpu_s)
        yield self._counter("trainer_seconds", "Wall time of updates", f.trainer_s)
        yield self._counter("trainer_skipped_answers", "Answers it had no time for", f.skipped)
        yield self._gauge("trainer_lag_answers", "Logged answers it has not considered", f.lag)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, what: str, label: str, all_of: tuple[str, ...], found: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, what, labels=["model_name", label])
        for value in all_of:
            family.add_metric([self._model, value], found.get(value, 0))
        return family

    def _stage(self, current: str) -> Metric:
        family = GaugeMetricFamily(
            self._prefix + "trainer_stage", "1 for what the trainer is doing", labels=["model_name", "stage"]
        )
        for stage in STAGES:
            family.add_metric([self._model, stage], stage == current)
        return family
