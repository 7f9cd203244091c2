"""Comparison of two sides of a load, request by request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distillspec.evaluation.bootstrap import interval
from distillspec.serving.bench.records import LoadRecord
from distillspec.types import Interval

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Speed of one side relative to another: Σ latencies of the other / Σ latencies of this one.

    The 95 % interval is a paired percentile bootstrap over requests. It covers the choice of requests and variation
    within the run, not variation between runs.
    """

    of: str
    against: str
    value: Interval


def speed_ratio(records: Mapping[str, list[LoadRecord]], of: str, against: str, seed: int = 0) -> Ratio:
    """Compare two sides.

    Args:
        records: by side, one record a round. Rounds are in the same order, arrivals equal within a round.
        of: the side whose speed is given.
        against: the side that it is compared with.
        seed: of the bootstrap.

    Raises:
        ValueError: no request was answered by both sides.
    """
    pairs = [
        (other[request.id].latency_s, request.latency_s)
        for mine, theirs in zip(records[of], records[against], strict=True)
        for other in [{request.id: request for request in theirs.requests}]
        for request in mine.requests
        if request.id in other
    ]
    if not pairs:
        raise ValueError(f"{of} and {against} answered no request in common")
    theirs_s, own_s = zip(*pairs, strict=True)
    return Ratio(of, against, interval(theirs_s, own_s, RESAMPLES, seed))
