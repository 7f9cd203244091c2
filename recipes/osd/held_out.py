"""Held-out answers of each segment, on which drafts are evaluated with whole distributions."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.errors import ConfigError
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.recipes.osd.hindsight import look_back
from distillspec.recipes.osd.stream import Stream
from distillspec.recipes.osd.study import Study

Rows = list[dict[str, float]]
"""One draft on one segment's held-out answers, a row each: `positions`, sums of `alpha` (true), `upper`, `lower`."""


class HeldOutSets:
    """Held-out answers of all segments. The target reads each one once.

    Raises:
        ConfigError: a segment without a held-out answer.
    """

    def __init__(self, study: Study, target: LanguageModel, stream: Stream) -> None:
        self.target = target
        self.states = TargetStates(target, study.root / "states")
        self.answers = [
            [answer for answer in stream.of(segment) if study.holds_out(answer.request_id)][: study.exam_requests]
            for segment in range(len(study.segments))
        ]
        for place, answers in enumerate(self.answers):
            if not answers:
                raise ConfigError(f"no request of segment {place} is held out; raise --requests or --held-out")

    def evaluate(self, draft: LanguageModel, segment: int) -> Rows:
        """Measure true α and its bounds from the log's signal, for the same draft and text."""
        rows = []
        for answer in self.answers[segment]:
            positions = measure_positions(draft, self.target, answer.sample(), answer.policy, states=self.states)
            hindsight = look_back(draft, answer, self.states)
            rows.append(
                {
                    "positions": len(positions),
                    "alpha": round(float(positions.alpha.sum()), 4),
                    "upper": round(float(hindsight.upper.sum()), 4),
                    "lower": round(float(hindsight.lower.sum()), 4),
                }
            )
        self.states.save()
        return rows


def alpha_of(rows: Sequence[dict[str, float]], field: str = "alpha") -> float:
    """Return α over all positions of the rows."""
    return sum(row[field] for row in rows) / sum(row["positions"] for row in rows)
