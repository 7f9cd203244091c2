"""Selection: chooses the draft of each request, and learns from every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.costs.known import KnownTrees
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.selection.losses import Losses

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
    free: tuple[str, ...] = ()  # sources without a model, each of which a row may have alone, in place of a draft
    trees: Callable[[], KnownTrees | None] = lambda: None  # that a controller chooses from, None: chains


class Selection(Protocol):
    """Chooses drafts. Its choices change speed alone."""

    on_trial: Collection[str]  # rows whose drafts are tried, and are not those expected to be best
    losses: Losses  # what trials and all choices have cost so far, as far as that is estimated
    beliefs: Mapping[str, float]  # rows → P(a token of the chosen draft is accepted), where that is known of the row
    coming: Mapping[str, str]  # rows → the draft that each will switch to soon, so that it reads their texts ahead
    collapsed: list[str]  # drafts that are accepted no more. The controller takes them out, and tells the one inside

    def choose(self, rows: Sequence[RowView]) -> Choices:
        """Return the member of each row, one of its `members_of`. Asked again about the same step it answers alike."""
        ...

    def observe(self, result: StepResult, chosen: Choices) -> None:
        """Learn from a step whose rows had the drafts `chosen`."""
        ...

    def draft_changed(self, change: DraftChange) -> None:
        """Learn that a draft was replaced, added or removed."""
        ...


class RecentRows:
    """Rows of the last steps, which may still be there: a preempted row is missing for a while."""

    def __init__(self) -> None:
        self._steps, self._before = 0, set[str]()

    def rows_to_keep(self, result: StepResult) -> set[str] | None:
        """Count a step. Return every `KEEP_EVERY` steps its rows and those of the time before, else None."""
        self._steps += 1
        if self._steps % KEEP_EVERY:
            return None
        before, self._before = self._before, {row.sequence_id for row in result.view.rows}
        return before | self._before


class SelectionState:
    """State that selections share. At first nothing is on trial, estimated, believed, coming or collapsed.

    Args:
        free: see `SelectionParts`.
    """

    def __init__(self, free: Sequence[str] = ()) -> None:
        self.free = tuple(free)
        self.on_trial: Collection[str] = ()
        self.losses = Losses()
        self.beliefs: Mapping[str, float] = {}
        self.coming: Mapping[str, str] = {}
        self.collapsed: list[str] = []
        self.steps = 0
        self._recent = RecentRows()

    def rows_to_keep(self, result: StepResult) -> set[str] | None:
        """Count a step. Now and then return the rows that may still be there: others can be forgotten. Else None."""
        self.steps += 1
        return self._recent.rows_to_keep(result)


def drafts_of(row: RowView) -> tuple[Option, ...]:
    """Return what draft models could do for a row."""
    return tuple([option for option in row.options if option.drafted_by_model and option.limit])


def members_of(row: RowView, free: Sequence[str] = ()) -> list[str]:
    """Return the members of the pool that a row may have: its drafts, then the sources without a model.

    A source without a model is one whether it finds something in this step or not: it may in the next one. A row that
    nothing can be drafted for has none.

    Args:
        free: see `SelectionParts`.
    """
    offers: list[RowView | Option] = [row, *row.others]  # a row has the fields of its own source's option
    drafts = [offer.source for offer in offers if offer.drafted_by_model and offer.limit]
    return [*drafts, *free] if drafts or any(offer.limit for offer in offers) else []


def only(row: RowView, source: str | None, belief: float | None = None, free: Sequence[str] = ()) -> RowView:
    """Return the row with one of its sources.

    A draft, or none, stands beside all sources without a model. One of these stands alone.

    Args:
        belief: see `RowView`.
        free: see `SelectionParts`.
    """
    if source in free:
        alone = next((option for option in row.options if option.source == source), None)
        if alone is None:
            return row._replace(limit=0, match=0, likely=None, others=(), belief=None)
        return row.with_option(alone)
    if row.source == source and row.drafted_by_model:
        without_model = tuple([option for option in row.others if not option.drafted_by_model])
        return row.with_options(row.own, without_model, belief)
    kept = [option for option in row.options if not option.drafted_by_model or option.source == source]
    if not kept:
        return row._replace(limit=0, others=())
    return row.with_options(kept[0], tuple(kept[1:]), belief)
