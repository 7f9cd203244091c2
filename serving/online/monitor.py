"""Acceptance as it is served, by version and domain: what makes a version suspect, and what raises the alarm."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from distillspec.config import GateConfig
from distillspec.evaluation.bootstrap import interval
from distillspec.serving.commit import Emission
from distillspec.serving.online.drift import SETTLED, DriftDetector
from distillspec.serving.online.registry import ServedRecord
from distillspec.serving.online.tap import acceptance_in
from distillspec.serving.requests import RequestOutput
from distillspec.types import Interval

log = logging.getLogger(__name__)

CHECK_EVERY = 16  # requests: to look after each one would find a difference by chance sooner or later

SHOWN = 8  # versions whose intervals are worth working out each time somebody looks


class Seen(NamedTuple):
    """One finished answer under one version."""

    domain: str
    tried: int
    accepted: int


@dataclass
class _Open:
    """An answer in the making: version → [tried, accepted]."""

    domain: str
    counts: dict[str, list[int]]
    broken: bool = False


class ServedAcceptance:
    """Counts every request, logged or not. `watch` and `finish` are called by the engine's thread, the rest by any."""

    def __init__(self, config: GateConfig, alarm: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.alarm = alarm or (lambda message: log.error("%s", message))
        self._open: dict[tuple[str, int], _Open] = {}
        self._seen: dict[str, deque[Seen]] = {}
        self._totals: dict[str, Counter[str]] = {}
        self._averages = DriftDetector(1.0)
        self._collapsed = False
        self._earlier: dict[str, int] = {}  # requests of a version before it came into service last
        self._finished = 0
        self.requests = 0  # finished since the start, with or without a draft
        self._news: set[str] = set()  # versions with something that `take_news` has not told
        self._lock = Lock()

    def watch(self, emissions: Sequence[Emission]) -> None:
        """Count a step's verdicts."""
        for emission in emissions:
            sequence = emission.sequence
            key = (sequence.request.id, sequence.index)
            tried, accepted = acceptance_in(emission)
            failed = not sequence.draft_ok or sequence.proposer_failed
            if emission.tree.source == "lookup" or (not tried and not failed):
                continue
            answer = self._open.setdefault(key, _Open(sequence.request.domain, {}))
            if failed and not answer.broken:
                answer.broken = True  # NaN or an exception: as bad as a rejection, and not to be overlooked
                tried += 1
            counts = answer.counts.setdefault(emission.draft_version, [0, 0])
            counts[0] += tried
            counts[1] += accepted

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """File what ended."""
        for output in outputs:
            self.requests += 1
            ended = [self._open.pop((output.request_id, each.index), None) for each in output.completions]
            if answers := [answer for answer in ended if answer is not None]:
                self._file(answers)

    def appoint(self, version: str) -> None:
        """`version` comes into service: what it serves from now on can be held against it, what it served before
        cannot."""
        with self._lock:
            if version in self._totals:
                self._earlier[version] = self._totals[version]["requests"]
                self._news.add(version)

    def take_news(self) -> list[ServedRecord]:
        """What is known of every version that served since the last call: to be kept beside the versions."""
        with self._lock:
            versions, self._news = sorted(self._news), set()
            return [
                ServedRecord(
                    v,
                    {**self._totals[v], "earlier": self._earlier.get(v, 0)},
                    [list(seen) for seen in self._seen.get(v, ())],
                )
                for v in versions
            ]

    def recall(self, records: Sequence[ServedRecord]) -> None:
        """Go on from what an earlier process kept; to be called before anything is served."""
        for record in records:
            if record.seen:
                self._seen[record.version] = deque((Seen(*seen) for seen in record.seen), maxlen=self.config.window)
            totals = dict(record.totals)
            self._earlier[record.version] = totals.pop("earlier", 0)
            self._totals[record.version] = Counter(totals)

    def acceptance(self, version: str, domains: set[str] | None = None) -> Interval | None:
        """α of the newest requests with its interval; None where nothing was judged."""
        seen = [s for s in self._recent(version) if domains is None or s.domain in domains]
        return self._interval(seen)

    def regression(self, version: str, predecessor: str, enough: int | None = None) -> str | None:
        """Why `version` looks worse: its interval lies below its predecessor's on the domains both have served.

        The predecessor's is weighed by the traffic that the version meets, so that a shift between domains is no
        regression. The two served different requests at different times: text that got harder within a domain looks
        the same as a worse draft.

        Args:
            enough: requests of the version below which nothing is said; None: `gate.rollback_requests`.
        """
        enough = self.config.rollback_requests if enough is None else enough
        new, old = self._in_service(version), self._recent(predecessor)
        counts = Counter(s.domain for s in new), Counter(s.domain for s in old)
        least = min(self.config.domain_requests, enough)
        shared = {d for d in counts[0] if counts[0][d] >= least and counts[1][d] >= least}
        new = [s for s in new if s.domain in shared]
        if len(new) < enough:
            return None
        now = self._interval(new)
        if now is None:
            return None
        tried = {d: sum(s.tried for s in new if s.domain == d) for d in shared}
        before = {d: self._interval([s for s in old if s.domain == d]) for d in shared}
        if any(found is None for found in before.values()):
            return None
        weight = sum(tried.values())
        low = sum(tried[d] * found.low for d, found in before.items() if found is not None) / weight
        if now.high >= low:
            return None
        return f"acceptance {now.mean:.3f} (at most {now.high:.3f}) after at least {low:.3f} with {predecessor}"

    def figures(self) -> dict[str, Any]:
        """Served acceptance by version and domain, for those that served last, and the averages."""
        with self._lock:
            versions = list(self._seen)[-SHOWN:]
            totals = {version: dict(counts) for version, counts in self._totals.items()}
        short, long = self._averages.averages().get("", (0.0, 0.0))
        found: dict[str, Any] = {}
        for version in versions:
            domains = sorted({s.domain for s in self._recent(version)})
            whole = self.acceptance(version)
            found[version] = {
                **totals[version],
                "alpha": None if whole is None else whole.mean,
                "low": None if whole is None else whole.low,
                "high": None if whole is None else whole.high,
                "domains": {d: i.mean for d in domains if (i := self.acceptance(version, {d})) is not None},
            }
        return {"versions": found, "short": short, "long": long, "collapsed": self._collapsed}

    def accepted_gain(self, base: str) -> float:
        """Accepted tokens beyond what the draft `base` would have had accepted, by its own rate."""
        with self._lock:
            totals = {version: dict(counts) for version, counts in self._totals.items()}
        first = totals.pop(base, {})
        if not first.get("tried"):
            return 0.0
        rate = first["accepted"] / first["tried"]
        return sum(counts["accepted"] - rate * counts["tried"] for counts in totals.values())

    @property
    def collapsed(self) -> bool:
        """Whether acceptance of late is a small part of what it was."""
        return self._collapsed

    @property
    def due(self) -> int:
        """Grows when it is time to look for a regression."""
        return self._finished // CHECK_EVERY

    def _file(self, answers: Sequence[_Open]) -> None:
        """Count a request's answers as one: they are no witnesses independent of each other."""
        counts: dict[str, list[int]] = {}
        for version, (tried, accepted) in [pair for answer in answers for pair in answer.counts.items()]:
            before = counts.get(version, (0, 0))
            counts[version] = [before[0] + tried, before[1] + accepted]
        with self._lock:
            for version, (tried, accepted) in counts.items():
                self._seen.setdefault(version, deque(maxlen=self.config.window)).append(
                    Seen(answers[0].domain, tried, accepted)
                )
                self._news.add(version)
                totals = self._totals.setdefault(version, Counter())
                totals.update(requests=1, tried=tried, accepted=accepted)
                self._averages.add("", tried, accepted)
            self._finished += 1
        self._watch_for_collapse()

    def _watch_for_collapse(self) -> None:
        short, long = self._averages.averages().get("", (0.0, 0.0))
        collapsed = self._finished >= SETTLED and short < self.config.collapse * long
        if collapsed and not self._collapsed:
            self.alarm(f"acceptance collapsed: {short:.3f} of late, {long:.3f} before")
        self._collapsed = collapsed

    def _in_service(self, version: str) -> list[Seen]:
        """Of the newest requests those since the version came into service last."""
        with self._lock:
            seen = list(self._seen.get(version, ()))
            since = self._totals.get(version, Counter())["requests"] - self._earlier.get(version, 0)
        return seen[max(0, len(seen) - since) :]

    def _recent(self, version: str) -> list[Seen]:
        with self._lock:
            return list(self._seen.get(version, ()))

    def _interval(self, seen: Sequence[Seen]) -> Interval | None:
        tried = [s.tried for s in seen]
        if not sum(tried):
            return None
        return interval([s.accepted for s in seen], tried, self.config.bootstrap_samples, 0)
