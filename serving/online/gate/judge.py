"""Judge: reads the trainer's scores, and decides what they show. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from distillspec.serving.online.gate.decision import GateDecision, decide, is_worse
from distillspec.serving.online.gate.pool_comparison import PoolComparison
from distillspec.serving.online.judging.evidence import Costs, Evidence, Pair, paired
from distillspec.serving.online.judging.question import SUSPICIONS, Question
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version


class Judge:
    """Decides questions by the scores in `table`.

    Args:
        costs: of a step with the draft in service.
        compared: returns what a candidate that is to join a pool brings the pool. None: it takes the place of another.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        registry: VersionRegistry,
        replay: ReplayLog,
        table: ScoreTable,
        costs: Callable[[], Costs],
        compared: Callable[[], PoolComparison | None] | None = None,
    ) -> None:
        self.config = settings.gate
        self.registry = registry
        self.replay = replay
        self.table = table
        self._costs, self._compared = costs, compared

    def evidence(self, question: Question) -> Evidence:
        """Return what both drafts of a question have been scored on."""
        return Evidence(self._pairs(question), self._costs())

    def verdict(self, question: Question, final: bool = False) -> GateDecision | None:
        """Decide on a candidate. None: more evidence is needed.

        A candidate that cannot be judged is refused. Where memory did not suffice to judge it, it is inconclusive.

        Args:
            final: there will be no more evidence.
        """
        names = question.version.name, question.against.name
        if problem := self._problem(question.version, question.against):
            return GateDecision(*names, "refused", problem)
        if problem := self.table.problem(question.against.name):
            return GateDecision(*names, "inconclusive", f"{question.against.name} serves, and {problem}")
        if shortage := self.table.shortage(question.version.name):
            return GateDecision(*names, "inconclusive", shortage)
        pool = None if self._compared is None else self._compared()
        if pool is not None and pool.problem is not None:
            return GateDecision(*names, "refused", pool.problem)
        evidence = self.evidence(question)
        if not evidence.pairs:
            return None
        config = self.config if pool is None else replace(self.config, margin=pool.least_gain(self.config.margin))
        decision = decide(*names, evidence, config, 1 + self.registry.judged_in_vain(), final=final)
        return decision if pool is None or decision is None else _of_pool(decision, pool)

    def regression(self, question: Question) -> str | None:
        """Return why the version in service is worse than its predecessor, None if that is not shown."""
        if problem := self.table.problem(question.version.name):
            return problem
        if self.table.problem(question.against.name):
            return None
        evidence = self.evidence(question)
        number = question.version.verdict.get(SUSPICIONS, 1)
        if not evidence.pairs or not is_worse(evidence, self.config, number):
            return None
        alpha = evidence.alpha
        shown = f"acceptance {alpha[1]:.3f} after {alpha[0]:.3f} with {question.against.name}"
        return f"{shown} on the same {len(evidence.pairs)} conversations since its promotion"

    def has_enough(self, question: Question) -> bool:
        """Return True if enough conversations were read for a suspicion, or all that could be."""
        if self.table.problem(question.against.name):
            return True
        needed = max(self.config.rollback_requests, self.config.min_requests)
        return len(self._pairs(question)) >= min(needed, self.config.requests) or self.has_all(question)

    def has_all(self, question: Question) -> bool:
        """Return True if enough conversations were read to decide a question."""
        entries, before, after = self._read(question)
        all_there = len({entry.conversation for entry in entries}) >= self.config.requests
        return all_there and all(entry.number in before and entry.number in after for entry in entries)

    def progress(self, question: Question) -> str | None:
        """Return how far the evidence on a candidate has come, None if it is enough for a first look."""
        conversations, needed = len(self._pairs(question)), self.config.min_requests
        return f"{conversations} of {needed} conversations" if conversations < needed else None

    def _pairs(self, question: Question) -> list[Pair]:
        return paired(*self._read(question))

    def _read(self, question: Question) -> tuple[list[LogEntry], dict[int, Score], dict[int, Score]]:
        """Return the answers that may be evidence, and the scores of both versions."""
        versions, unread = (question.against, question.version), max(question.after, question.start)
        before, after = (self.table.of(version.name, after=unread) for version in versions)
        return question.unseen(self.replay, self.config.requests), before, after

    def _problem(self, candidate: Version, incumbent: Version) -> str | None:
        """Return why a candidate cannot serve, whatever its scores."""
        since = takewhile(lambda version: version.name != incumbent.name, self.registry.lineage(candidate))
        if rolled_back := next((version.name for version in since if version.status == "rolled_back"), None):
            return f"it was made from {rolled_back}, which was rolled back"
        return self.registry.problem_of(candidate) or self.table.problem(candidate.name)


def _of_pool(decision: GateDecision, pool: PoolComparison) -> GateDecision:
    """Return a decision with what it says of the whole pool."""
    if decision.gain is None:
        return decision
    reason = f"{decision.reason}; {pool.describe(decision.gain)}"
    return replace(decision, pool=pool.interval(decision.gain), reason=reason)
