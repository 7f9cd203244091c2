"""Costs of steps as live steps show them: `LiveCosts` of target and draft."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.catch_up import catch_up_cost
from distillspec.serving.control.base import RowView, StepResult
from distillspec.serving.costs.latency import LatencyModel, guessed, rows_by_depth
from distillspec.serving.costs.live_costs import GUESSED, MEASURED, LiveCosts


class LiveLatency:
    """A `LatencyModel` that every step corrects.

    Args:
        known: measured costs. None: guessed ones.
        drafts_with_model: False where proposals cost next to nothing (prompt lookup).
    """

    def __init__(self, known: LatencyModel | None, *, drafts_with_model: bool = True) -> None:
        start, trust = known or guessed(), GUESSED if known is None else MEASURED
        self.drafts_with_model = drafts_with_model
        self._target = LiveCosts(start.target, trust)
        self._draft = LiveCosts(start.draft, trust) if drafts_with_model and start.draft is not None else None
        self._guess = start if known is None else None  # until the draft was measured
        self._draft_free_s = start.draft_free_s
        self._latency: LatencyModel | None = None

    @property
    def latency(self) -> LatencyModel:
        """The present estimate."""
        if self._latency is None:
            draft = None if self._draft is None else self._draft.table
            self._latency = LatencyModel(self._target.table, draft, self._draft_free_s)
        return self._latency

    def observe(self, result: StepResult, proposed: Sequence[int]) -> bool:
        """Learn from a step in which its decoding rows drafted `proposed` tokens each.

        Return True if the step's time could be predicted well enough to judge by.
        """
        view = result.view
        contexts, rows = [row.context_tokens for row in view.rows], len(view.rows)
        if len(proposed) != rows:
            return False
        self._latency = None
        tokens = sum(proposed) + rows + result.prefill_tokens
        sure = self._target.observe(sum(contexts), [tokens] if tokens else [], result.target_s, rows)
        if self._draft is None:
            return sure
        if not any(proposed):
            self._guess_draft(tokens)
            return sure
        self._guess = None
        by_model = [k if row.drafted_by_model else 0 for k, row in zip(proposed, view.rows, strict=True)]
        read = sum([context * k for context, k in zip(contexts, by_model, strict=True)])
        passes: list[float] = [*rows_by_depth(by_model)]
        further, own_passes = catch_up_cost(unread_of(view.rows, by_model))
        if own_passes:
            passes.append(further)
        elif further:
            passes[0] += further
        return self._draft.observe(read, passes, result.draft_s, sum(by_model)) and sure

    def _guess_draft(self, tokens: int) -> None:
        """Take a draft that was never measured for as much faster than guessed as the target is."""
        if self._guess is not None and self._guess.draft is not None and tokens:
            factor = self._target.table.seconds(0, tokens) / self._guess.target.seconds(0, tokens)
            self._draft = LiveCosts(self._guess.draft.scaled(factor), GUESSED)


def unread_of(rows: Sequence[RowView], lengths: Sequence[int]) -> list[int]:
    """Return the unread tokens of the rows that the draft model drafts for."""
    return [row.unread_tokens for row, k in zip(rows, lengths, strict=True) if k and row.drafted_by_model]
