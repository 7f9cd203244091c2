"""Acceptance in service, by version and domain: finds regressions and raises the alarm on a collapse."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from distillspec.config import GateConfig
from distillspec.evaluation.bootstrap import interval
from distillspec.serving.base.acceptance import AcceptanceCounter, of_source
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.online.state.version import ServedRecord
from distillspec.serving.online.training.drift import SETTLED, ShortLongAverages
from distillspec.serving.step.commit import Emission
from distillspec.types import Interval

log = logging.getLogger(__name__)

CHECK_EVERY = 8  # requests. A check after each one would find a difference by chance sooner or later.
DOUBTFUL = 0.5  # times half of a loss's 95 % interval: about one standard error. A suspicion only asks for proof
FEWEST = 4  # the fewest requests that show a collapse. The controller soon stops trying a draft that brings nothing
SHOWN = 8  # versions whose intervals `figures` computes


class AcceptanceCounts(NamedTuple):
    """Drafted tokens of one finished request under one version."""

    domain: str
    tried: int
    accepted: int


@dataclass
class AnswerCounts:
    """Drafted tokens of one answer: version → [tried, accepted]."""

    domain: str
    counts: dict[str, list[int]]
    failed: bool = False  # a failure of the draft is counted


class ServedAcceptance:
    """Counts acceptance of every request, logged or not.

    The engine's thread calls `watch` and `finish`. Any thread may call the rest.

    Args:
        alarm: called once when acceptance collapses. Default: an error in the log.
        source: the draft that is counted.
    """

    def __init__(self, config: GateConfig, alarm: Callable[[str], None] | None = None, source: str = DRAFT) -> None:
        self.config, self.source = config, source
        self.alarm = alarm or (lambda message: log.error("%s", message))
        self._running: dict[tuple[str, int], AnswerCounts] = {}
        self._recent_counts: dict[str, deque[AcceptanceCounts]] = {}
        self._totals: dict[str, Counter[str]] = {}
        self._averages = ShortLongAverages()
        self._collapsed = False
        self._earlier: dict[str, int] = {}  # requests of a version before it last came into service
        self._finished = 0  # requests with drafted tokens
        self._ended = 0  # all requests
        self._changed: set[str] = set()  # versions counted since `take_changed`
        self._lock = Lock()

    def watch(self, emissions: Sequence[Emission]) -> None:
        """Count a step's accepted and rejected tokens."""
        for emission in emissions:
            sequence = emission.sequence
            key = (sequence.request.id, sequence.index)
            counter = AcceptanceCounter()
            counter.add(of_source(emission.trials, self.source))
            tried, accepted = counter.tried, counter.firsts
            failed = self.source in sequence.failed_sources
            if not tried and not failed:
                continue
            answer = self._running.setdefault(key, AnswerCounts(sequence.request.domain, {}))
            if failed and not answer.failed:
                answer.failed = True  # NaN or an exception counts as one rejection
                tried += 1
            counts = answer.counts.setdefault(emission.versions.get(self.source, ""), [0, 0])
            counts[0] += tried
            counts[1] += accepted

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Count requests that ended."""
        for output in outputs:
            ended = [self._running.pop((output.request_id, each.index), None) for each in output.completions]
            if answers := [answer for answer in ended if answer is not None]:
                self.count(answers)
            else:
                self._ended += 1

    def begin_service(self, version: str) -> None:
        """Note that `version` comes into service. `regression` ignores what it served before."""
        with self._lock:
            if version in self._totals:
                self._earlier[version] = self._totals[version]["requests"]
                self._changed.add(version)

    def take_changed(self) -> list[ServedRecord]:
        """Return the records of all versions counted since the last call, for the registry to keep."""
        with self._lock:
            versions, self._changed = sorted(self._changed), set()
            return [
                ServedRecord(
                    v,
                    {**self._totals[v], "earlier": self._earlier.get(v, 0)},
                    [list(counts) for counts in self._recent_counts.get(v, ())],
                )
                for v in versions
            ]

    def restore(self, records: Sequence[ServedRecord]) -> None:
        """Continue from the records of an earlier process. Call it before anything is served."""
        for record in records:
            if record.recent:
                self._recent_counts[record.version] = deque(
                    (AcceptanceCounts(*counts) for counts in record.recent), maxlen=self.config.window
                )
            totals = dict(record.totals)
            self._earlier[record.version] = totals.pop("earlier", 0)
            self._totals[record.version] = Counter(totals)

    def acceptance(self, version: str, domains: set[str] | None = None) -> Interval | None:
        """Return α of the newest requests with its interval. None: nothing was drafted."""
        return self._interval([c for c in self._recent(version) if domains is None or c.domain in domains])

    def regression(self, version: str, predecessor: str) -> str | None:
        """Return why `version` looks worse than its predecessor on their common domains, None if it does not.

        A few requests are enough for a collapse, acceptance below `gate.collapse` times that.
        The predecessor's domains are weighted by the traffic of the version, so that a shift between domains is no
        regression. The two served different requests at different times. Text that got harder within a domain looks the
        same as a worse draft.
        """
        enough = self.config.rollback_requests
        new, old = self._in_service(version), self._recent(predecessor)
        new_counts, old_counts = Counter(s.domain for s in new), Counter(s.domain for s in old)
        least = min(self.config.domain_requests, enough)
        known = {d for d in new_counts if old_counts[d] >= least}
        shared = {d for d in known if new_counts[d] >= least}
        if sum(new_counts[d] for d in shared) < enough:  # enough for a collapse?
            shared = {d for d in known if new_counts[d] >= min(FEWEST, least)}
        new = [s for s in new if s.domain in shared]
        if len(new) < min(FEWEST, enough):
            return None
        now = self._interval(new)
        if now is None:
            return None
        tried = {d: sum(s.tried for s in new if s.domain == d) for d in shared}
        old_of = {d: self._interval([s for s in old if s.domain == d]) for d in shared}
        before = {d: alpha for d, alpha in old_of.items() if alpha is not None}
        if len(before) < len(shared):
            return None
        weight = sum(tried.values())
        mean = sum(tried[d] * alpha.mean for d, alpha in before.items()) / weight
        low = sum(tried[d] * alpha.low for d, alpha in before.items()) / weight
        if len(new) < enough:  # too few for a bootstrap
            worse = upper_end(sum(s.accepted for s in new), weight) < self.config.collapse * low
        else:
            worse = mean - now.mean > DOUBTFUL * math.hypot(now.high - now.mean, mean - low)
        return f"acceptance {now.mean:.3f} after {mean:.3f} with {predecessor}" if worse else None

    def figures(self) -> dict[str, Any]:
        """Return acceptance by version and domain, of the newest versions, and the short and long averages."""
        with self._lock:
            versions = list(self._recent_counts)[-SHOWN:]
            totals = {version: dict(counts) for version, counts in self._totals.items()}
        short, long = self._averages.short, self._averages.long
        by_version: dict[str, Any] = {}
        for version in versions:
            domains = sorted({s.domain for s in self._recent(version)})
            whole = self.acceptance(version)
            by_version[version] = {
                **totals[version],
                "alpha": None if whole is None else whole.mean,
                "low": None if whole is None else whole.low,
                "high": None if whole is None else whole.high,
                "domains": {d: i.mean for d in domains if (i := self.acceptance(version, {d})) is not None},
            }
        return {"versions": by_version, "short": short, "long": long, "collapsed": self._collapsed}

    def accepted_gain(self, base: str) -> float:
        """Return the accepted tokens beyond those that `base` would have had at its own acceptance rate."""
        with self._lock:
            totals = {version: dict(counts) for version, counts in self._totals.items()}
        first = totals.pop(base, {})
        if not first.get("tried"):
            return 0.0
        rate = first["accepted"] / first["tried"]
        return sum(counts["accepted"] - rate * counts["tried"] for counts in totals.values())

    @property
    def collapsed(self) -> bool:
        """True when recent acceptance is below `gate.collapse` times the long average."""
        return self._collapsed

    @property
    def checks_due(self) -> int:
        """Number of checks for a regression that were due so far."""
        return self._ended // CHECK_EVERY

    def count(self, answers: Sequence[AnswerCounts]) -> None:
        """Count the answers of one finished request together, since they are not independent."""
        counts: dict[str, list[int]] = {}
        for version, (tried, accepted) in [pair for answer in answers for pair in answer.counts.items()]:
            before = counts.get(version, (0, 0))
            counts[version] = [before[0] + tried, before[1] + accepted]
        with self._lock:
            for version, (tried, accepted) in counts.items():
                self._recent_counts.setdefault(version, deque(maxlen=self.config.window)).append(
                    AcceptanceCounts(answers[0].domain, tried, accepted)
                )
                self._changed.add(version)
                totals = self._totals.setdefault(version, Counter())
                totals.update(requests=1, tried=tried, accepted=accepted)
                if tried:
                    self._averages.add(tried, accepted)
            self._finished += 1
            self._ended += 1
        self._watch_for_collapse()

    def _watch_for_collapse(self) -> None:
        short, long = self._averages.short, self._averages.long
        collapsed = self._finished >= SETTLED and short < self.config.collapse * long
        if collapsed and not self._collapsed:
            self.alarm(f"acceptance collapsed: {short:.3f} of late, {long:.3f} before")
        self._collapsed = collapsed

    def _in_service(self, version: str) -> list[AcceptanceCounts]:
        """Return the newest requests since the version last came into service."""
        with self._lock:
            recent = list(self._recent_counts.get(version, ()))
            since = self._totals.get(version, Counter())["requests"] - self._earlier.get(version, 0)
        return recent[max(0, len(recent) - since) :]

    def _recent(self, version: str) -> list[AcceptanceCounts]:
        with self._lock:
            return list(self._recent_counts.get(version, ()))

    def _interval(self, counts: Sequence[AcceptanceCounts]) -> Interval | None:
        tried = [c.tried for c in counts]
        if not sum(tried):
            return None
        return interval([c.accepted for c in counts], tried, self.config.bootstrap_samples, 0)


def upper_end(accepted: int, tried: int) -> float:
    """Return the upper end of a share's 95 % interval (Wilson 1927), for few trials too, taken as independent."""
    share, z = accepted / tried, 1.645
    spread = z * (share * (1 - share) / tried + z**2 / (4 * tried**2)) ** 0.5
    return (share + z**2 / (2 * tried) + spread) / (1 + z**2 / tried)
