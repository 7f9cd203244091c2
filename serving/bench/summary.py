"""Summary figures of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy

from distillspec.serving.bench.records import LoadRecord

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of times in seconds, all None without a measurement."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Summarise the values that are not None."""
        seen = [value for value in values if value is not None]
        if not seen:
            return cls(None, None, None, None)
        return cls(float(numpy.mean(seen)), *(float(numpy.quantile(seen, q)) for q in QUANTILES.values()))


@dataclass(frozen=True)
class LoadSummary:
    """Figures of one side of `distill bench`.

    Args:
        tokens_per_s: output tokens over the time from the first arrival's clock to the last answer.
        goodput: output tokens a second of the engine's busy time, None for servers.
        block_efficiency: τ, tokens a row and decoding step, None for servers.
        errors: failed requests by reason (servers).
        acceptance: accepted / proposed tokens, None if nothing was proposed or reported.
        mean_length: drafted tokens a row and decoding step, None for servers.
        step_time_error: median of |predicted − measured| / measured over decoding steps, None without predictions.
        tokens_error: |predicted − emitted| / emitted, summed over all predicted steps.
        accepted_by_source: accepted tokens of each draft and other source, empty for servers.
    """

    requests: int
    failed: int
    errors: Mapping[str, int]
    seconds: float
    output_tokens: int
    tokens_per_s: float
    latency_s: Spread
    time_to_first_token_s: Spread
    time_per_token_s: Spread
    goodput: float | None
    block_efficiency: float | None
    acceptance: float | None
    mean_length: float | None
    step_time_error: float | None
    tokens_error: float | None
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(record: LoadRecord) -> LoadSummary:
    """Compute all figures of one run."""
    tokens = sum(request.output_tokens for request in record.requests)
    busy = sum(step.seconds for step in record.steps)
    rows = sum(step.rows for step in record.steps)
    return LoadSummary(
        requests=len(record.requests),
        failed=record.failed,
        errors=dict(record.errors),
        seconds=record.seconds,
        output_tokens=tokens,
        tokens_per_s=tokens / record.seconds if record.seconds > 0 else 0.0,
        latency_s=Spread.of(request.latency_s for request in record.requests),
        time_to_first_token_s=Spread.of(request.time_to_first_token_s for request in record.requests),
        time_per_token_s=Spread.of(request.time_per_token_s for request in record.requests),
        goodput=tokens / busy if busy > 0 else None,
        block_efficiency=sum(step.emitted for step in record.steps) / rows if rows else None,
        acceptance=_acceptance(record),
        mean_length=sum(step.proposed for step in record.steps) / rows if rows else None,
        step_time_error=_step_time_error(record),
        tokens_error=_tokens_error(record),
        accepted_by_source=_accepted_by_source(record),
    )


def _acceptance(record: LoadRecord) -> float | None:
    proposed = sum(request.proposed or 0 for request in record.requests)
    accepted = sum(request.accepted or 0 for request in record.requests)
    return accepted / proposed if proposed else record.acceptance


def _accepted_by_source(record: LoadRecord) -> dict[str, int]:
    found = Counter[str]()
    for request in record.requests:
        found.update(request.accepted_by_source)
    return dict(found)


def _step_time_error(record: LoadRecord) -> float | None:
    """Return the median relative error, without steps that read prompts: plans are made for decoding rows."""
    errors = [
        abs(step.predicted_s - step.seconds) / step.seconds
        for step in record.steps
        if step.predicted_s is not None and step.rows and not step.prefill_tokens and step.seconds > 0
    ]
    return float(numpy.median(errors)) if errors else None


def _tokens_error(record: LoadRecord) -> float | None:
    steps = [step for step in record.steps if step.predicted_tokens is not None and step.rows]
    emitted = sum(step.emitted for step in steps)
    predicted = sum(step.predicted_tokens or 0.0 for step in steps)
    return abs(predicted - emitted) / emitted if emitted else None
