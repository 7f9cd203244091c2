"""Regressions in service: suspected from served acceptance, confirmed on fresh answers, then rolled back."""

from __future__ import annotations

import logging

from distillspec.serving.online.gate.in_service import InService, Suspicion, one_at_a_time
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.judging.question import suspicion_question
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)

PROMOTED = "promoted"  # a verdict's decision
SUSPECTED = "suspected: "  # start of a version's reason while its acceptance in service is too low


class SuspicionCheck:
    """Watches the acceptance of the version in service, and compares a suspected one with its predecessor."""

    def __init__(self, in_service: InService, judge: Judge) -> None:
        self._in_service, self._judge = in_service, judge
        self._registry, self.lock = in_service.registry, in_service.lock

    @one_at_a_time
    def watch(self) -> None:
        """Suspect the version in service if its acceptance is below its predecessor's interval, or nobody judged it."""
        current = self._in_service
        if current.version is None or current.served is None or not current.is_check_due():
            return
        current.mark_checked()
        predecessor = self._registry.challenged_by()
        served_as = None if predecessor is None else predecessor.served_as
        problem = None if served_as is None else current.served.regression(current.version.served_as, served_as)
        problem = problem or self._unproven(current.version)
        if problem is None:
            self._clear(current.version)
        elif current.suspicion is None:
            self._suspect(current.version, problem)

    @one_at_a_time
    def check(self) -> bool:
        """Roll a suspected version back if the answers since its promotion show it worse. Return True if so."""
        current = self._in_service
        question = suspicion_question(self._registry)
        if current.suspicion is None or question is None or question.version.name != current.suspicion.version.name:
            return False
        found = self._judge.regression(question)
        if found is None:
            return False
        reason = f"{current.suspicion.reason}; {found}"
        log.error("%s is rolled back: %s", question.version.name, reason)
        current.suspicion = None
        current.roll_back(question.version, reason)
        return True

    def _unproven(self, version: Version) -> str | None:
        """Return why a version needs proof, None for one that was judged, or has nothing before it.

        One that an operator promoted may be broken, and where n-grams are drafted in its place its acceptance shows
        nothing. So answers are read under it and its predecessor until these would do to suspect any version.
        """
        question = suspicion_question(self._registry)
        if question is None or question.version.name != version.name or version.verdict.get("decision") == PROMOTED:
            return None
        config, read = self._judge.config, len(self._judge.evidence(question).pairs)
        if read >= max(config.rollback_requests, config.min_requests) and self._judge.regression(question) is None:
            return None
        return f"it was promoted without a verdict; {question.against.name} served before"

    def _suspect(self, version: Version, problem: str) -> None:
        self._in_service.suspicion = Suspicion(version, problem)
        log.warning("%s is suspected, and serves on: %s", version.name, problem)
        self._registry.note(version.name, f"{SUSPECTED}{problem}")
        self._in_service.report({"event": "suspicion", "version": version.name, "reason": problem})

    def _clear(self, version: Version) -> None:
        """Drop the suspicion, one from before a restart too."""
        self._in_service.suspicion = None
        known = self._registry.get(version.name)
        if known.reason.startswith(SUSPECTED):
            self._registry.note(version.name, str(known.verdict.get("reason", "")))
