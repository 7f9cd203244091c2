"""Versions in service that are suspected: compared with their predecessors on fresh answers, rolled back if worse."""

from __future__ import annotations

import logging

from distillspec.serving.base.locked import one_at_a_time
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.serving_version import ServingVersion, Suspicion
from distillspec.serving.online.judging.question import (
    ACQUITTED,
    SUSPECTED_AFTER,
    SUSPICIONS,
    suspicion_question,
)
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)

PROMOTED = "promoted"  # a verdict's decision
PROVEN = "read_since"  # in a verdict: number of the promotion, one without a verdict, after which it was read
SUSPECTED = "suspected: "  # start of a suspected version's reason


class SuspicionCheck:
    """Watches the acceptance of the version in service, and compares a suspected one with its predecessor."""

    def __init__(self, serving_version: ServingVersion, judge: Judge) -> None:
        self._serving_version, self._judge = serving_version, judge
        self._registry, self.lock = serving_version.registry, serving_version.lock

    @one_at_a_time
    def watch(self) -> None:
        """Suspect the version in service if its acceptance is below its predecessor's interval, or nobody judged it."""
        current = self._serving_version
        if current.version is None or current.served is None or not current.is_check_due():
            return
        current.mark_checked()
        predecessor = self._registry.challenged_by()
        served_as = None if predecessor is None else predecessor.served_as
        problem = None if served_as is None else current.served.regression(current.version.served_as, served_as)
        if problem is None and predecessor is not None:
            problem = self._unproven()
        if problem is None:
            self._clear(current.version)
        elif current.suspicion is None and self._may_be_asked_again(current.version):
            self._suspect(current.version, problem)

    @one_at_a_time
    def check(self) -> bool:
        """Roll a suspected version back if the answers since its promotion show it worse. Return True if so.

        If all conversations that decide a question do not, the suspicion ends: what is written now is harder.
        """
        current = self._serving_version
        if current.suspicion is None:
            return False
        question = suspicion_question(self._registry)
        if question is None or question.version.name != current.suspicion.version.name:
            return False
        evidence = self._judge.regression(question)
        if evidence is None:
            if self._judge.has_all(question):
                self._acquit(question.version)
            return False
        reason = f"{current.suspicion.reason}; {evidence}"
        log.error("%s is rolled back: %s", question.version.name, reason)
        current.suspicion = None
        current.roll_back(question.version, reason)
        return True

    def _unproven(self) -> str | None:
        """Return why the version in service needs proof.

        None: a verdict promoted it, or enough answers were read under it and its predecessor since. A version that an
        operator promoted may be broken, whatever was shown of it before. Where n-grams are drafted in its place, its
        acceptance in service shows nothing.
        """
        version = self._registry.current()
        if version is None:
            return None
        last, verdict = self._registry.promotions()[-1], version.verdict
        by_verdict = verdict.get("decision") == PROMOTED and verdict.get("reason") == last["reason"]
        if by_verdict or verdict.get(PROVEN) == last["id"]:
            return None
        question = suspicion_question(self._registry)
        if question is None:
            return None
        if self._judge.has_enough(question) and self._judge.regression(question) is None:
            self._registry.judged(version.name, version.status, {**verdict, PROVEN: last["id"]}, version.reason)
            return None
        return f"it was promoted without a verdict; {question.against.name} served before"

    def _may_be_asked_again(self, version: Version) -> bool:
        """Return False for a version that was not shown to be worse since its promotion, until there is other text."""
        promotion, newest = self._registry.get(version.name).verdict.get(ACQUITTED, (None, 0))
        if promotion != self._registry.promotions()[-1]["id"]:
            return True
        return self._judge.replay.newest_number() - newest >= self._judge.config.requests

    def _suspect(self, version: Version, problem: str) -> None:
        # A version may have served well for weeks. The question is about the answers of now.
        after = max(0, self._judge.replay.newest_number() - self._judge.config.requests)
        verdict = self._registry.get(version.name).verdict
        asked = {SUSPECTED_AFTER: after, SUSPICIONS: 1 + verdict.get(SUSPICIONS, 0)}
        self._registry.judged(version.name, version.status, {**verdict, **asked}, f"{SUSPECTED}{problem}")
        self._serving_version.suspicion = Suspicion(version, problem)
        log.warning("%s is suspected, and serves on: %s", version.name, problem)
        self._serving_version.report({"event": "suspicion", "version": version.name, "reason": problem})

    def _acquit(self, version: Version) -> None:
        acquitted = self._registry.promotions()[-1]["id"], self._judge.replay.newest_number()
        self._registry.judged(version.name, version.status, {**version.verdict, ACQUITTED: acquitted}, version.reason)
        self._clear(version)
        log.warning("%s is no longer suspected: the answers do not show that it is worse", version.name)
        self._serving_version.report({"event": "acquittal", "version": version.name})

    def _clear(self, version: Version) -> None:
        """Drop the suspicion, one from before a restart too."""
        self._serving_version.suspicion = None
        known = self._registry.get(version.name)
        if known.reason.startswith(SUSPECTED):
            self._registry.note(version.name, str(known.verdict.get("reason", "")))
