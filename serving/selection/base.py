"""Selection: chooses the draft of each request, and learns from every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.costs.latency import LatencyModel

Choices = Mapping[str, str | None]  # row → its draft, None: none drafts for it

MOST_LEVELS = 16
KEEP_EVERY = 256  # steps. Rows that are missing twice are forgotten


@dataclass(frozen=True)
class SelectionParts:
    """Parts that a new selection is made from."""

    drafts: tuple[str, ...]  # names, in the order given
    seed: int
    latency: Callable[[], LatencyModel]  # the present costs of steps
    fixed_length: int | None = None  # of every chain, None where a controller chooses
    most: int = MOST_LEVELS  # the longest chain
    expected: Mapping[str, float] = field(default_factory=dict)  # α of drafts by their own evaluation


class Selection(Protocol):
    """Chooses drafts. Its choices change speed alone."""

    on_trial: Mapping[str, float]  # rows whose drafts are not those expected to be best → share of tokens that costs

    beliefs: Mapping[str, float]  # rows → P(a token of the chosen draft is accepted), where that is known of the row
    coming: Mapping[str, str]  # rows → the draft that each will switch to soon, so that it reads their texts ahead

    def choose(self, rows: Sequence[RowView]) -> Choices:
        """Return the draft of each row, one of its `drafts_of`. Asked again about the same step it answers alike."""
        ...

    def observe(self, result: StepResult, chosen: Choices) -> None:
        """Learn from a step whose rows had the drafts `chosen`."""
        ...

    def draft_changed(self, change: DraftChange) -> None:
        """Learn that a draft is another now, new or gone."""
        ...


class Present:
    """Rows that may still be there: a preempted one, or one whose text is read again, is missing for a while."""

    def __init__(self) -> None:
        self._steps, self._before = 0, set[str]()

    def now_and_then(self, result: StepResult) -> set[str] | None:
        """Count a step. Return every `KEEP_EVERY` steps its rows and those of the time before, else None."""
        self._steps += 1
        if self._steps % KEEP_EVERY:
            return None
        before, self._before = self._before, {row.sequence_id for row in result.view.rows}
        return before | self._before


class SelectionState:
    """State that selections share. At first nothing is on trial, known of rows, or coming."""

    def __init__(self) -> None:
        self.on_trial: Mapping[str, float] = {}
        self.beliefs: Mapping[str, float] = {}
        self.coming: Mapping[str, str] = {}
        self.steps = 0
        self._present = Present()

    def passed(self, result: StepResult) -> set[str] | None:
        """Count a step. Return now and then the rows that may still be there, for others to be forgotten, else None."""
        self.steps += 1
        return self._present.now_and_then(result)


def drafts_of(row: RowView) -> tuple[Option, ...]:
    """Return what draft models could do for a row."""
    return tuple([option for option in row.options if option.drafted_by_model and option.limit])


def only(row: RowView, source: str | None, belief: float | None = None) -> RowView:
    """Return the row with one draft, or none, beside its sources without a model.

    Args:
        belief: see `RowView`.
    """
    if row.source == source and row.drafted_by_model:
        return row._replace(others=tuple([own for own in row.others if not own.drafted_by_model]), belief=belief)
    kept = [option for option in row.options if not option.drafted_by_model or option.source == source]
    if not kept:
        return row._replace(limit=0, others=())
    return row._replace(**kept[0]._asdict(), others=tuple(kept[1:]), belief=belief)
