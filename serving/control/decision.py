"""Decision of a goodput controller: the lengths of a step, and the reasons for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.rows import RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.costs.latency import LatencyModel

Speculating = Literal["speculating", "exploring", "hoped", "trial", "within bounds", "bounds out of reach"]
Mode = Literal[Speculating, "not worth it", "measuring plain", "nothing to draft for"]


@dataclass(frozen=True)
class Decision:
    """Reasons of a plan: predicted seconds and tokens of the step, and the estimates behind them."""

    mode: Mode
    lengths: tuple[int, ...]  # levels of each row
    shapes: tuple[TreeShape, ...]  # of each row's tree
    rows: tuple[RowView, ...] = field(repr=False)  # that it was decided for, each with its source
    predicted_tokens: float
    predicted_s: float
    plain_tokens_per_s: float
    best_tokens_per_s: float  # of the best lengths, whether they were taken or not
    uncertainty: float  # relative, of the measured goodput
    hazards: tuple[float, ...]
    latency: LatencyModel
    raw: tuple[float, float]  # goodput without speculation and of the best lengths, before what was measured
    slo_violation: float | None = None  # the worst row's expected time per token over its bound, None without bounds
    usual: float | None = None  # goodput that plans usually promise over plain one, where sources name their nodes
    gain: float | None = None  # of goodput by these sources, None where none was to be weighed

    def holds_for(self, rows: Sequence[RowView], most: int) -> bool:
        """Return True for rows that are planned for as these were: their texts alone have grown.

        A draft that reads long texts first does so in a single step.

        Args:
            most: tokens that a row may draft. Its limit falls with every step, and counts once it is below `most`.
        """
        if not any(self.lengths) and not any(row.max_time_per_token_s for row in rows):
            return [row.sequence_id for row in rows] == [row.sequence_id for row in self.rows]
        own = zip(self.rows, self.lengths, strict=True)
        if any(length and row.drafted_by_model and row.unread_tokens > ALONG for row, length in own):
            return False
        return len(rows) == len(self.rows) and all(_is_alike(*pair, most) for pair in zip(rows, self.rows, strict=True))


def _is_alike(row: RowView, before: RowView, most: int) -> bool:
    if row.others or row.match or row.likely or row.max_time_per_token_s is not None:
        return False
    grown = before._replace(
        context_tokens=row.context_tokens,
        unread_tokens=row.unread_tokens,
        limit=row.limit,
        left=row.left,
        belief=row.belief,  # evidence of acceptance, which counts in the next plan
    )
    return row == grown and min(row.limit, most) == min(before.limit, most)
