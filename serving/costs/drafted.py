"""Costs that drafted tokens add to a step, for many choices of lengths at once."""

from __future__ import annotations

from functools import cached_property

import numpy

from distillspec.serving.costs.latency import LatencyModel
from distillspec.types import Bools, Floats, Ints


class DraftedCosts:
    """Costs of drafted tokens in one step, as `LatencyModel` has them, in arrays.

    model: which rows take part in draft passes `[n]`.
    target_s: seconds that drafted tokens add to the target's pass, by their number from 0 to n · nodes.
    pass_s: seconds of a draft pass by its tokens from 0 on.
    read_s: seconds that a row and its context add to a draft pass `[n]`.
    first_s: seconds that the first draft pass takes more than the others.
    drafts: False where no draft model takes part.

    Args:
        latency: costs of steps.
        contexts: `[n]`, tokens of each row in the cache.
        most: the most levels that a row may draft.
        prefill_tokens: prompt tokens in the target's pass.
        by_model: `[n]`, False where a row's drafts come without the draft model; None: as `latency` has a draft or not.
        nodes: the most tokens that a row may draft, None: a chain's.
    """

    def __init__(
        self,
        latency: LatencyModel,
        contexts: Ints,
        most: int,
        prefill_tokens: int = 0,
        by_model: Bools | None = None,
        nodes: int | None = None,
    ) -> None:
        rows, draft = len(contexts), latency.draft
        self.draft_free_s = latency.draft_free_s
        self.drafts_block = latency.drafts_block
        self._depths = numpy.arange(most)
        counts = numpy.arange(rows * (nodes or most) + 3.0)
        self.target_s = latency.target.by_tokens(counts + (rows + prefill_tokens))
        self.target_s -= self.target_s[0]
        self.drafts = draft is not None
        self.model = numpy.zeros(rows, dtype=bool)
        self.read_s = numpy.zeros(rows)
        self.pass_s = 0.0 * counts
        self.first_s = 0.0
        if draft is None:
            return
        self.first_s = draft.first
        self.model = numpy.ones(rows, dtype=bool) if by_model is None else by_model
        self.read_s = (draft.per_context * contexts + draft.per_row) * self.model
        self.pass_s = draft.by_tokens(counts)
        self.pass_s[0] = 0.0

    @cached_property
    def verified_s(self) -> float:
        """The least seconds that one more token of the target's pass takes."""
        return float((self.target_s[1:] - self.target_s[:-1]).min())

    def by_depth(self, rows: Ints, read_s: Floats) -> Floats:
        """Return the seconds `[depths, …]` that each further depth of drafting takes.

        Args:
            rows: `[depths, …]`, rows that draft at depth 1, 2, … or deeper.
            read_s: `[depths, …]`, Σ of `self.read_s` over them.
        """
        if self.drafts_block:
            depths = numpy.arange(len(rows) + 1).reshape(-1, *[1] * (rows.ndim - 1))
            seconds = numpy.diff(self.pass_s[rows[:1] * depths], axis=0)
            seconds[:1] += read_s[:1]
        else:
            seconds = self.pass_s[rows] + read_s
        seconds[:1] += self.first_s * (rows[:1] > 0)
        return seconds

    def of(self, lengths: Ints) -> Floats:
        """Return the seconds `[m]` that each of `lengths [m, n]` adds to a step."""
        seconds = self.target_s[lengths.sum(1)]
        if not self.model.all():
            seconds += self.draft_free_s * ((lengths > 0) & ~self.model).any(1)
            lengths = lengths * self.model
        if self.first_s:
            seconds += self.first_s * lengths.any(1)
        if self.drafts_block:
            drafts = lengths > 0
            positions = drafts.sum(1) * lengths.max(1, initial=0)
            return numpy.asarray(seconds + self.pass_s[positions] + drafts @ self.read_s)
        rows = (lengths[:, None, :] > self._depths[:, None]).sum(2)  # [m, most]
        return numpy.asarray(seconds + self.pass_s[rows].sum(1) + lengths @ self.read_s)
