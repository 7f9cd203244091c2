"""Costs of steps as live steps show them: `LiveCosts` of target and draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from distillspec.serving.base.catch_up import catch_up_cost
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel, draft_work, guessed
from distillspec.serving.costs.live_costs import GUESSED, MEASURED, LiveCosts
from distillspec.serving.costs.table import CostTable


class RowWork(NamedTuple):
    """Work of a decoding row in a step.

    unread_tokens: of its text, that its draft had not read. None: no draft was to draft. A row that is far behind is
        read on, and drafts nothing yet.
    drafts_block: one pass of its draft gives all its tokens.
    reads: nodes that each pass of the draft read first of the row, None: one for each token of a chain. Drafting level
        by level reads those before again, which costs little beside.
    """

    context_tokens: int  # in the cache
    proposed: int  # nodes that were drafted
    unread_tokens: int | None = None
    source: str = DRAFT
    drafts_block: bool = False
    reads: tuple[int, ...] | None = None

    @property
    def levels(self) -> int:
        """Levels that were drafted."""
        return self.proposed if self.reads is None else len(self.reads)


class LiveLatency:
    """A `LatencyModel` that every step corrects.

    Args:
        known: measured costs. None: guessed ones.
        drafts_with_model: False where proposals cost next to nothing (prompt lookup).
    """

    def __init__(self, known: LatencyModel | None, *, drafts_with_model: bool = True) -> None:
        start = known or guessed()
        trust = GUESSED if known is None else MEASURED
        self.drafts_with_model = drafts_with_model
        self._target = LiveCosts(start.target, trust)
        drafts = {DRAFT: start.draft, **start.members} if drafts_with_model else {}
        self._drafts = {source: LiveCosts(table, trust) for source, table in drafts.items() if table is not None}
        if drafts_with_model and not self._drafts:  # one may be loaded later
            self._drafts[DRAFT] = LiveCosts(_guessed_draft(start.target), GUESSED)
        self._guess = start if known is None else None  # until the draft was measured
        self._draft_free_s = start.draft_free_s
        self._latency: LatencyModel | None = None

    @property
    def latency(self) -> LatencyModel:
        """The present estimate. Other threads may read it too: it is made anew where a table has changed."""
        target = self._target.table
        members = {source: costs.table for source, costs in tuple(self._drafts.items())}
        draft = members.pop(DRAFT, None)
        latency = self._latency
        if latency is None or not _is_made_of(latency, target, draft, members):
            self._latency = latency = LatencyModel(target, draft, self._draft_free_s, members=members)
        return latency

    def draft_changed(self, change: DraftChange) -> None:
        """Guess the costs of a draft that is new, or another. One that costs as much as before is known already."""
        source = change.source
        if change.like == source and change.times == 1.0 and source in self._drafts:
            return
        known = self._drafts.get(change.like or source, self._drafts.get(DRAFT))
        if known is not None:
            self._drafts[source] = LiveCosts(known.table.scaled(change.times), GUESSED)

    def observe(
        self, rows: Sequence[RowWork], prefill_tokens: int, target_s: float, draft_s: Mapping[str, float]
    ) -> bool:
        """Learn from a step.

        Args:
            prefill_tokens: prompt tokens in the target's pass.
            target_s: seconds of the target's pass.
            draft_s: seconds of all passes of each draft.

        Returns:
            True if the times could be predicted well enough to judge by.
        """
        proposed = sum([row.proposed for row in rows])
        tokens = proposed + len(rows) + prefill_tokens
        context = sum([row.context_tokens for row in rows])
        sure = self._target.observe(context, [tokens] if tokens else [], target_s, len(rows))
        if not self._drafts:
            return sure
        if not proposed:
            self._guess_draft(tokens)
            return sure
        self._guess = None
        for source, seconds in draft_s.items():
            if source not in self._drafts:
                self.draft_changed(DraftChange(source))
            drafting = [row for row in rows if row.source == source and row.unread_tokens is not None]
            sure = self._observe_draft(source, drafting, seconds) and sure
        return sure

    def _observe_draft(self, source: str, rows: Sequence[RowWork], seconds: float) -> bool:
        """Learn from the passes of one draft over the rows that drafted, and over texts that it had not read."""
        drafts_block = any(row.drafts_block for row in rows)
        work = draft_work([row.context_tokens for row in rows], [row.levels for row in rows], drafts_block)
        passes: list[float] = [*work.passes]
        if not drafts_block and any(row.reads is not None for row in rows):
            levels = [row.reads for row in rows if row.reads]
            passes = [float(sum(level)) for level in zip_longest(*levels, fillvalue=0)]
        further, own_passes = catch_up_cost([row.unread_tokens for row in rows if row.unread_tokens])
        if own_passes or (further and not passes):
            passes.append(further)
        elif further:
            passes[0] += further
        return self._drafts[source].observe(work.context, passes, seconds, work.rows, first=True)

    def _guess_draft(self, tokens: int) -> None:
        """Take a draft that was never measured for as much faster than guessed as the target is."""
        if self._guess is not None and self._guess.draft is not None and tokens:
            factor = self._target.table.seconds(0, tokens) / self._guess.target.seconds(0, tokens)
            self._drafts[DRAFT] = LiveCosts(self._guess.draft.scaled(factor), GUESSED)


def _guessed_draft(target: CostTable) -> CostTable:
    """Return guessed costs of a draft of a target whose costs are known."""
    guess = guessed()
    assert guess.draft is not None
    return guess.draft.scaled(target.seconds(0, 1) / guess.target.seconds(0, 1))


def _is_made_of(
    latency: LatencyModel, target: CostTable, draft: CostTable | None, members: Mapping[str, CostTable]
) -> bool:
    """Return True if a model is made of these very tables."""
    same = latency.target is target and latency.draft is draft and latency.members.keys() == members.keys()
    return same and all(latency.members[source] is table for source, table in members.items())
