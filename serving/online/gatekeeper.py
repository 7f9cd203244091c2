"""Judges candidates, lets the better ones in (by way of a canary, if asked), sends back those that fail in service."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel
from distillspec.serving.online.canary import Canary, Outcome, outcome
from distillspec.serving.online.gate import Costs, Decision, Verdict
from distillspec.serving.online.judge import Judge, Overtaken
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.monitor import ServedAcceptance
from distillspec.serving.online.registry import Version, VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.shadow import Shadow

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

Swap = Callable[[Version], None]
"""Has the engine draft with a version from its next step on; raises ConfigError where it refuses."""


def _one_at_a_time(method: Callable[Concatenate[Gatekeeper, P], T]) -> Callable[Concatenate[Gatekeeper, P], T]:
    """The gate's thread and operators' hands change what serves; engine and registry must agree afterwards."""

    @functools.wraps(method)
    def alone(self: Gatekeeper, *args: P.args, **named: P.kwargs) -> T:
        with self._door:
            return method(self, *args, **named)

    return alone


class Gatekeeper:
    """Decides with the registry what serves; `work` does what there is to do and returns.

    Args:
        replay: where held-out answers are.
        shadow: scores drafts with the target.
        costs: of a step, for the draft given.
        swap: None where no engine is at hand (judging by hand): promotion is enough.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        registry: VersionRegistry,
        replay: ReplayLog,
        shadow: Shadow,
        *,
        costs: Callable[[LanguageModel], Costs] | None = None,
        swap: Swap | None = None,
        served: ServedAcceptance | None = None,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.settings, self.config = settings, settings.gate
        self.registry = registry
        self._judge = Judge(settings, registry, replay, shadow, costs)
        self._swap, self._served = swap, served
        self._report = report or (lambda record: None)
        self.serving: Version | None = registry.current()
        self.canary: Canary | None = None
        self.waiting_for: str | None = None  # why the newest candidate is not judged yet
        self._looked = 0
        self._door = threading.RLock()

    def work(self) -> None:
        """Follow what was promoted elsewhere, look for a regression, judge the newest candidate."""
        self.follow()
        if self.canary is not None:
            self.watch_canary()
            return
        self.watch()
        self.judge_newest()

    @_one_at_a_time
    def follow(self) -> None:
        """Serve what the registry says: somebody may have promoted or rolled back by hand."""
        current = self.registry.current()
        expected = self.canary.incumbent if self.canary is not None else self.serving
        if current is None or (expected is not None and current.name == expected.name):
            return
        if self.canary is not None:
            self._end_canary("inconclusive", f"its canary was cut short: {current.name} was promoted meanwhile")
        try:
            self._bring(current)
        except ConfigError as error:
            log.error("the promoted draft %s is refused: %s", current.name, error)
            self._return(f"refused by the engine: {error}", current)

    @_one_at_a_time
    def watch(self) -> None:
        """Roll back where served acceptance fell below the predecessor's interval."""
        if self._served is None or self.serving is None or self._served.due == self._looked:
            return
        self._looked = self._served.due
        predecessor = self.registry.challenged_by()
        if predecessor is None:
            return
        problem = self._served.regression(self.serving.served_as, predecessor.served_as)
        if problem is not None:
            log.error("%s is rolled back: %s", self.serving.name, problem)
            self._return(problem, self.serving)

    @_one_at_a_time
    def watch_canary(self) -> Outcome | None:
        """Promote what has passed its canary, return what fails in it; None where there is nothing new."""
        canary, served = self.canary, self._served
        assert canary is not None, "only called during a canary"
        assert served is not None, "a canary needs served acceptance"
        seen = canary.requests(served.requests)
        if served.due == self._looked and seen < self.config.canary_requests:
            return None
        self._looked = served.due
        names = canary.candidate.served_as, canary.incumbent.served_as
        found = outcome(seen, self.config, lambda enough: served.regression(*names, enough))
        self.waiting_for = found.reason if found.state == "going on" else None
        if found.state == "failed":
            self._bring(canary.incumbent)
            self._end_canary("refused", found.reason)
        elif found.state == "passed":
            self._pass_canary(canary, f"{canary.verdict.reason}; {found.reason}")
        return found

    def judge_newest(self) -> Verdict | None:
        """Judge the newest candidate, if there are held-out answers enough; older ones are overtaken."""
        candidates = self.registry.versions("candidate")
        for overtaken in candidates[:-1]:
            self.registry.judged(overtaken.name, "inconclusive", {}, f"overtaken by {candidates[-1].name}")
        incumbent = self.registry.current()
        if not candidates or incumbent is None:
            return None
        newest = self._judge.newest()
        requests = len({entry.request_id for entry in newest})
        exams = self._judge.exams(newest) if requests >= self.config.min_requests else []
        if len({exam.request for exam in exams}) < self.config.min_requests:
            self.waiting_for = f"{requests} of {self.config.min_requests} held-out requests"
            return None
        self.waiting_for = None
        verdict = self._judge.verdict(candidates[-1], incumbent, exams, lambda: self._meanwhile(incumbent))
        if verdict.decision == "promoted" and self.config.canary_requests and self._served is not None:
            self._begin_canary(verdict, candidates[-1], incumbent)
        else:
            self._carry_out(verdict, candidates[-1], incumbent)
        return verdict

    @_one_at_a_time
    def try_out(self, name: str) -> Version:
        """By hand: draft with a version until the next promotion, rollback or restart; nothing is recorded.

        Raises:
            ConfigError: no such version, or the engine refuses it. RunError: its folder is damaged.
        """
        version = self._intact(name)
        if self._swap is not None:
            self._swap(version)
        return version

    @_one_at_a_time
    def promote_by_hand(self, name: str) -> Version:
        """Let a version serve from now on, and at the next start.

        Raises:
            ConfigError: no such version, or the engine refuses it; the old one stays.
            RunError: its folder is damaged, or another process was faster.
        """
        version, current = self._intact(name), self.registry.current()
        self._bring(version)
        if self.canary is not None:
            self._end_canary("inconclusive", f"its canary was cut short: {name} was promoted by hand")
        try:
            self.registry.promote(name, "promoted by hand", expected=None if current is None else current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "promotion", "version": name, "reason": "promoted by hand"})
        return version

    @_one_at_a_time
    def roll_back_by_hand(self) -> Version:
        """Let the predecessor serve again; during a canary, what served before it.

        Raises:
            ConfigError: the engine refuses it, and what serves stays. RunError: there is none.
        """
        if self.canary is not None:
            incumbent = self.canary.incumbent
            self._bring(incumbent)
            self._end_canary("refused", "its canary was ended by hand")
            return incumbent
        back, current = self.registry.predecessor(), self.registry.current()
        if back is None or current is None:
            raise RunError("there is no earlier version to go back to")
        self._bring(back)
        try:
            back = self.registry.rollback("rolled back by hand", expected=current.name)
        except RunError:
            self.follow()
            raise
        self._report({"event": "rollback", "version": current.name, "to": back.name, "reason": "by hand"})
        return back

    def _intact(self, name: str) -> Version:
        version = self.registry.get(name)
        if problem := self.registry.problem_of(version):
            raise RunError(f"{name} cannot serve: {problem}")
        return version

    def _meanwhile(self, incumbent: Version) -> None:
        """What does not wait until a candidate is judged: changes by hand, and regressions.

        Raises:
            Overtaken: something else serves now than the incumbent that it is compared with.
        """
        self.follow()
        self.watch()
        if self.serving is not None and self.serving.name != incumbent.name:
            raise Overtaken(f"{self.serving.name} came into service while it was judged")

    @_one_at_a_time
    def _carry_out(self, verdict: Verdict, candidate: Version, incumbent: Version) -> None:
        if verdict.decision == "promoted":
            try:
                self._promote(candidate, incumbent, verdict.reason)
            except ConfigError as error:
                verdict = replace(verdict, decision="refused", reason=f"refused by the engine: {error}")
            except RunError as error:
                verdict = replace(verdict, decision="inconclusive", reason=str(error))
                self._bring(self.registry.current() or incumbent)
        self._record(verdict)

    def _record(self, verdict: Verdict) -> None:
        self.registry.judged(verdict.candidate, verdict.decision, verdict.to_json(), verdict.reason)
        log.info("%s: %s, %s", verdict.candidate, verdict.decision, verdict.reason)
        self._report({"event": "verdict", **verdict.to_json()})
        if self.settings.online.keep_versions is not None:
            self.registry.clear_away(self.settings.online.keep_versions)

    @_one_at_a_time
    def _begin_canary(self, verdict: Verdict, candidate: Version, incumbent: Version) -> None:
        """The engine drafts with the candidate, the registry still boots the incumbent."""
        assert self._served is not None
        began = self._served.requests
        try:
            self._bring(candidate)
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
            self._bring(self.registry.current() or canary.incumbent)
            self._end_canary("inconclusive", str(error))
        else:
            self._end_canary("promoted", reason)

    def _end_canary(self, decision: Decision, reason: str) -> None:
        assert self.canary is not None
        verdict, self.canary, self.waiting_for = self.canary.verdict, None, None
        self._record(replace(verdict, decision=decision, reason=reason))

    def _promote(self, candidate: Version, incumbent: Version, reason: str) -> None:
        """The engine first, which checks what it loads; a crash in between boots the incumbent."""
        self._bring(candidate)
        self.registry.promote(candidate.name, reason, expected=incumbent.name)

    def _bring(self, version: Version) -> None:
        if self._swap is not None:
            self._swap(version)
        self.serving = version
        if self._served is not None:
            self._served.appoint(version.served_as)

    def _return(self, reason: str, failed: Version) -> None:
        try:
            back = self.registry.rollback(reason, expected=failed.name)
        except RunError as error:
            log.error("no rollback: %s", error)
            self.serving = failed  # not tried again and again
            return
        self._bring(back)
        self._report({"event": "rollback", "version": failed.name, "to": back.name, "reason": reason})
