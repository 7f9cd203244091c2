"""Controller that gives each row its draft, and leaves the lengths to another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP, READ_WITH_DRAFTING
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, Reading, StepResult, decoding_rows
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.base.wrapped import WrappedController
from distillspec.serving.costs.known import known_costs
from distillspec.serving.costs.latency import LatencyModel, guessed
from distillspec.serving.selection.base import Choices, RecentRows, Selection, drafts_of, only
from distillspec.serving.selection.losses import Losses

SPARE = 0.3  # of a plain step, which reading ahead of switches may add: a fifth of a step that drafts
LEAST_READ = 16  # tokens of a row
REMEMBERED = 1000  # steps of each kind whose seconds are kept


@dataclass
class SelectionFigures:
    """Answers, tokens and seconds of several drafts, by source, since the start."""

    requests: Counter[str] = field(default_factory=Counter)  # answers that it drafted for first
    tokens: Counter[str] = field(default_factory=Counter)  # written while it drafted
    seconds: dict[str, float] = field(default_factory=dict)  # of its own passes
    row_seconds: dict[str, float] = field(default_factory=dict)  # of steps while it drafted, divided among their rows
    switches: Counter[str] = field(default_factory=Counter)  # rows that came to it from another draft
    switch_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of the last steps with a switch
    reading_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of those that read ahead of one
    usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of others, without prompts too
    explored: int = 0  # tokens written by rows whose draft was on trial
    losses: Losses = field(default_factory=Losses)  # the selection's own


class SelectingController(WrappedController):
    """Plans with the controller inside, which sees one draft a row: the one that `selection` chooses.

    Sources without a model stay beside it. A row may also have one of them alone, and then no draft reads its text.

    Args:
        make: the selection, given what tells the present costs of steps.
        free: see `SelectionParts`.

    Attributes:
        costs: measured ones, for a controller inside that knows none.
    """

    def __init__(
        self,
        inside: LengthController,
        make: Callable[[Callable[[], LatencyModel]], Selection],
        free: Sequence[str] = (),
    ) -> None:
        super().__init__(inside)
        self.free = tuple(free)
        self.costs: LatencyModel | None = None
        self.selection = make(self._latency)
        self.figures = SelectionFigures(losses=self.selection.losses)
        self._drafts: dict[str, str | None] = {}  # the last one of each row
        self._recent = RecentRows()

    def plan(self, view: BatchView) -> Plan:
        return self.plan_by(view, self.inside)

    def plan_by(self, view: BatchView, lengths: LengthController) -> Plan:
        chosen = self.selection.choose(view.rows)
        self._tell_collapses()
        beliefs = self.selection.beliefs
        rows = [only(row, chosen[row.sequence_id], beliefs.get(row.sequence_id), self.free) for row in view.rows]
        seen = replace(view, rows=tuple(rows))
        return replace(lengths.plan(seen), chosen=chosen, readings=self._readings(view), seen=seen)

    def observe(self, result: StepResult) -> None:
        chosen = result.plan.chosen or {}
        self._count(result, chosen)
        self.selection.observe(result, chosen)
        seen = result.plan.seen
        super().observe(result if seen is None else replace(result, view=seen))

    def draft_changed(self, change: DraftChange) -> None:
        if change.source == DRAFT:  # it takes the place of all drafts
            for source in {source for source in self._drafts.values() if source is not None}:
                self.selection.draft_changed(DraftChange(source, change.acceptance))
        else:
            self.selection.draft_changed(change)
            if self.costs is not None:
                self.costs = self.costs.changed(change)
        super().draft_changed(change)

    def _tell_collapses(self) -> None:
        """Tell the controller inside of drafts that have collapsed, for the gain that it measured is gone.

        It learns by itself what they accept and cost.
        """
        while self.selection.collapsed:
            source = self.selection.collapsed.pop()
            super().draft_changed(DraftChange(source, acceptance=1.0, like=source))

    def _readings(self, view: BatchView) -> tuple[Reading, ...]:
        """Return what drafts read ahead of switches: only so much that the step becomes a little longer.

        Micro-batches read it while the target verifies the one before. There is no other idle time: an engine steps as
        long as a request is unfinished, and no other text goes on.
        """
        if not (coming := self.selection.coming):
            return ()
        latency, readings = self._latency(), list[Reading]()
        room_s = SPARE * latency.target.seconds(sum([row.context_tokens for row in view.rows]), len(view.rows))
        for row in view.rows:
            source = coming.get(row.sequence_id)
            option = next((option for option in drafts_of(row) if option.source == source), None)
            if source is None or option is None or option.unread_tokens <= READ_WITH_DRAFTING:
                continue
            table = latency.table_of(source)
            tokens = LEAST_READ
            while table is not None and tokens < CATCH_UP_TOKENS_A_STEP and table.seconds(0, 2 * tokens) <= room_s:
                tokens *= 2
            readings.append(Reading(row.sequence_id, source, tokens))
            room_s -= 0.0 if table is None else table.seconds(0, tokens)
            if room_s <= 0:
                break
        return tuple(readings)

    def _latency(self) -> LatencyModel:
        return known_costs(self.inside) or self.costs or guessed()

    def _count(self, result: StepResult, chosen: Choices) -> None:
        figures, on_trial, switched = self.figures, self.selection.on_trial, False
        rows = decoding_rows(result)
        for row in rows:
            source = chosen.get(row.sequence_id)
            if source is None:
                continue
            before = self._drafts.get(row.sequence_id)
            switches = before not in (None, source)
            figures.requests[source] += before is None
            figures.switches[source] += switches
            switched |= switches
            figures.tokens[source] += row.emitted
            figures.row_seconds[source] = figures.row_seconds.get(source, 0.0) + result.total_s / len(rows)
            figures.explored += row.emitted if row.sequence_id in on_trial else 0
            self._drafts[row.sequence_id] = source
        if rows and not result.prefill_tokens:
            others = figures.reading_s if result.plan.readings else figures.usual_s
            (figures.switch_s if switched else others).append(result.total_s)
        for source, seconds in result.drafted_s.items():
            figures.seconds[source] = figures.seconds.get(source, 0.0) + seconds
        if (alive := self._recent.rows_to_keep(result)) is not None:
            self._drafts = {name: draft for name, draft in self._drafts.items() if name in alive}


def selecting(controller: LengthController) -> SelectingController | None:
    """Return the wrapper that selects drafts, None if there is none."""
    while isinstance(controller, WrappedController):
        if isinstance(controller, SelectingController):
            return controller
        controller = controller.inside
    return None
