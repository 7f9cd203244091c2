"""Length controller: plans before each step, observes after it. The same view gives the same plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_of
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel

BEHIND = "behind others"  # evidence of drafts whose tokens are tried after those of another source


class Option(NamedTuple):
    """One source that could draft for a row, or a draft model behind the likely nodes of another source."""

    limit: int  # the most levels, by parameters, room, cache and source. 0: none
    drafted_by_model: bool = True  # a draft model would run
    match: int = 0  # how sure a source without a model is, such as tokens of text that a lookup found again
    unread_tokens: int = 0  # tokens of its text that the draft model has not read
    source: str = DRAFT
    at_once: bool = False  # one pass of the draft model gives all its tokens
    wide: bool = False  # its levels may have siblings
    likely: LikelyNodes | None = None  # its nodes with their chances, where the source knows them

    def within(self, levels: int) -> Option:
        """Return the same with at most so many levels."""
        return self._replace(**_within(self, levels))


class RowView(NamedTuple):
    """One decoding row as a controller sees it. The fields from `limit` to `likely` are an `Option`'s."""

    sequence_id: str
    context_tokens: int
    limit: int
    drafted_by_model: bool = True
    match: int = 0
    unread_tokens: int = 0
    source: str = DRAFT
    at_once: bool = False
    wide: bool = False
    likely: LikelyNodes | None = None
    max_time_per_token_s: float | None = None  # this request's own bound, None for the engine's
    others: tuple[Option, ...] = ()  # other sources
    domain: str = "default"  # kind of text, in the caller's words
    prompt: tuple[int, ...] = ()
    belief: float | None = None  # P(a drafted token is accepted) by what is known of the request, None: not known
    left: int = 1 << 30  # the most tokens that it may still write

    @property
    def options(self) -> tuple[Option, ...]:
        """All sources, its own first."""
        own = [getattr(self, name) for name in Option._fields]
        return (Option(*own), *self.others)

    def with_option(self, option: Option) -> RowView:
        """Return the row with this source alone."""
        belief = self.belief if option.drafted_by_model else None
        return self._replace(**option._asdict(), others=(), belief=belief)

    def within(self, levels: int) -> RowView:
        """Return the row for which no source drafts more than so many levels."""
        return self._replace(**_within(self, levels), others=tuple([other.within(levels) for other in self.others]))


def _within(own: Option | RowView, levels: int) -> dict[str, Any]:
    """Return the fields that a bound on levels changes."""
    likely = None if own.likely is None else own.likely.within(levels)
    return {"limit": min(own.limit, levels), "likely": likely}


def evidence(row: RowView | Option) -> Hashable:
    """Return what acceptance is told apart by: source and match, or one of several drafts. 0 for an only draft.

    A draft whose tokens are tried behind a row's likely nodes has evidence of its own: of harder text.
    """
    if row.match:
        return row.source, row.match
    own = row.source if row.drafted_by_model and row.source != DRAFT else 0
    return (own, BEHIND) if row.drafted_by_model and row.likely is not None else own


def is_joined(row: RowView | Option) -> bool:
    """Return True for a row that a draft model drafts for, behind the likely nodes of another source."""
    return row.drafted_by_model and row.likely is not None


@dataclass(frozen=True)
class BatchView:
    """Batch of the next step: decoding rows, prompt tokens read beside them, waiting requests."""

    rows: tuple[RowView, ...]
    prefill_tokens: int = 0
    waiting: int = 0

    @property
    def at_once(self) -> bool:
        """True if the draft model drafts blocks."""
        return any(row.at_once for row in self.rows)

    @property
    def drafts_at_once(self) -> frozenset[str]:
        """The drafts of rows that draft blocks."""
        return frozenset([row.source for row in self.rows if row.at_once])


@dataclass(frozen=True)
class WaitingView:
    """One sequence that waits for a slot."""

    sequence_id: str
    tokens: int  # of its text, to be read before it decodes
    waited_s: float


@dataclass(frozen=True)
class AdmissionView:
    """Running and waiting sequences, the most urgent first."""

    running: tuple[int, ...]  # tokens of each running row
    waiting: tuple[WaitingView, ...]
    slots: int
    cache_tokens: int  # over all rows


