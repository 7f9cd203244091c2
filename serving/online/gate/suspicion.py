"""Regressions in service: suspected from served acceptance, confirmed on held-out answers, then rolled back."""

from __future__ import annotations

import logging
from dataclasses import replace

from distillspec.config import GateConfig
from distillspec.serving.online.gate.decision import GateDecision
from distillspec.serving.online.gate.in_service import InService, Suspicion, one_at_a_time
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.shadow import BetweenAnswers
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)

SUSPECTED = "suspected: "  # start of a version's reason while its acceptance in service is too low


class SuspicionCheck:
    """Watches the acceptance of the version in service and compares a suspected one with its predecessor."""

    def __init__(self, in_service: InService, config: GateConfig) -> None:
        self._in_service, self._config = in_service, config
        self._registry, self.lock = in_service.registry, in_service.lock

    @one_at_a_time
    def watch(self) -> None:
        """Suspect the version in service if its acceptance is below its predecessor's interval."""
        current = self._in_service
        if current.version is None or current.served is None or not current.is_check_due():
            return
        current.mark_checked()
        predecessor = self._registry.challenged_by()
        served_as = None if predecessor is None else predecessor.served_as
        problem = None if served_as is None else current.served.regression(current.version.served_as, served_as)
        if problem is None:
            self._clear(current.version)
        elif current.suspicion is None:
            self._suspect(current.version, problem)

    def check(self, judge: CandidateJudge, between_answers: BetweenAnswers) -> GateDecision | None:
        """Compare the suspected version with its predecessor on held-out answers logged since its promotion.

        Roll back if it is clearly worse. The next check waits until these answers have doubled, to keep false alarms
        rare. None: nothing was compared.
        """
        suspicion = self._in_service.suspicion
        if suspicion is None:
            return None
        found = judge.held_out(self._registry.promotions()[-1]["time_s"])
        requests = len({entry.request_id for entry in found})
        if requests < suspicion.next_check or (back := self._registry.predecessor()) is None:
            return None
        samples = judge.samples(judge.newest(found))
        if len({sample.request for sample in samples}) < self._config.min_requests:
            return None
        verdict = judge.verdict(suspicion.version, back, samples, between_answers)
        self._conclude(replace(suspicion, next_check=2 * requests), verdict)
        return verdict

    def _suspect(self, version: Version, problem: str) -> None:
        self._in_service.suspicion = Suspicion(version, problem, self._config.min_requests)
        log.warning("%s is suspected, and serves on: %s", version.name, problem)
        self._registry.note(version.name, f"{SUSPECTED}{problem}")
        self._in_service.report({"event": "suspicion", "version": version.name, "reason": problem})

    def _clear(self, version: Version) -> None:
        """Drop the suspicion, one from before a restart too."""
        self._in_service.suspicion = None
        known = self._registry.get(version.name)
        if known.reason.startswith(SUSPECTED):
            self._registry.note(version.name, str(known.verdict.get("reason", "")))

    @one_at_a_time
    def _conclude(self, suspicion: Suspicion, verdict: GateDecision) -> None:
        """Roll the version back if the whole interval of its gain over its predecessor is below zero."""
        current, version = self._in_service, suspicion.version
        if current.version is None or current.version.name != version.name:
            return  # an operator rolled it back during the judging
        if current.suspicion is None:
            return  # its acceptance recovered during the judging
        if verdict.gain is not None or verdict.decision != "inconclusive":  # what cannot be judged waits too
            current.suspicion = suspicion
        reason = f"{suspicion.reason}; {_finding(verdict)}"
        if verdict.gain is not None and verdict.gain.high < 0:
            log.error("%s is rolled back: %s", version.name, reason)
            current.suspicion = None
            current.roll_back(version, reason)
        else:
            log.info("%s serves on: %s", version.name, reason)
            self._registry.note(version.name, f"{SUSPECTED}{reason}")


def _finding(verdict: GateDecision) -> str:
    if verdict.gain is None:
        return verdict.reason
    gain = f"{verdict.gain.mean:+.1%} ({verdict.gain.low:+.1%} … {verdict.gain.high:+.1%})"
    return f"on {verdict.requests} held-out requests read under both, gain {gain} over {verdict.incumbent}"
