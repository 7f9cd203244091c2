"""A canary in time: for a bounded number of requests a candidate drafts for everybody, then it stays or goes. Pure.

The engine has one draft at a time, so a share of the requests cannot have another one. What a canary risks is
acceptance alone, never an answer, and it is over sooner where acceptance falls sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distillspec.config import GateConfig
from distillspec.serving.online.gate import Verdict
from distillspec.serving.online.registry import Version


@dataclass(frozen=True)
class Canary:
    """A candidate in service that the registry has not promoted: a crash boots the incumbent."""

    candidate: Version
    incumbent: Version
    verdict: Verdict  # of the shadow, which liked it
    began: int  # requests that were finished before

    def requests(self, finished: int) -> int:
        """How many it has seen, given how many have ever finished."""
        return finished - self.began


@dataclass(frozen=True)
class Outcome:
    """What a canary has shown so far."""

    state: Literal["going on", "passed", "failed"]
    reason: str


def outcome(requests: int, config: GateConfig, regression: Callable[[int], str | None]) -> Outcome:
    """Failed as soon as served acceptance lies below the incumbent's interval; passed after `canary_requests`.

    Args:
        requests: finished since it began, with or without a draft.
        regression: why the candidate should go, told how many of its requests are needed to say so (see
            `ServedAcceptance.regression`); None where nothing speaks against it, or too little was drafted.
    """
    problem = regression(min(config.rollback_requests, config.canary_requests))
    if problem is not None:
        return Outcome("failed", f"returned after a canary of {requests} requests: {problem}")
    if requests < config.canary_requests:
        return Outcome("going on", f"canary: {requests} of {config.canary_requests} requests")
    return Outcome("passed", f"no fall of acceptance in a canary of {requests} requests")
