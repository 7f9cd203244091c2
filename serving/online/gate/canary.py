"""Canary: a candidate drafts for every request, for a bounded number of them, then it stays or goes. Pure.

The engine has one draft at a time, so no share of the requests can have another one. A canary risks acceptance only,
never an answer, and it ends as soon as acceptance drops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distillspec.config import GateConfig
from distillspec.serving.online.gate.decision import GateDecision
from distillspec.serving.online.state.version import Version


@dataclass(frozen=True)
class Canary:
    """A candidate in service that the registry has not promoted: a crash boots the incumbent."""

    candidate: Version
    incumbent: Version
    verdict: GateDecision  # on held-out answers
    began: int  # requests that had finished when it began

    def requests(self, finished: int) -> int:
        """Return the requests of the canary, given all that have finished."""
        return finished - self.began


@dataclass(frozen=True)
class CanaryOutcome:
    """State of a canary, with its reason."""

    state: Literal["going on", "passed", "failed"]
    reason: str


def outcome(requests: int, config: GateConfig, regression: Callable[[int], str | None]) -> CanaryOutcome:
    """Decide a canary: failed once acceptance is below the incumbent's interval, passed after `canary_requests`.

    Args:
        requests: finished since it began, with or without a draft.
        regression: takes the number of requests that suffice and returns why the candidate should go. None: nothing
            speaks against it, or too little was drafted. See `ServedAcceptance.regression`.
    """
    problem = regression(min(config.rollback_requests, config.canary_requests))
    if problem is not None:
        return CanaryOutcome("failed", f"returned after a canary of {requests} requests: {problem}")
    if requests < config.canary_requests:
        return CanaryOutcome("going on", f"canary: {requests} of {config.canary_requests} requests")
    return CanaryOutcome("passed", f"no fall of acceptance in a canary of {requests} requests")
