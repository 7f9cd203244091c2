"""Gatekeeper: judges candidates, promotes better ones (after a canary if set), rolls back regressions."""

from __future__ import annotations

import logging
from dataclasses import replace

from distillspec.errors import ConfigError, RunError
from distillspec.serving.online.gate.canary import Canary, CanaryOutcome, outcome
from distillspec.serving.online.gate.decision import Decision, GateDecision
from distillspec.serving.online.gate.in_service import InService, Report, Suspicion, Swap, one_at_a_time
from distillspec.serving.online.gate.judge import CandidateJudge, Overtaken
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.gate.suspicion import SuspicionCheck
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)


class Gatekeeper:
    """Decides, with the registry, which version serves. `work` does what is due and returns.

    Args:
        judge: compares a candidate with the version in service.
        swap: None: there is no engine (judging by hand), so promotion is enough.
        served: acceptance in service. None: no canary, no suspicion.
        report: takes every verdict, canary, suspicion, promotion and rollback.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        registry: VersionRegistry,
        judge: CandidateJudge,
        *,
        swap: Swap | None = None,
        served: ServedAcceptance | None = None,
        report: Report | None = None,
    ) -> None:
        self.settings, self.config = settings, settings.gate
        self.registry, self.judge, self.served = registry, judge, served
        self._report = report or (lambda record: None)
        self._in_service = InService(registry, swap, served, self._report)
        self._suspicions = SuspicionCheck(self._in_service, settings.gate)
        self.lock = self._in_service.lock
        self.canary: Canary | None = None
        self.waiting_for: str | None = None  # why the newest candidate is not judged yet

    @property
    def serving(self) -> Version | None:
        """The version that the engine drafts with."""
        return self._in_service.version

    @property
    def suspicion(self) -> Suspicion | None:
        return self._in_service.suspicion

    def work(self) -> None:
        """Follow promotions from elsewhere, check the version in service, judge the newest candidate."""
        self.follow()
        if self.canary is not None:
            self.watch_canary()
            return
        self.watch()
        self.check_suspicion()
        self.judge_newest()

    @one_at_a_time
    def follow(self) -> None:
        """Load the version that the registry names. Another process may have promoted or rolled back."""
        current = self.registry.current()
        expected = self.canary.incumbent if self.canary is not None else self.serving
        if current is None or (expected is not None and current.name == expected.name):
            return
        if self.canary is not None:
            self._end_canary("inconclusive", f"its canary was cut short: {current.name} was promoted meanwhile")
        try:
            self._in_service.bring(current)
        except ConfigError as error:
            log.error("the promoted draft %s is refused: %s", current.name, error)
            self._in_service.roll_back(current, f"refused by the engine: {error}")

    def watch(self) -> None:
        """Suspect the version in service if its acceptance is too low. See `SuspicionCheck.watch`."""
        self._suspicions.watch()

    def check_suspicion(self) -> GateDecision | None:
        """Compare a suspected version with its predecessor. See `SuspicionCheck.check`."""
        suspicion = self.suspicion
        if suspicion is None:
            return None
        return self._suspicions.check(self.judge, lambda: self._between_answers(suspicion.version))

    @one_at_a_time
    def watch_canary(self) -> CanaryOutcome | None:
        """Promote a candidate that passed its canary, take back one that failed. None: nothing new to judge by."""
        canary, served = self.canary, self.served
        assert canary is not None, "only called during a canary"
        assert served is not None, "a canary needs served acceptance"
        requests = canary.requests(served.requests)
        if not self._in_service.is_check_due() and requests < self.config.canary_requests:
            return None
        self._in_service.mark_checked()
        names = canary.candidate.served_as, canary.incumbent.served_as
        found = outcome(requests, self.config, lambda enough: served.regression(*names, enough))
        self.waiting_for = found.reason if found.state == "going on" else None
        if found.state == "failed":
            self._in_service.bring(canary.incumbent)
            self._end_canary("refused", found.reason)
        elif found.state == "passed":
            self._pass_canary(canary, f"{canary.verdict.reason}; {found.reason}")
        return found

    def judge_newest(self) -> GateDecision | None:
        """Judge the newest candidate if there are enough held-out answers. Older candidates are overtaken."""
        candidates = self.registry.versions("candidate")
        for overtaken in candidates[:-1]:
            self.registry.judged(overtaken.name, "inconclusive", {}, f"overtaken by {candidates[-1].name}")
        incumbent = self.registry.current()
        if not candidates or incumbent is None:
            return None
        newest = self.judge.newest(self.judge.held_out())
        requests = len({entry.request_id for entry in newest})
        samples = self.judge.samples(newest) if requests >= self.config.min_requests else []
        if len({sample.request for sample in samples}) < self.config.min_requests:
            self.waiting_for = f"{requests} of {self.config.min_requests} held-out requests"
            return None
        self.waiting_for = None
        verdict = self.judge.verdict(candidates[-1], incumbent, samples, lambda: self._between_answers(incumbent))
        if verdict.decision == "promoted" and self.config.canary_requests and self.served is not None:
            self._begin_canary(verdict, candidates[-1], incumbent)
        else:
            self._carry_out(verdict, candidates[-1], incumbent)
        return verdict

    @one_at_a_time
    def try_out(self, name: str) -> Version:
        """Draft with a version until the next promotion, rollback or restart. Nothing is recorded.

        Raises:
            ConfigError: no such version, or the engine refuses it. RunError: its folder is damaged.
        """
        version = self._in_service.intact(name)
        self._in_service.try_out(version)
        return version

    @one_at_a_time
    def promote_by_hand(self, name: str) -> Version:
        """Let a version serve from now on, and at the next start.

        Raises:
            ConfigError: no such version, or the engine refuses it. The old one stays.
            RunError: its folder is damaged, or another process was faster.
        """
        version, current = self._in_service.intact(name), self.registry.current()
        self._in_service.bring(version)
        if self.canary is not None:
            self._end_canary("inconclusive", f"its canary was cut short: {name} was promoted by hand")
        try:
            self.registry.promote(name, "promoted by hand", expected=None if current is None else current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "promotion", "version": name, "reason": "promoted by hand"})
        return version

    @one_at_a_time
    def roll_back_by_hand(self) -> Version:
        """Let the predecessor serve again. During a canary: the incumbent.

        Raises:
            ConfigError: the engine refuses it, and the current version stays. RunError: there is none.
        """
        if self.canary is not None:
            incumbent = self.canary.incumbent
            self._in_service.bring(incumbent)
            self._end_canary("refused", "its canary was ended by hand")
            return incumbent
        back, current = self.registry.predecessor(), self.registry.current()
        if back is None or current is None:
            raise RunError("there is no earlier version to go back to")
        self._in_service.bring(back)
        try:
            back = self.registry.rollback("rolled back by hand", expected=current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "rollback", "version": current.name, "to": back.name, "reason": "by hand"})
        return back

    def _between_answers(self, incumbent: Version) -> None:
        """Do what must not wait for a verdict: follow changes by hand, watch acceptance.

        Raises:
            Overtaken: another version serves now than the incumbent of the comparison.
        """
        self.follow()
        self.watch()
        if self.serving is not None and self.serving.name != incumbent.name:
            raise Overtaken(f"{self.serving.name} came into service while it was judged")

    @one_at_a_time
    def _carry_out(self, verdict: GateDecision, candidate: Version, incumbent: Version) -> None:
        if verdict.decision == "promoted":
            try:
                self._in_service.promote(candidate, verdict.reason, expected=incumbent.name)
            except ConfigError as error:
                verdict = replace(verdict, decision="refused", reason=f"refused by the engine: {error}")
            except RunError as error:
                verdict = replace(verdict, decision="inconclusive", reason=str(error))
                self._in_service.bring(self.registry.current() or incumbent)
        self._record(verdict)

    def _record(self, verdict: GateDecision) -> None:
        self.registry.judged(verdict.candidate, verdict.decision, verdict.to_json(), verdict.reason)
        log.info("%s: %s, %s", verdict.candidate, verdict.decision, verdict.reason)
        self._report({"event": "verdict", **verdict.to_json()})
        if self.settings.online.keep_versions is not None:
            self.registry.clear_away(self.settings.online.keep_versions)

    @one_at_a_time
    def _begin_canary(self, verdict: GateDecision, candidate: Version, incumbent: Version) -> None:
        """Draft with the candidate. The registry still boots the incumbent."""
        assert self.served is not None
        began = self.served.requests
        try:
            self._in_service.bring(candidate)
        except ConfigError as error:
            self._record(replace(verdict, decision="refused", reason=f"refused by the engine: {error}"))
            return
        self.canary = Canary(candidate, incumbent, verdict, began)
        log.info("%s: canary of %d requests", candidate.name, self.config.canary_requests)
        self._report({"event": "canary", **verdict.to_json()})

    def _pass_canary(self, canary: Canary, reason: str) -> None:
        try:
            self.registry.promote(canary.candidate.name, reason, expected=canary.incumbent.name)
        except RunError as error:
            self._in_service.bring(self.registry.current() or canary.incumbent)
            self._end_canary("inconclusive", str(error))
        else:
            self._end_canary("promoted", reason)

    def _end_canary(self, decision: Decision, reason: str) -> None:
        assert self.canary is not None
        verdict, self.canary, self.waiting_for = self.canary.verdict, None, None
        self._record(replace(verdict, decision=decision, reason=reason))
