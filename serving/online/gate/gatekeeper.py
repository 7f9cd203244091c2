"""Gatekeeper: promotes candidates that are shown to be better, rolls back versions that are shown to be worse."""

from __future__ import annotations

import logging
from dataclasses import replace

from distillspec.errors import ConfigError, RunError
from distillspec.serving.base.locked import one_at_a_time
from distillspec.serving.online.gate.decision import GateDecision
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.gate.serving_version import ServingVersion, Suspicion, Swap
from distillspec.serving.online.gate.suspicion import SuspicionCheck
from distillspec.serving.online.judging.question import candidate_question
from distillspec.serving.online.state.database import DatabaseFailed
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)


class Gatekeeper:
    """Decides, with the registry, which version serves. `work` does what is due and returns.

    Args:
        judge: decides by the scores that the trainer writes.
        swap: None: there is no engine (judging by hand), so promotion is enough.
        served: acceptance in service. None: no suspicion.
        report: takes every verdict, suspicion, promotion and rollback.
        drafting: see `ServingVersion`.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        registry: VersionRegistry,
        judge: Judge,
        *,
        swap: Swap | None = None,
        served: ServedAcceptance | None = None,
        report: Report | None = None,
        drafting: str | None = None,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.judge = judge
        self.served = served
        self._report = report or (lambda record: None)
        self._serving_version = ServingVersion(registry, swap, served, self._report, drafting)
        self._suspicions = SuspicionCheck(self._serving_version, judge)
        self.lock = self._serving_version.lock
        self.waiting_for: str | None = None  # why the newest candidate is not judged yet
        self._judged_at: tuple[int, str | None] | None = None  # scores, and the candidate, at the last look

    @property
    def serving(self) -> Version | None:
        """The version that the engine drafts with."""
        return self._serving_version.version

    @property
    def suspicion(self) -> Suspicion | None:
        return self._serving_version.suspicion

    def work(self) -> None:
        """Follow promotions from elsewhere, watch the version in service, judge where there are new scores."""
        self.follow()
        self._suspicions.watch()
        newest = candidate_question(self.registry)
        seen = (self.judge.table.changes(), None if newest is None else newest.version.name)
        if seen != self._judged_at and not self._suspicions.check():
            self.judge_newest()
            self._judged_at = seen  # a check that fails, or one of a suspicion, is repeated

    @one_at_a_time
    def follow(self) -> None:
        """Load the version that the registry names. Another process may have promoted or rolled back."""
        current = self.registry.current()
        if current is None or (self.serving is not None and current.name == self.serving.name):
            return
        try:
            self._serving_version.bring(current)
        except ConfigError as error:
            log.error("the promoted draft %s is refused: %s", current.name, error)
            self._serving_version.roll_back(current, f"refused by the engine: {error}")

    @one_at_a_time
    def judge_newest(self, final: bool = False) -> GateDecision | None:
        """Judge the newest candidate. Older ones are overtaken. None: there is none, or it needs more evidence.

        Args:
            final: there will be no more evidence.
        """
        candidates = self.registry.versions("candidate")
        for overtaken in candidates[:-1]:
            self.registry.judged(overtaken.name, "inconclusive", {}, f"overtaken by {candidates[-1].name}")
        question = candidate_question(self.registry)
        if question is None:
            self.waiting_for = None
            return None
        verdict = self.judge.verdict(question, final)
        if verdict is None:
            self.waiting_for = self.judge.progress(question)
            return None
        self.waiting_for = None
        self._carry_out(verdict, question.version, question.against)
        return verdict

    @one_at_a_time
    def try_out(self, name: str) -> Version:
        """Draft with a version until the next promotion, rollback or restart. Nothing is recorded.

        A rollback by hand then brings back the version in service.

        Raises:
            ConfigError: no such version, or the engine refuses it. RunError: its folder is damaged.
        """
        version = self._serving_version.intact(name)
        self._serving_version.try_out(version)
        return version

    @one_at_a_time
    def promote_by_hand(self, name: str) -> Version:
        """Let a version serve from now on, and at the next start.

        Raises:
            ConfigError: no such version, or the engine refuses it. The old one stays.
            RunError: its folder is damaged, or another process was faster.
        """
        version, current = self._serving_version.intact(name), self.registry.current()
        self._serving_version.bring(version)
        try:
            self.registry.promote(name, "promoted by hand", expected=None if current is None else current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "promotion", "version": name, "reason": "promoted by hand"})
        return version

    @one_at_a_time
    def roll_back_by_hand(self) -> Version:
        """Let the predecessor serve again. Where a version is tried out, end that: the promoted one drafts again.

        A promoted version whose folder is damaged by then is rolled back, as at a start.

        Raises:
            ConfigError: the engine refuses it, and the current version stays. RunError: there is none.
        """
        current = self.registry.current()
        is_trial = self._serving_version.tried is not None
        if is_trial and current is not None and self.registry.problem_of(current) is None:
            self._serving_version.bring(current)
            return current
        back = self.registry.predecessor()
        if back is None or current is None:
            raise RunError("there is no earlier version to go back to")
        self._serving_version.bring(back)
        try:
            back = self.registry.rollback("rolled back by hand", expected=current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "rollback", "version": current.name, "to": back.name, "reason": "by hand"})
        return back

    def _carry_out(self, verdict: GateDecision, candidate: Version, incumbent: Version) -> None:
        if verdict.decision == "promoted":
            try:
                self._serving_version.promote(candidate, verdict.reason, incumbent.name, verdict.acceptance_ratio)
            except ConfigError as error:
                verdict = replace(verdict, decision="refused", reason=f"refused by the engine: {error}")
            except DatabaseFailed:  # says nothing of the candidate: it is judged again
                raise
            except RunError as error:
                current = self.registry.current() or incumbent
                self._serving_version.bring(current)
                if current.name == candidate.name:  # another server came to the same verdict, and was faster
                    return
                verdict = replace(verdict, decision="inconclusive", reason=str(error))
        self.registry.judged(verdict.candidate, verdict.decision, verdict.to_json(), verdict.reason)
        log.info("%s: %s, %s", verdict.candidate, verdict.decision, verdict.reason)
        self._report({"event": "verdict", **verdict.to_json()})
        if self.settings.online.keep_versions is not None:
            self.registry.clear_away(self.settings.online.keep_versions)
        self.judge.table.keep_only(self.registry.present())
