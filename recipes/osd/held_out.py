"""Held-out answers of each segment, on which drafts are evaluated with whole distributions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.recipes.osd.beside import alpha_beside
from distillspec.recipes.osd.hindsight import look_back
from distillspec.recipes.osd.stores import Store
from distillspec.recipes.osd.stream import Stream
from distillspec.recipes.osd.study import Study
from distillspec.serving.online.log.records import LoggedAnswer

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
        for segment, answers in enumerate(self.answers):
            if not answers:
                raise ConfigError(f"no request of segment {segment} is held out; raise --requests or --held-out")

    def evaluate(self, draft: LanguageModel, segment: int, store: Store | None = None) -> Rows:
        """Measure true α and its bounds from the log's signal, for the same draft and text.

        Args:
            store: names tokens that are tried before the draft's.
        """
        rows = []
        for answer in self.answers[segment]:
            named = None if store is None else store.named(answer)
            hindsight = look_back(draft, answer, self.states, named)
            rows.append(
                {
                    "positions": len(hindsight),
                    "alpha": round(float(self._alpha(draft, answer, named).sum()), 4),
                    "upper": round(float(hindsight.upper.sum()), 4),
                    "lower": round(float(hindsight.lower.sum()), 4),
                }
            )
        self.states.save()
        return rows

    def _alpha(self, draft: LanguageModel, answer: LoggedAnswer, named: Tensor | None) -> Tensor:
        """Return α at each token `[R]`, by whole distributions."""
        if named is not None:
            return alpha_beside(draft, self.target, answer, named, self.states)
        return measure_positions(draft, self.target, answer.sample(), answer.policy, states=self.states).alpha


def alpha_of(rows: Sequence[dict[str, float]], field: str = "alpha") -> float:
    """Return α over all positions of the rows."""
    return sum(row[field] for row in rows) / sum(row["positions"] for row in rows)
