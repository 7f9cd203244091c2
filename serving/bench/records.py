"""Records of a load, by request and step. Times are seconds from its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distillspec.serving.bench.step_record import StepRecord


@dataclass(frozen=True)
class RequestRecord:
    """One answered request.

    `arrived_s` is the planned time, so that waiting to be accepted counts. `accepted` and `proposed` are None where the
    server does not report them.
    """

    id: str
    domain: str
    arrived_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    proposed: int | None = None
    accepted: int | None = None
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)  # empty where it is not reported

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrived_s

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def time_per_token_s(self) -> float | None:
        """Time per output token after the first, None for an answer of one token."""
        later = self.output_tokens - 1
        return (self.finished_s - self.first_token_s) / later if later > 0 else None


@dataclass(frozen=True)
class LoadRecord:
    """A whole run.

    Attributes:
        failed: requests that ended with an error or not at all.
        errors: failed requests by reason.
        acceptance: from a server's own counters, where its answers do not report it.
    """

    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    seconds: float
    failed: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    acceptance: float | None = None

    @classmethod
    def joined(cls, records: Sequence[LoadRecord]) -> LoadRecord:
        """Join several rounds to one run. Their clocks all start at 0."""
        rates = [record.acceptance for record in records if record.acceptance is not None]
        errors: Counter[str] = Counter()
        for record in records:
            errors.update(record.errors)
        return cls(
            tuple(request for record in records for request in record.requests),
            tuple(step for record in records for step in record.steps),
            sum(record.seconds for record in records),
            sum(record.failed for record in records),
            dict(errors),
            sum(rates) / len(rates) if rates else None,
        )
