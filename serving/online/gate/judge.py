"""Judge of candidates: scores held-out answers, live and offline, under both drafts."""

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
from distillspec.serving.online.gate.decision import Comparison, Costs, GateDecision, decide, estimate_costs
from distillspec.serving.online.gate.idle import Stopped
from distillspec.serving.online.gate.shadow import BetweenAnswers, EvaluationSample, Shadow, TextsForgotten
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.fairness import newest_within
from distillspec.serving.online.training.selection import offline_folder
from distillspec.types import SamplingPolicy

log = logging.getLogger(__name__)

EXPECTED = (ConfigError, RunError, ValueError, OSError)  # raised by a damaged or foreign candidate


class Overtaken(Exception):
    """The incumbent of a comparison does not serve any more."""


class CandidateJudge:
    """Compares a candidate with the incumbent. Changes nothing.

    Args:
        replay: holds the held-out answers.
        shadow: scores drafts with the target.
        costs: of a step with the given draft. Default: from the models' sizes.
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
        self._costs = costs or (lambda draft: estimate_costs(shadow.target, draft))
        self._offline: list[EvaluationSample] | None = None

    def held_out(self, since_s: float = -math.inf) -> list[LogEntry]:
        """Return all held-out answers logged after a time."""
        return [entry for entry in self.replay.entries(split="held_out") if entry.time_s > since_s]

    def newest(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Return all answers to the newest `gate.requests` requests, shared out among tenants (`newest_within`)."""
        last = {entry.request_id: entry for entry in entries}.values()
        in_order = sorted(last, key=lambda entry: entry.number)
        chosen = newest_within(in_order, self.config.requests, lambda entry: entry.tenant)
        requests = {entry.request_id for entry in chosen}
        return [entry for entry in entries if entry.request_id in requests]

    def samples(self, entries: Sequence[LogEntry]) -> list[EvaluationSample]:
        """Load the answers of `entries` that are not empty."""
        answers = [answer for answer in self.replay.load(entries) if answer.response_ids]
        return [EvaluationSample(answer.sample(), answer.policy, answer.request_id) for answer in answers]

    def verdict(
        self, candidate: Version, incumbent: Version, samples: list[EvaluationSample], between_answers: BetweenAnswers
    ) -> GateDecision:
        """Decide whether `candidate` may replace `incumbent`. A candidate that cannot be judged is refused.

        Args:
            between_answers: may raise `Overtaken`. The verdict is then inconclusive.

        Raises:
            Stopped: the adaptation is ending.
        """
        started, names = time.monotonic(), (candidate.name, incumbent.name)
        try:
            found = self._compare(candidate, incumbent, samples, between_answers)
        except Stopped:
            raise
        except (Overtaken, TextsForgotten) as error:
            found = GateDecision(*names, "inconclusive", str(error))
        except Exception as error:  # out of memory, above all. Left undecided, it would be tried again and again.
            if not isinstance(error, EXPECTED):
                log.exception("%s cannot be judged", candidate.name)
            found = GateDecision(*names, "refused", f"it cannot be judged: {in_one_line(error)}")
        return replace(found, seconds=time.monotonic() - started)

    def _compare(
        self, candidate: Version, incumbent: Version, samples: list[EvaluationSample], between_answers: BetweenAnswers
    ) -> GateDecision:
        self._check(candidate, incumbent)
        before, after = self._load(incumbent), self._load(candidate)
        costs, held = self._costs(before), self.offline_samples()

        def compared(samples: list[EvaluationSample]) -> Comparison:
            scores = [self.shadow.by_request(draft, samples, between_answers) for draft in (before, after)]
            return Comparison(scores[0], scores[1], costs)

        offline = compared(held) if held else None
        return decide(candidate.name, incumbent.name, compared(samples), offline, self.config, self.settings.seed)

    def _check(self, candidate: Version, incumbent: Version) -> None:
        """Raise ConfigError if the candidate descends from a rolled-back version or its folder is damaged."""
        since = takewhile(lambda version: version.name != incumbent.name, self.registry.lineage(candidate))
        if rolled_back := next((version.name for version in since if version.status == "rolled_back"), None):
            raise ConfigError(f"it was made from {rolled_back}, which was rolled back")
        if problem := self.registry.problem_of(candidate):
            raise ConfigError(problem)

    def _load(self, version: Version) -> LanguageModel:
        return load_draft(version.path, self.shadow.target, dtype=self.shadow.target.dtype)

    def offline_samples(self) -> list[EvaluationSample]:
        """Return held-out answers of the offline set, with the policy they were made under."""
        if self._offline is None:
            self._offline = self._read_offline_samples()
        return self._offline

    def _read_offline_samples(self) -> list[EvaluationSample]:
        folder = offline_folder(self.settings.adapt)
        held_out = folder.root / "held_out" if folder is not None else None
        if held_out is None or not held_out.is_dir():
            return []
        shards = min(held_out.iterdir(), default=None)
        if shards is None:
            return []
        samples = [s for s in read_samples(shards, self.shadow.target.identity) if s.response_ids]
        policy = SamplingPolicy(**recorded_key(shards).get("policy", {}))
        return [EvaluationSample(s, policy) for s in samples[: self.config.offline_samples]]
