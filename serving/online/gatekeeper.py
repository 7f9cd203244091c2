"""Judges candidates, lets the better ones in (by way of a canary, if asked), sends back those that are worse than what
served before them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
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


SUSPECTED = "suspected: "  # how a version's reason begins while its acceptance in service looks too low


@dataclass(frozen=True)
class Suspicion:
    """A version's acceptance in service lies below what its predecessor had: on other requests, in another hour.

    It proves nothing. Held-out answers read under both drafts do (`Gatekeeper.look_into_suspicion`).
    """

    version: Version
    reason: str
    next_look: int  # held-out requests of the version's own time that are enough to look into it


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
        self.suspicion: Suspicion | None = None
        self.waiting_for: str | None = None  # why the newest candidate is not judged yet
        self._looked = 0
        self._door = threading.RLock()

    def work(self) -> None:
        """Follow what was promoted elsewhere, look into what serves, judge the newest candidate."""
        self.follow()
        if self.canary is not None:
            self.watch_canary()
            return
        self.watch()
        self.look_into_suspicion()
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
        """Suspect what serves where its acceptance fell below its predecessor's interval; changes nothing else."""
        if self._served is None or self.serving is None or self._served.due == self._looked:
            return
        self._looked = self._served.due
        predecessor = self.registry.challenged_by()
        served_as = None if predecessor is None else predecessor.served_as
        problem = None if served_as is None else self._served.regression(self.serving.served_as, served_as)
        if problem is None:
            self._clear_suspicion(self.serving)
        elif self.suspicion is None:
            self._suspect(self.serving, problem)

    def look_into_suspicion(self) -> Verdict | None:
        """Compare the suspected version with its predecessor on held-out answers logged since its promotion; roll back
        if clearly worse.

        Looks again only when these have doubled, to keep false alarms rare. None: did not look.
        """
        suspicion = self.suspicion
        if suspicion is None:
            return None
        found = self._judge.held_out(self.registry.promotions()[-1]["time_s"])
        requests = len({entry.request_id for entry in found})
        if requests < suspicion.next_look or (back := self.registry.predecessor()) is None:
            return None
        exams = self._judge.exams(self._judge.newest(found))
        if len({exam.request for exam in exams}) < self.config.min_requests:
            return None
        verdict = self._judge.verdict(suspicion.version, back, exams, lambda: self._meanwhile(suspicion.version))
        self._answer_suspicion(replace(suspicion, next_look=2 * requests), verdict)
        return verdict

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
        newest = self._judge.newest(self._judge.held_out())
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

    def _suspect(self, version: Version, problem: str) -> None:
        self.suspicion = Suspicion(version, problem, self.config.min_requests)
        log.warning("%s is suspected, and serves on: %s", version.name, problem)
        self.registry.note(version.name, f"{SUSPECTED}{problem}")
        self._report({"event": "suspicion", "version": version.name, "reason": problem})

    def _clear_suspicion(self, version: Version) -> None:
        """One from before a restart too."""
        self.suspicion = None
        known = self.registry.get(version.name)
        if known.reason.startswith(SUSPECTED):
            self.registry.note(version.name, str(known.verdict.get("reason", "")))

    @_one_at_a_time
    def _answer_suspicion(self, suspicion: Suspicion, verdict: Verdict) -> None:
        """Send the version back where the whole interval of its gain over its predecessor is below zero."""
        if self.serving is None or self.serving.name != suspicion.version.name:
            return  # sent back by hand meanwhile
        if self.suspicion is None:
            return  # its acceptance recovered meanwhile
        if verdict.gain is not None or verdict.decision != "inconclusive":  # what cannot be judged waits too
            self.suspicion = suspicion
        if verdict.gain is None:
            paired = verdict.reason
        else:
            gain = f"{verdict.gain.mean:+.1%} ({verdict.gain.low:+.1%} … {verdict.gain.high:+.1%})"
            paired = f"on {verdict.requests} held-out requests read under both, gain {gain} over {verdict.incumbent}"
        reason = f"{suspicion.reason}; {paired}"
        if verdict.gain is not None and verdict.gain.high < 0:
            log.error("%s is rolled back: %s", suspicion.version.name, reason)
            self.suspicion = None
            self._return(reason, suspicion.version)
        else:
            log.info("%s serves on: %s", suspicion.version.name, reason)
            self.registry.note(suspicion.version.name, f"{SUSPECTED}{reason}")

    def _intact(self, name: str) -> Version:
        version = self.registry.get(name)
        if problem := self.registry.problem_of(version):
            raise RunError(f"{name} cannot serve: {problem}")
        return version

    def _meanwhile(self, incumbent: Version) -> None:
        """What does not wait until a candidate is judged: changes by hand, and suspicions.

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
        self._serves(version)
        if self._served is not None:
            self._served.appoint(version.served_as)

    def _serves(self, version: Version) -> None:
        self.serving = version
        if self.suspicion is not None and self.suspicion.version.name != version.name:
            self.suspicion = None

    def _return(self, reason: str, failed: Version) -> None:
        try:
            back = self.registry.rollback(reason, expected=failed.name)
        except RunError as error:
            log.error("no rollback: %s", error)
            self._serves(failed)  # not tried again and again
            return
        self._bring(back)
        self._report({"event": "rollback", "version": failed.name, "to": back.name, "reason": reason})
