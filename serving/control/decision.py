"""Decision of a goodput controller: the lengths of a step, and the reasons for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import NO_TREE, TreeShape
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.step_costs import StepCosts
from distillspec.serving.planning.offers import Offer

# The words that operators see. "hoped": chains that pay by an optimistic acceptance.
Speculating = Literal["speculating", "exploring", "hoped", "trial", "within bounds", "bounds out of reach"]
Mode = Literal[Speculating, "not worth it", "measuring plain", "nothing to draft for"]

GROWING = ("context_tokens", "unread_tokens", "limit", "room", "belief")  # fields of a row that every step changes
_kept_fields = attrgetter(*[name for name in RowView._fields if name not in GROWING])
STAY_PLAIN_ROWS_SHARE = 0.75  # of the rows that plain decoding was decided for, with which it goes on


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
    predicted_plain_goodput: float  # without speculation, not corrected by what was measured
    predicted_best_goodput: float  # of the best lengths, not corrected either
    slo_violation: float | None = None  # the worst row's expected time per token over its bound, None without bounds
    promised_ratio: float | None = None  # of plans' to plain goodput, in the mean. None: no source has likely nodes
    gain: float | None = None  # of goodput by likely nodes, None where none was to be weighed
    prefill_tokens: int = 0  # read in the step whatever is drafted
    matches: Mapping[str, int] = field(default_factory=dict)  # see `matches_of`
    first: Decision | None = field(default=None, repr=False)  # that this one repeats for other rows

    @property
    def is_best(self) -> bool:
        """True for the plan that is expected to give most, if it speculates."""
        return self.mode == "speculating"

    @property
    def is_optimistic(self) -> bool:
        """True for a plan that pays by an optimistic acceptance alone."""
        return self.mode == "hoped"

    @property
    def is_trial(self) -> bool:
        return self.mode == "trial"

    @property
    def is_plain(self) -> bool:
        """True for plain decoding, because speculation is not worth it."""
        return self.mode == "not worth it"

    @property
    def may_be_reused(self) -> bool:
        """True for a plan that is good for other steps: it measures and tries nothing. A plain one is `is_plain`."""
        return self.is_best or self.is_optimistic or self.mode in ("within bounds", "bounds out of reach")

    @property
    def is_bounded(self) -> bool:
        """True where a row has a bound on its time per token."""
        return self.slo_violation is not None

    @property
    def origin(self) -> Decision:
        """The decision that this one repeats, or itself."""
        return self.first or self

    def as_plan(self) -> Plan:
        """Return the plan that was decided for."""
        rows = map(RowPlan.of, self.rows, self.shapes)
        return Plan(tuple(rows), self.predicted_tokens, self.predicted_s, self)

    def plain_for(self, view: BatchView) -> Decision:
        """Return this decision for plain decoding, for a step of which some rows are others."""
        count = len(view.rows)
        costs = StepCosts(self.latency, count, view.prefill_tokens)
        rows = [Offer.nothing(row).row for row in view.rows]
        seconds = costs.step_s([(row, NO_TREE) for row in rows], 0)
        return replace(
            self,
            lengths=(0,) * count,
            shapes=(NO_TREE,) * count,
            rows=tuple(rows),
            predicted_tokens=float(count),
            predicted_s=seconds + self.latency.prompts_s(count, view.prefill_tokens),
            prefill_tokens=view.prefill_tokens,
            first=self.origin,
        )

    def holds_for(self, rows: Sequence[RowView], most: int) -> bool:
        """Return True for rows that are planned for as these were: their texts alone have grown.

        A draft that reads long texts first does so in a single step.

        Args:
            most: tokens that a row may draft. Its limit falls with every step, and counts once it is below `most`.
        """
        if not any(self.lengths):
            same = sources_of(rows) == sources_of(self.rows) and _bounds_of(rows) == _bounds_of(self.rows)
            return same and not self._is_surer(rows)
        drafting = [row for row, length in zip(self.rows, self.lengths, strict=True) if length and row.drafted_by_model]
        if any(row.unread_tokens > READ_WITH_DRAFTING for row in drafting):
            return False
        return len(rows) == len(self.rows) and all(_is_alike(*pair, most) for pair in zip(rows, self.rows, strict=True))

    def _is_surer(self, rows: Sequence[RowView]) -> bool:
        """Return True if a source without a model has found more of a row's text than when this was decided."""
        return any(match > self.matches.get(sequence_id, 0) for sequence_id, match in matches_of(rows).items())

    def stays_plain(self, view: BatchView) -> bool:
        """Return True for rows that need no new decision for plain decoding: hardly fewer, and most were there before.

        Far fewer rows may be worth speculation, as may requests of another kind or with another draft. Few beside many
        others count little. What was decided beside prompts says nothing of steps that read none.
        """
        origin, rows = self.origin, view.rows
        before = set(sources_of(origin.rows))
        still_there = before.intersection(sources_of(rows))
        enough = len(rows) >= STAY_PLAIN_ROWS_SHARE * len(before) and 2 * len(still_there) > len(rows)
        bounded = self.is_bounded or any(row.max_time_per_token_s for row in rows)
        alike = enough and not bounded and not self._is_surer(rows)
        return alike and (view.prefill_tokens > 0 or not origin.prefill_tokens)


def sources_of(rows: Sequence[RowView]) -> list[tuple[str, str]]:
    """Return each row's sequence and source."""
    return [(row.sequence_id, row.source) for row in rows]


def matches_of(rows: Sequence[RowView]) -> dict[str, int]:
    """Return how sure the surest source without a model is of a row, by sequence, where there is such a source."""
    surest = {row.sequence_id: max([row.match, *[option.match for option in row.others]]) for row in rows}
    return {sequence_id: match for sequence_id, match in surest.items() if match}


def _bounds_of(rows: Sequence[RowView]) -> list[float | None]:
    return [row.max_time_per_token_s for row in rows]


def _is_alike(row: RowView, before: RowView, most: int) -> bool:
    if row.others or row.match or row.likely:
        return False
    return _kept_fields(row) == _kept_fields(before) and min(row.limit, most) == min(before.limit, most)
