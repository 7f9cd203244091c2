"""Figures of the dashboard: one point a second for the last minutes, and latencies of recent answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

from distillspec.serving.base.acceptance import AcceptanceCounter, Trial, by_version
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.bridge.online_figures import OnlineFigures

HISTORY_S = 300
RECENT = 512  # answers over which percentiles are taken
PERCENTILES = (50, 90, 99)
TREES = 6  # drafted trees that the dashboard draws: their shapes, no text
VERSIONS = 20  # the newest draft versions that are kept


@dataclass
class _Second:
    """Sums over the steps of one second."""

    tokens: int = 0
    decoded: int = 0  # tokens of steps without prefill
    decoding_s: float = 0.0  # seconds of those steps
    predicted: float = 0.0  # tokens that the plans of those steps predicted
    predicted_s: float = 0.0  # seconds that they predicted
    acceptance: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    lengths: Counter[int] = field(default_factory=Counter)


@dataclass
class _Version:
    """Acceptance of one draft version on all domains together, and on each."""

    total: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    domains: dict[str, AcceptanceCounter] = field(default_factory=dict)

    def add(self, trials: Sequence[Trial], domain: str) -> None:
        for counter in (self.total, self.domains.setdefault(domain, AcceptanceCounter())):
            counter.add(trials)

    def as_json(self, names: bool) -> dict[str, Any]:
        total = self.total
        domains = {name: counter.rate for name, counter in sorted(self.domains.items()) if names}
        return {"rate": total.rate, "tried": total.tried, "by_position": total.by_position, "domains": domains}


class Telemetry:
    """Figures of one server for its dashboard. Used on the event loop alone. `point` is to be called every second."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.time) -> None:
        self.slots, self.clock = slots, clock
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_S)
        self.points = 0  # added to the history so far
        self.swaps: deque[dict[str, Any]] = deque(maxlen=VERSIONS)
        self.trees: deque[dict[str, Any]] = deque(maxlen=TREES)
        self._second = _Second()
        self._by_version: dict[str, _Version] = {}
        self._latencies: deque[tuple[float, float, float]] = deque(maxlen=RECENT)
        self._running = self._waiting = 0
        self._versions: dict[str, str] = {}  # in use, by source
        self.tokens = self.requests = 0
        self.online = OnlineFigures()

    def observe_step(self, report: StepReport) -> None:
        """Count a step."""
        self._running, self._waiting = report.running, report.waiting
        self.note_versions(report.versions)
        if report.output.result is not None:
            self._observe_result(report.output.result)

    def note_versions(self, versions: Mapping[str, str]) -> None:
        """Note the drafts in use, by source."""
        if versions == self._versions:
            return
        for source, version in versions.items():
            if self._versions and version != self._versions.get(source):
                self.swaps.append({"t": self.clock(), "version": version})
        self._versions = dict(versions)

    def _observe_result(self, result: StepResult) -> None:
        second = self._second
        emitted = sum(row.emitted for row in result.rows)
        second.tokens += emitted
        self.tokens += emitted
        decoding = {row.sequence_id for row in result.view.rows}
        second.lengths.update(row.depth for row in result.rows if row.sequence_id in decoding)
        if not result.prefill_tokens:
            second.decoded, second.decoding_s = second.decoded + emitted, second.decoding_s + result.total_s
            if result.plan.predicted_s is not None and result.plan.predicted_tokens is not None:
                second.predicted += result.plan.predicted_tokens
                second.predicted_s += result.plan.predicted_s
        for row in result.rows:
            second.acceptance.add(row.trials)
            if row.parents:
                self.trees.append({"parents": row.parents, "path": row.path})
            for version, trials in by_version(row.trials, self._versions).items():
                self._version_of(version).add(trials, row.domain)

    def forget_domain(self, name: str) -> None:
        """Drop a domain, of all versions."""
        for version in self._by_version.values():
            version.domains.pop(name, None)

    def observe_finished(self, output: RequestOutput) -> None:
        """Count a finished request and its latencies."""
        self.requests += 1
        for answer in output.completions:
            first, total, written = answer.stats.time_to_first_token_s, answer.stats.total_s, len(answer.token_ids)
            if first is not None and total is not None and answer.finish_reason in ("stop", "length"):
                gap = (total - first) / (written - 1) if written > 1 else numpy.nan
                self._latencies.append((first, gap, total))

    def point(self) -> dict[str, Any]:
        """Close the current second, add it to the history and return it."""
        second, self._second = self._second, _Second()
        point = {
            "t": self.clock(),
            "tokens_per_s": second.tokens,
            "goodput": _rate(second.decoded, second.decoding_s),
            "predicted_goodput": _rate(second.predicted, second.predicted_s),
            "acceptance": second.acceptance.rate,
            "lengths": {str(length): count for length, count in sorted(second.lengths.items())},
            "running": self._running,
            "waiting": self._waiting,
        }
        self.history.append(point)
        self.points += 1
        return point

    def state(self, *, names: bool = True) -> dict[str, Any]:
        """Return all figures but the history: totals, acceptance, swaps, percentiles. `names`: by domain too."""
        return {
            "slots": self.slots,
            "tokens": self.tokens,
            "requests": self.requests,
            "draft_version": ", ".join(self._versions.values()),
            "in_use": self._in_use(),
            "acceptance": {name: version.as_json(names) for name, version in self._by_version.items()},
            "swaps": list(self.swaps),
            "trees": list(self.trees),
            "online": asdict(self.online),
            "latency": self._percentiles(),
        }

    def rates(self) -> dict[str, float | None]:
        """Return the acceptance of the drafts in use, by source."""
        in_use = {source: self._by_version.get(version) for source, version in self._versions.items()}
        return {source: None if version is None else version.total.rate for source, version in in_use.items()}

    def _in_use(self) -> dict[str, Any]:
        """Return the acceptance of all drafts in use together. Without a draft it is that of looked-up tokens."""
        counter = AcceptanceCounter()
        for version in dict.fromkeys(self._versions.values()) or [""]:
            if version in self._by_version:
                counter.merge(self._by_version[version].total)
        return {"rate": counter.rate, "by_position": counter.by_position}

    def _version_of(self, version: str) -> _Version:
        if version not in self._by_version:
            self._by_version[version] = _Version()
            used = {"", version, *self._versions.values()}
            idle = [name for name in self._by_version if name not in used]
            for name in idle[: max(0, len(self._by_version) - VERSIONS)]:
                del self._by_version[name]
        return self._by_version[version]

    def _percentiles(self) -> dict[str, Any] | None:
        if not self._latencies:
            return None
        percentiles = {}
        names = ("time_to_first_token_s", "time_per_output_token_s", "total_s")
        for name, column in zip(names, numpy.array(self._latencies).T, strict=True):
            known = column[~numpy.isnan(column)]  # an answer of one token has no time between tokens
            values = numpy.percentile(known, PERCENTILES).tolist() if len(known) else [None] * len(PERCENTILES)
            percentiles[name] = dict(zip(map(str, PERCENTILES), values, strict=True))
        return percentiles


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
