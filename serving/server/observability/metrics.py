"""Prometheus metrics under vLLM's names with the prefix `distillspec:`. They exist from the start, at zero.

Those by draft, source, domain or route have a series from its first use on.

`docs/operators.md` explains each one. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.observability.acceptance_counters import AcceptanceCounters
from distillspec.serving.server.observability.online_metrics import OnlineMetrics
from distillspec.serving.server.observability.selection_metrics import SelectionMetrics
from distillspec.serving.server.observability.source_counters import SourceCounters
from distillspec.serving.server.observability.without_names import WithoutNames

PREFIX = "distillspec:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("queue_full", "draining", "engine_dead", "invalid", "unauthorised", "too_large", "other")
PARTS = ("draft", "target", "rest")


class Metrics:
    """All metrics of one server, on its own registry.

    Args:
        model: the label `model_name`.
        speculation_length: largest speculation length. Positions 0 … speculation_length − 1 exist from the start.
        slots: most answers that decode in one step.
        cache_tokens: most tokens in the KV cache.
        verification: `EngineConfig.verification`.
    """

    def __init__(
        self, model: str, speculation_length: int, slots: int, cache_tokens: int, verification: str = "exact"
    ) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        self._cache_tokens = cache_tokens
        self._versions: dict[str, str] = {}
        self._verification = verification
        self.declare_gauges()
        self.declare_counters(speculation_length)
        self.declare_histograms(speculation_length)
        self.acceptance = AcceptanceCounters(PREFIX, model, self.registry)
        self.sources = SourceCounters(PREFIX, model, self.registry)
        self.online = OnlineMetrics(PREFIX, model)
        self.registry.register(self.online)
        self.selection = SelectionMetrics(PREFIX, model)
        self.registry.register(self.selection)
        self.slots.set(slots)
        self.up.set(1)

    def observe_step(self, report: StepReport) -> None:
        """Count a step and note the engine's load."""
        self.running.set(report.running)
        self.waiting.set(report.waiting)
        self.cache_usage.set(report.cached_tokens / self._cache_tokens)
        self.note_versions(report.versions)
        result = report.output.result
        if result is None:
            return
        self.acceptance.observe(report.versions, result.rows)
        self.sources.observe(result)
        self._observe_rows(result.rows)
        emitted = sum(row.emitted for row in result.rows)
        self.generation_tokens.inc(emitted)
        self.prompt_tokens.inc(result.prefill_tokens)
        self.iteration_tokens.observe(emitted + result.prefill_tokens)
        rest_s = max(0.0, result.total_s - result.draft_s - result.target_s)
        for part, seconds in zip(PARTS, (result.draft_s, result.target_s, rest_s), strict=True):
            self.step_seconds[part].inc(seconds)
        if result.total_s > 0 and not result.prefill_tokens:
            self.goodput.set(emitted / result.total_s)
            plan = result.plan
            if plan.predicted_s and plan.predicted_tokens is not None:
                self.predicted_goodput.set(plan.predicted_tokens / plan.predicted_s)

    def _observe_rows(self, rows: Sequence[RowResult]) -> None:
        for row in rows:
            self.speculation_length.observe(row.depth)
        if drafted := [row for row in rows if row.nodes]:
            kept = [row.kept for row in drafted]
            self.drafts.inc(len(drafted))
            self.draft_tokens.inc(sum([row.nodes for row in drafted]))
            self.accepted_tokens.inc(sum(kept))
            for position, counter in enumerate(self.accepted_at[: max(kept)]):
                counter.inc(sum([count > position for count in kept]))

    def observe_finished(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self.prefix_queries.inc(len(output.prompt_ids) * len(output.completions))
        self.request_prompt_tokens.observe(len(output.prompt_ids))
        for answer in output.completions:
            stats, written = answer.stats, len(answer.token_ids)
            self.finished[answer.finish_reason].inc()
            self.preemptions.inc(stats.preemptions)
            self.prefix_hits.inc(stats.prefix_tokens)
            self.request_tokens.observe(written)
            self._observe_seconds(self.queue_seconds, stats.queue_s)
            self._observe_seconds(self.first_token_seconds, stats.time_to_first_token_s)
            self._observe_seconds(self.total_seconds, stats.total_s)
            if written > 1 and stats.total_s is not None and stats.time_to_first_token_s is not None:
                self.token_seconds.observe((stats.total_s - stats.time_to_first_token_s) / (written - 1))

    def observe_refusal(self, code: str) -> None:
        """Count a refused request by its error code."""
        self.refused[code if code in REFUSALS else "other"].inc()

    def observe_http(self, route: str, status: int) -> None:
        """Count an HTTP request by route and status."""
        self.http.labels(route=route, status=str(status), **self._label).inc()

    def text(self, *, names: bool = True) -> bytes:
        """Return the exposition that Prometheus scrapes. Without `names`, domains and drafts are added up."""
        return generate_latest(self.registry if names else WithoutNames(self.registry))

    @staticmethod
    def _observe_seconds(histogram: Histogram, seconds: float | None) -> None:
        if seconds is not None:
            histogram.observe(seconds)

    def note_versions(self, versions: Mapping[str, str]) -> None:
        """Note the drafts in use, by source."""
        if versions == self._versions:
            return
        before, self._versions = self._versions, dict(versions)
        self.swaps.inc(sum(source in before and before[source] != current for source, current in versions.items()))
        self.draft_info.clear()
        for version in dict.fromkeys(versions.values()) or [""]:
            self.draft_info.labels(draft_version=version, **self._label).set(1)

    def declare_gauges(self) -> None:
        """Declare every metric that holds the newest value. Called once, before the first step."""
        self.up = self._gauge("engine_up", "1 while the engine steps, 0 once it is given up")
        self.slots = self._gauge("num_slots", "Answers that may decode side by side")
        self.running = self._gauge("num_requests_running", "Answers that hold a slot")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for a slot")
        self.cache_usage = self._gauge("kv_cache_usage_perc", "Share of the cache's tokens set aside, 0 to 1")
        self.goodput = self._gauge("goodput_tokens_per_second", "Tokens a second of the last decoding step")
        self.predicted_goodput = self._gauge(
            "goodput_predicted_tokens_per_second", "What the length controller predicted for it"
        )
        self.draft_info = Gauge(
            PREFIX + "draft_info", "1 for the draft in use", [*self._label, "draft_version"], registry=self.registry
        )
        self.draft_info.labels(draft_version="", **self._label).set(1)
        verified = Gauge(
            PREFIX + "verification_info",
            "1 for the verification in use. All but exact are lossy",
            [*self._label, "verification"],
            registry=self.registry,
        )
        verified.labels(verification=self._verification, **self._label).set(1)

    def declare_counters(self, speculation_length: int) -> None:
        """Declare every metric that only grows. Called once, before the first step."""
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written")
        self.preemptions = self._counter("num_preemptions", "Answers that lost their slot for a while")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found there")
        self.drafts = self._counter("spec_decode_num_drafts", "Windows verified")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self.accepted_at = list(
            self._labelled(
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafted tokens accepted, by position",
                "position",
                map(str, range(speculation_length)),
            ).values()
        )
        self.swaps = self._counter("draft_swaps", "Changes of the draft in use")
        self.finished = self._labelled("request_success", "Answers finished", "finished_reason", REASONS)
        self.refused = self._labelled("requests_refused", "Requests refused at the door", "reason", REFUSALS)
        self.disconnects = self._counter("client_disconnects", "Requests whose client left before the end")
        self.step_seconds = self._labelled(
            "step_seconds", "Seconds of engine steps, by what they went to", "part", PARTS
        )
        self.http = Counter(
            PREFIX + "http_requests", "HTTP requests", [*self._label, "route", "status"], registry=self.registry
        )

    def declare_histograms(self, speculation_length: int) -> None:
        """Declare every distribution. Called once, before the first step."""
        self.first_token_seconds = self._histogram("time_to_first_token_seconds", "Submission to first token", SECONDS)
        self.token_seconds = self._histogram("time_per_output_token_seconds", "Mean gap between tokens", SECONDS)
        self.total_seconds = self._histogram("e2e_request_latency_seconds", "Submission to last token", SECONDS)
        self.queue_seconds = self._histogram("request_queue_time_seconds", "Submission to a slot", SECONDS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.request_tokens = self._histogram("request_generation_tokens", "Tokens of an answer", TOKENS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens read and written a step", STEP_TOKENS)
        lengths = tuple(range(speculation_length + 1))
        self.speculation_length = self._histogram("speculation_length", "Drafted tokens of a row and step", lengths)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(PREFIX + name, what, list(self._label), registry=self.registry).labels(**self._label)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(PREFIX + name, what, list(self._label), registry=self.registry).labels(**self._label)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, what, list(self._label), buckets=buckets, registry=self.registry)
        return made.labels(**self._label)

    def _labelled(self, name: str, what: str, label: str, values: Iterable[str]) -> Mapping[str, Counter]:
        made = Counter(PREFIX + name, what, [*self._label, label], registry=self.registry)
        return {value: made.labels(**{label: value}, **self._label) for value in values}
