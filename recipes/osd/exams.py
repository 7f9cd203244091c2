"""Held-out answers, which no draft of the study learns from, scored again by the target with whole distributions."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.errors import ConfigError
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.recipes.osd.hindsight import look_back
from distillspec.recipes.osd.stream import Stream
from distillspec.recipes.osd.study import Study

Sheet = list[dict[str, float]]
"""One draft on one segment's exam, a row an answer: `positions`, and sums of `alpha` (true), `upper` and `lower`."""


class Exams:
    """The exams of all segments; the target reads every answer once.

    Raises:
        ConfigError: a segment without a held-out answer.
    """

    def __init__(self, study: Study, target: LanguageModel, stream: Stream) -> None:
        self.target = target
        self.states = TargetStates(target, study.root / "states")
        self.answers = [
            [answer for answer in stream.of(segment) if answer.split == "held_out"][: study.exam_requests]
            for segment in range(len(study.segments))
        ]
        for place, answers in enumerate(self.answers):
            if not answers:
                raise ConfigError(f"no request of segment {place} is held out; raise --requests or --held-out")

    def sit(self, draft: LanguageModel, segment: int) -> Sheet:
        """True α beside what the log's best tokens say of it, for the same draft and text."""
        sheet = []
        for answer in self.answers[segment]:
            positions = measure_positions(draft, self.target, answer.sample(), answer.policy, states=self.states)
            seen = look_back(draft, answer)
            sheet.append(
                {
                    "positions": len(positions),
                    "alpha": round(float(positions.alpha.sum()), 4),
                    "upper": round(float(seen.upper.sum()), 4),
                    "lower": round(float(seen.lower.sum()), 4),
                }
            )
        self.states.save()
        return sheet


def alpha_of(sheet: Sequence[dict[str, float]], field: str = "alpha") -> float:
    """α over all positions of an exam."""
    return sum(row[field] for row in sheet) / sum(row["positions"] for row in sheet)