class RowPlan(NamedTuple):
    """Trees to draft for one row, one of each source, joined at the root. Without any it decodes plainly.

    draft_prefill: False: a draft model that has not read this row's text never will. Draft-free proposers may still
        serve the row.
    verified: the most levels to verify, None for all that are drafted. It is planned, and so no function of the drafted
        tokens: to drop one because of its value, or because a chain ended at it, would change the distribution.
    """

    sequence_id: str
    trees: tuple[PlannedTree, ...] = ()
    draft_prefill: bool = True
    verified: int | None = None

    @classmethod
    def chain(
        cls, row: RowView, speculation_length: int, draft_prefill: bool = True, verified: int | None = None
    ) -> RowPlan:
        """Return the plan of a chain from the row's own source, at most as long as the row's limit."""
        return cls(row.sequence_id, chain_of(min(speculation_length, row.limit), row.source), draft_prefill, verified)

    @classmethod
    def of(cls, row: RowView, shape: TreeShape) -> RowPlan:
        """Return the plan of a tree from the row's own source, of at most as many levels as the row's limit.

        A draft's tree is behind the row's likely nodes, if it has them.
        """
        trees = [PlannedTree(row.source, shape.shortened(row.limit))]
        if is_joined(row) and row.likely is not None:
            trees.insert(0, PlannedTree(row.likely.source, row.likely.shape))
        return cls(row.sequence_id, tuple([tree for tree in trees if tree.shape.depth]))

    @classmethod
    def joined(cls, row: RowView, shape: TreeShape) -> RowPlan:
        """Return the plan of a tree from each of the row's sources, of at most as many levels as each may have."""
        own = [PlannedTree(option.source, shape.shortened(option.limit)) for option in row.options]
        return cls(row.sequence_id, tuple([tree for tree in own if tree.shape.depth]))

    @property
    def speculation_length(self) -> int:
        """Levels of the deepest tree. 0 is plain decoding."""
        return max([tree.shape.depth for tree in self.trees], default=0)

    @property
    def verified_length(self) -> int:
        """The most levels that are verified."""
        return self.speculation_length if self.verified is None else min(self.speculation_length, self.verified)


class Reading(NamedTuple):
    """Text that a draft reads ahead of a switch to it."""

    sequence_id: str
    source: str
    tokens: int  # at most


@dataclass(frozen=True)
class Plan:
    """Plans of all rows of the view, in its order. Predictions are there if the controller makes any."""

    rows: tuple[RowPlan, ...]
    predicted_tokens: float | None = None
    predicted_s: float | None = None
    why: Any = None  # the controller's reasons
    chosen: Mapping[str, str | None] | None = None  # of several drafts, the one chosen for each row
    readings: tuple[Reading, ...] = ()
    seen: BatchView | None = None  # what lengths were planned for, where that is not the step's view: rows of one draft


@dataclass(frozen=True)
class StepResult:
    """Result of a step, for controllers, metrics and logs. Times are seconds."""

    rows: tuple[RowResult, ...]
    view: BatchView
    plan: Plan
    prefill_tokens: int
    draft_s: float
    target_s: float
    total_s: float
    reserved_tokens: int = 0  # reserved in the cache when the step started
    drafted_s: Mapping[str, float] = field(default_factory=dict)  # of each of several sources, parts of draft_s
    readings_s: float = 0.0  # of drafts that read ahead of a switch, another part of draft_s
    planning_s: float = 0.0  # of foreseeing proposals and choosing among them


def decoding_rows(result: StepResult) -> Sequence[RowResult]:
    """Return the results of rows that were decoding already. The others got a first token from their prompts."""
    if not result.prefill_tokens:
        return result.rows
    decoding = {row.sequence_id for row in result.view.rows}
    return [row for row in result.rows if row.sequence_id in decoding]


def drafting_s(view: BatchView, result: StepResult) -> dict[str, float]:
    """Return the seconds of each draft's passes. Those of other sources are left out where they are known."""
    drafts = dict.fromkeys([row.source for row in view.rows if row.drafted_by_model])
    if result.drafted_s:
        return {source: result.drafted_s[source] for source in drafts if source in result.drafted_s}
    return {next(iter(drafts), DRAFT): result.draft_s}


@runtime_checkable
class PlansTrees(Protocol):
    """A controller whose trees may have more nodes than levels."""

    @property
    def most_nodes(self) -> int:
        """The most tokens that it may plan for a row. As many places are reserved."""
        ...


class LengthController(Protocol):
    """Chooses speculation lengths."""

    speculation_length: int  # the largest length it may plan. As many tokens a row are reserved

    def plan(self, view: BatchView) -> Plan:
        """Plan lengths within each row's limit, by the view and the steps observed: no clock, no model."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a step. By default nothing."""
        return

    def draft_changed(self, acceptance: float | None = None) -> None:
        """Forget what was learnt of the old draft. By default nothing.

        Args:
            acceptance: of the new draft over that of the old one, None: not known.
        """
        return


@runtime_checkable
class KnowsDrafts(Protocol):
    """A length controller that tells several drafts apart."""

    def member_changed(self, change: DraftChange) -> None:
        """Forget what was learnt of a draft that is another from now on, new, or gone."""
        ...


@runtime_checkable
class AdmissionController(Protocol):
    """A length controller that also decides how many waiting sequences are admitted."""

    def admit(self, view: AdmissionView) -> int:
        """Return how many of the first in `view.waiting` may start. The scheduler admits those that fit. Pure."""
        ...


@runtime_checkable
class TakesCosts(Protocol):
    """A length controller that predicts times and can go on from measured costs."""

    def use_costs(self, latency: LatencyModel) -> None: ...
