"""One step as it went, live or simulated: what benchmarks keep of it."""

from __future__ import annotations

from typing import NamedTuple

from distillspec.serving.base.plans import StepResult, decoding_rows


class StepRecord(NamedTuple):
    """Figures of one step, summed over the decoding rows. Times are seconds from the start of the load."""

    at_s: float
    seconds: float
    rows: int  # decoding
    waiting: int
    proposed: int  # tokens that were drafted and verified
    longest: int  # of these, for one row
    emitted: int
    prefill_tokens: int
    reserved_tokens: int  # set aside in the cache, all rows
    predicted_s: float | None
    predicted_tokens: float | None
    draft_s: float = 0.0  # in drafts, beside the target where there are micro-batches
    target_s: float = 0.0

    @classmethod
    def of(cls, result: StepResult, at_s: float) -> StepRecord:
        """Return the record of a result, of a step that started at `at_s`."""
        rows = decoding_rows(result)
        proposed = [row.nodes for row in rows]
        return cls(
            at_s=at_s,
            seconds=result.total_s,
            rows=len(rows),
            waiting=result.view.waiting,
            proposed=sum(proposed),
            longest=max(proposed, default=0),
            emitted=sum([row.emitted for row in rows]),
            prefill_tokens=result.prefill_tokens,
            reserved_tokens=result.reserved_tokens,
            predicted_s=result.plan.predicted_s,
            predicted_tokens=result.plan.predicted_tokens,
            draft_s=result.draft_s,
            target_s=result.target_s,
        )
