"""What the dashboard shows: one point a second, the last minutes of them, and latencies of recent answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

from distillspec.serving.control.base import RowResult
from distillspec.serving.requests import RequestOutput
from distillspec.serving.server.online_control import OnlineFigures
from distillspec.serving.server.worker import StepReport

HISTORY_S = 300
RECENT = 512  # answers that percentiles are taken over
PERCENTILES = (50, 90, 99)
VERSIONS = 20  # the newest draft versions


@dataclass
class _Second:
    """Sums over the steps of one second."""

    tokens: int = 0
    decoded: int = 0  # tokens and seconds of steps that only decode
    decoding_s: float = 0.0
    predicted: float = 0.0
    predicted_s: float = 0.0
    judged: int = 0  # drafted tokens up to the first rejection
    accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)


@dataclass
class _Acceptance:
    """Trials and successes by position."""

    tried: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, row: RowResult) -> None:
        self.tried.update(range(row.tried))
        self.accepted.update(range(row.accepted))

    def as_json(self) -> dict[str, Any]:
        tried, accepted = sum(self.tried.values()), sum(self.accepted.values())
        by_position = [self.accepted[place] / count for place, count in sorted(self.tried.items())]
        return {"rate": _rate(accepted, tried), "tried": tried, "by_position": by_position}


@dataclass
class _Version:
    """A draft version on all domains, and on each."""

    whole: _Acceptance = field(default_factory=_Acceptance)
    domains: dict[str, _Acceptance] = field(default_factory=dict)

    def add(self, row: RowResult) -> None:
        for seen in (self.whole, self.domains.setdefault(row.domain, _Acceptance())):
            seen.add(row)

    def as_json(self) -> dict[str, Any]:
        domains = {name: seen.as_json()["rate"] for name, seen in sorted(self.domains.items())}
        return {**self.whole.as_json(), "domains": domains}


class Telemetry:
    """Lives on the event loop. `point` closes a second; whoever watches reads `history` and what comes after."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.time) -> None:
        self.slots, self.clock = slots, clock
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_S)
        self.swaps: deque[dict[str, Any]] = deque(maxlen=VERSIONS)
        self._second = _Second()
        self._by_version: dict[str, _Version] = {}
        self._latencies: deque[tuple[float, float, float]] = deque(maxlen=RECENT)
        self._running = self._waiting = 0
        self._version: str | None = None
        self.tokens = self.requests = 0
        self.online = OnlineFigures()

    def observe_step(self, report: StepReport) -> None:
        self._running, self._waiting = report.running, report.waiting
        if report.draft_version != self._version:
            if self._version is not None:
                self.swaps.append({"t": self.clock(), "version": report.draft_version})
            self._version = report.draft_version
        result, second = report.output.result, self._second
        if result is None:
            return
        emitted = sum(row.emitted for row in result.rows)
        second.tokens += emitted
        self.tokens += emitted
        decoding = {row.sequence_id for row in result.view.rows}
        second.lengths.update(row.proposed for row in result.rows if row.sequence_id in decoding)
        if not result.prefill_tokens:
            second.decoded, second.decoding_s = second.decoded + emitted, second.decoding_s + result.total_s
            if result.plan.predicted_s is not None and result.plan.predicted_tokens is not None:
                second.predicted += result.plan.predicted_tokens
                second.predicted_s += result.plan.predicted_s
        for row in result.rows:
            if row.proposed:
                second.judged += row.tried
                second.accepted += row.accepted
                self._version_seen(row.booked_to(report.draft_version)).add(row)

    def forget_domain(self, name: str) -> None:
        """Show a domain no more."""
        for version in self._by_version.values():
            version.domains.pop(name, None)

    def observe_finished(self, output: RequestOutput) -> None:
        self.requests += 1
        for answer in output.completions:
            first, total, written = answer.stats.time_to_first_token_s, answer.stats.total_s, len(answer.token_ids)
            if first is not None and total is not None and answer.finish_reason in ("stop", "length"):
                self._latencies.append((first, (total - first) / max(1, written - 1), total))

    def point(self) -> dict[str, Any]:
        """Close the second that was, and add it to the history."""
        second, self._second = self._second, _Second()
        point = {
            "t": self.clock(),
            "tokens_per_s": second.tokens,
            "goodput": _rate(second.decoded, second.decoding_s),
            "predicted_goodput": _rate(second.predicted, second.predicted_s),
            "acceptance": _rate(second.accepted, second.judged),
            "lengths": {str(length): count for length, count in sorted(second.lengths.items())},
            "running": self._running,
            "waiting": self._waiting,
        }
        self.history.append(point)
        return point

    def state(self) -> dict[str, Any]:
        """Everything beside the history: totals, acceptance, swaps, percentiles."""
        return {
            "slots": self.slots,
            "tokens": self.tokens,
            "requests": self.requests,
            "draft_version": self._version,
            "acceptance": {version: seen.as_json() for version, seen in self._by_version.items()},
            "swaps": list(self.swaps),
            "online": asdict(self.online),
            "latency": self._percentiles(),
        }

    def _version_seen(self, version: str) -> _Version:
        if version not in self._by_version:
            self._by_version[version] = _Version()
            while len(self._by_version) > VERSIONS:
                del self._by_version[next(iter(self._by_version))]
        return self._by_version[version]

    def _percentiles(self) -> dict[str, Any] | None:
        if not self._latencies:
            return None
        values = numpy.percentile(numpy.array(self._latencies), PERCENTILES, axis=0)
        names = ("time_to_first_token_s", "time_per_output_token_s", "total_s")
        return {
            name: dict(zip(map(str, PERCENTILES), column.tolist(), strict=True))
            for name, column in zip(names, values.T, strict=True)
        }


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
