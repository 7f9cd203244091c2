"""A server after a promotion, with synthetic drafts: gatekeeper, monitor, judge, registry and scores are the product's.

What is left out: the engine (acceptance is drawn), the log's text, and the models that the trainer would score with.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy
from synthetic_drafts import MEAN, TOKENS, rates, score

from distillspec.config import GateConfig, OnlineConfig
from distillspec.files import write_folder
from distillspec.models.checkpoint import METADATA
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.monitor import AnswerCounts, ServedAcceptance
from distillspec.serving.online.judging.evidence import Costs
from distillspec.serving.online.judging.question import open_questions
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

KEPT = 0.998  # of the wander of text and load, from one request to the next
BEFORE = 400  # requests that the predecessor served
LOOK_EVERY = 8  # requests, as often as acceptance in service is checked
READ_AT_ONCE = 16  # answers that the trainer scores between two looks, while something is suspected
BY_VERDICT = "gain"  # reason of a promotion


@dataclass(frozen=True)
class Life:
    """Requests that a promoted version served, and how it went."""

    requests: int
    rolled_back: bool
    suspicions: int
    acquittals: int


class MemoryLog:
    """Log entries in memory: the part of `ReplayLog` that the gate reads."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []

    def append(self, entry: LogEntry) -> None:
        self._entries.append(entry)

    def entries(self, *, after: int = 0) -> list[LogEntry]:
        return self._entries[after:]

    def newest_number(self) -> int:
        return len(self._entries)


class SimulatedService:
    """Serves requests one after another, with a gate that looks at them.

    Args:
        gain: of the second version's acceptance over the first one's.
        wander: standard deviation of the text's mean acceptance, which wanders slowly, as the number of rows does.
        tenants: take turns.
    """

    def __init__(self, folder: Path, seed: int, gain: float, wander: float, tenants: int = 1) -> None:
        # A tenth of the usual resamples: they take most of the time.
        self._settings = OnlineSettings(OnlineConfig(folder=str(folder)), gate=GateConfig(bootstrap_samples=100))
        self._dice = numpy.random.default_rng(seed)
        self._gain = gain
        self._spread = wander
        self._tenants = tenants
        self._wander = numpy.zeros(2)  # text and load, in standard deviations
        self._now_s = 0.0
        self._log = MemoryLog()
        self._rates = dict[int, list[float]]()  # of both versions, by number of the request
        self._read = set[int]()  # numbers of the scored answers
        self.events: Counter[str] = Counter()
        self.registry = VersionRegistry(self._settings.layout.versions, clock=lambda: self._now_s)
        self._table = ScoreTable(self._settings.layout.scores)
        self.first = self._add("1" * 32)
        self.registry.promote(self.first.name, "first draft")
        self._served = ServedAcceptance(self._settings.gate)
        log = cast(ReplayLog, self._log)
        judge = Judge(self._settings, self.registry, log, self._table, self._costs)
        self.keeper = Gatekeeper(self._settings, self.registry, judge, served=self._served, report=self._count)

    def serve(self) -> None:
        """Answer one request. After every eighth one the trainer scores what is asked for, and the gate looks."""
        self._now_s += 1.0
        self._wander = KEPT * self._wander + math.sqrt(1 - KEPT**2) * self._dice.standard_normal(2)
        number = self._log.newest_number() + 1
        mean = min(0.9, max(0.1, MEAN + self._spread * float(self._wander[0])))
        self._rates[number] = rates(self._dice, [mean], self._gain)[:, 0].tolist()
        serving = self.keeper.serving or self.first
        accepted = int(self._dice.binomial(TOKENS, self._rate(serving, number)))
        self._served.count([AnswerCounts("d", {serving.served_as: [TOKENS, accepted]})])
        self._log.append(self._entry(number, accepted, serving))
        if number % LOOK_EVERY == 0:
            self._score_some()
            self.keeper.work()

    def promote(self) -> Version:
        """Promote the second version, as by a verdict: nothing but acceptance in service can make it suspected."""
        second = self._add("2" * 32)
        self.registry.promote(second.name, BY_VERDICT)
        verdict = {"decision": "promoted", "reason": BY_VERDICT}
        self.registry.judged(second.name, "promoted", verdict, BY_VERDICT)
        self.keeper.follow()
        return second

    def close(self) -> None:
        self.registry.close()
        self._table.close()

    def _add(self, weights_hash: str) -> Version:
        record = json.dumps({"identity": {"weights_hash": weights_hash}})

        def write(folder: Path) -> None:
            write_folder(folder, lambda temporary: (temporary / METADATA).write_text(record))

        return self.registry.add(write)

    def _rate(self, version: Version, number: int) -> float:
        return self._rates[number][0 if version.name == self.first.name else 1]

    def _costs(self) -> Costs:
        """Return the costs at the load of now, 1 to 8 rows."""
        rows = min(8.0, max(1.0, 4 + 1.5 * float(self._wander[1])))
        return Costs(draft=0.1, verify=0.02 * rows)

    def _entry(self, number: int, accepted: int, serving: Version) -> LogEntry:
        return LogEntry(
            number=number,
            shard=1,
            place=number,
            request_id=f"r{number}",
            tenant=f"t{number % self._tenants}",
            domain="d",
            conversation=number,
            tokens=TOKENS,
            tried=TOKENS,
            accepted=accepted,
            time_s=self._now_s,
            draft=serving.served_as,
        )

    def _score_some(self) -> None:
        """Score some answers of the open questions under both drafts, as the trainer does."""
        for question in open_questions(self.registry, self.keeper.suspicion is not None):
            entries = question.unseen(cast(ReplayLog, self._log), self._settings.gate.requests)
            numbers = [entry.number for entry in entries if entry.number not in self._read][:READ_AT_ONCE]
            for version in (question.against, question.version) if numbers else ():
                self._table.add(version.name, {number: score(self._rate(version, number)) for number in numbers})
            self._read.update(numbers)

    def _count(self, record: dict[str, object]) -> None:
        self.events[str(record["event"])] += 1


def life(folder: Path, seed: int, gain: float, wander: float, requests: int, tenants: int = 1) -> Life:
    """Serve with a promoted version for a number of requests, or until it is rolled back.

    Args:
        folder: an empty one, for registry and scores.
    """
    service = SimulatedService(folder, seed, gain, wander, tenants)
    for _ in range(BEFORE):
        service.serve()
    service.promote()
    served = 0
    while served < requests and not service.events["rollback"]:
        service.serve()
        served += 1
    service.close()
    events = service.events
    return Life(served, bool(events["rollback"]), events["suspicion"], events["acquittal"])
