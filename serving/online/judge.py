"""Verdicts on candidates: held-out answers, live and offline, under both drafts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from distillspec.data.shards import read_samples, recorded_key
from distillspec.errors import ConfigError, RunError, in_one_line
from distillspec.models import LanguageModel, load_draft
from distillspec.serving.online.fairness import newest_within
from distillspec.serving.online.gate import Comparison, Costs, Verdict, decide, estimate_costs
from distillspec.serving.online.idle import Stopped
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.registry import Version, VersionRegistry
from distillspec.serving.online.replay_log import Entry, ReplayLog
from distillspec.serving.online.selection import offline_folder
from distillspec.serving.online.shadow import Exam, Shadow, TextsForgotten
from distillspec.types import SamplingPolicy

log = logging.getLogger(__name__)

Meanwhile = Callable[[], None]
"""Called between answers, of which a judgement may read for minutes; may raise `Overtaken`."""

EXPECTED = (ConfigError, RunError, ValueError, OSError)  # of a candidate that is damaged, or not one of ours


class Overtaken(Exception):
    """Something else came into service than what a candidate was compared with."""


class Judge:
    """Compares a candidate with what serves; changes nothing.

    Args:
        replay: where held-out answers are.
        shadow: scores drafts with the target.
        costs: of a step, for the draft given; None: by the models' sizes.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        registry: VersionRegistry,
        replay: ReplayLog,
        shadow: Shadow,
        costs: Callable[[LanguageModel], Costs] | None = None,
    ) -> None:
        self.settings, self.config = settings, settings.gate
        self.registry, self.replay, self.shadow = registry, replay, shadow
        self._costs = costs or (lambda draft: estimate_costs(shadow.target, draft, settings.gate))
        self._offline: list[Exam] | None = None

    def held_out(self, since_s: float = -math.inf) -> list[Entry]:
        """All held-out answers after a time."""
        return [entry for entry in self.replay.entries(split="held_out") if entry.time_s > since_s]

    def newest(self, entries: Sequence[Entry]) -> list[Entry]:
        """All answers to the newest of the requests, of every tenant as many as there is room for."""
        last = {entry.request_id: entry for entry in entries}.values()
        in_order = sorted(last, key=lambda entry: entry.number)
        chosen = newest_within(in_order, self.config.requests, lambda entry: entry.tenant)
        requests = {entry.request_id for entry in chosen}
        return [entry for entry in entries if entry.request_id in requests]

    def exams(self, entries: Sequence[Entry]) -> list[Exam]:
        """Those of the answers that say something."""
        answers = [answer for answer in self.replay.load(entries) if answer.response_ids]
        return [Exam(answer.sample(), answer.policy, answer.request_id) for answer in answers]

    def verdict(self, candidate: Version, incumbent: Version, exams: list[Exam], meanwhile: Meanwhile) -> Verdict:
        """Whether `candidate` may serve in place of `incumbent`; what keeps it from being judged refuses it.

        Raises:
            Stopped: the adaptation is ending.
        """
        started, names = time.monotonic(), (candidate.name, incumbent.name)
        try:
            found = self._compare(candidate, incumbent, exams, meanwhile)
        except Stopped:
            raise
        except (Overtaken, TextsForgotten) as error:
            found = Verdict(*names, "inconclusive", str(error))
        except Exception as error:  # above all memory: left undecided, it would be tried again and again
            if not isinstance(error, EXPECTED):
                log.exception("%s cannot be judged", candidate.name)
            found = Verdict(*names, "refused", f"it cannot be judged: {in_one_line(error)}")
        return replace(found, seconds=time.monotonic() - started)

    def _compare(self, candidate: Version, incumbent: Version, exams: list[Exam], meanwhile: Meanwhile) -> Verdict:
        self._check(candidate, incumbent)
        before, after = self._load(incumbent), self._load(candidate)
        costs, held = self._costs(before), self._offline_exams()

        def compared(exams: list[Exam]) -> Comparison:
            scores = [self.shadow.by_request(draft, exams, meanwhile) for draft in (before, after)]
            return Comparison(scores[0], scores[1], costs)

        offline = compared(held) if held else None
        return decide(candidate.name, incumbent.name, compared(exams), offline, self.config, self.settings.seed)

    def _check(self, candidate: Version, incumbent: Version) -> None:
        """Raise ConfigError for one that need not be compared."""
        since = takewhile(lambda version: version.name != incumbent.name, self.registry.lineage(candidate))
        if fallen := next((version.name for version in since if version.status == "rolled_back"), None):
            raise ConfigError(f"it was made from {fallen}, which was rolled back")
        if problem := self.registry.problem_of(candidate):
            raise ConfigError(problem)

    def _load(self, version: Version) -> LanguageModel:
        return load_draft(version.path, self.shadow.target, dtype=self.shadow.target.dtype)

    def _offline_exams(self) -> list[Exam]:
        """Answers of the offline set that were held out from its own training, under the policy they were made with."""
        if self._offline is None:
            self._offline = self._read_offline_exams()
        return self._offline

    def _read_offline_exams(self) -> list[Exam]:
        folder = offline_folder(self.settings.adapt)
        held_out = folder.root / "held_out" if folder is not None else None
        if held_out is None or not held_out.is_dir():
            return []
        shards = min(held_out.iterdir(), default=None)
        if shards is None:
            return []
        samples = [s for s in read_samples(shards, self.shadow.target.identity) if s.response_ids]
        policy = SamplingPolicy(**recorded_key(shards).get("policy", {}))
        return [Exam(s, policy) for s in samples[: self.config.offline_samples]]
