"""Chains of given lengths: the tokens and seconds that are expected of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel
from distillspec.types import Bools, Floats, Ints

LEAST_STEP_S = 1e-9  # so that goodput is finite where passes cost nothing


class Expected(NamedTuple):
    """Tokens and seconds expected of a step. The prompts that it reads are not counted."""

    tokens: float  # those of the target included
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(eq=False)
class ChainBatch:
    """Rows that draft chains.

    Prompt tokens read in the same step cost the same whatever is drafted. They are only counted as tokens of the
    target's pass, where they may make each further token dearer.

    survival: `[n, V]`, P(the first 1 … V drafted tokens of row i all stand).
    limits: `[n]`, the most tokens of each row. Survival beyond is set to 0.
    contexts, latency, prefill_tokens, by_model: as in `DraftedCosts`.
    drafts: costs of each of several drafts, and its rows `[n]`. None: all rows have one.
    """

    survival: Floats
    limits: Ints
    contexts: Ints
    latency: LatencyModel
    prefill_tokens: int = 0
    by_model: Bools | None = None
    drafts: Sequence[tuple[LatencyModel, Bools]] | None = None

    @classmethod
    def of_rows(
        cls, rows: Sequence[RowView], survival: Floats, latency: LatencyModel, prefill_tokens: int = 0
    ) -> ChainBatch:
        """Return the chains of rows that their own sources draft for."""
        by_row = [(row.source, row.drafts_block) if row.drafted_by_model else None for row in rows]
        drafts = dict.fromkeys([draft for draft in by_row if draft is not None])
        costs = [latency.of_draft(source, drafts_block=block) for source, block in drafts] or [latency]
        masks = [numpy.array([each == draft for each in by_row]) for draft in (*drafts, None)]
        return cls(
            survival,
            numpy.array([min(row.limit, survival.shape[1]) for row in rows], dtype=numpy.int64),
            numpy.array([row.context_tokens for row in rows], dtype=numpy.int64),
            costs[0],
            prefill_tokens,
            numpy.array([row.drafted_by_model for row in rows], dtype=bool),
            list(zip([*costs, latency], masks, strict=True)) if len(costs) > 1 else None,
        )

    def __post_init__(self) -> None:
        rows, most = self.survival.shape
        self.survival = self.survival * (numpy.arange(most) < self.limits[:, None])
        seconds = self.latency.target.seconds(float(self.contexts.sum()), rows, rows)
        self.plain = Expected(rows, max(seconds, LEAST_STEP_S))

    @cached_property
    def _costs(self) -> list[tuple[DraftedCosts, Bools]]:
        """Costs of each draft, and its rows."""
        drafts = self.drafts or [(self.latency, numpy.ones(len(self.limits), dtype=bool))]
        batch = self.contexts, self.survival.shape[1], self.prefill_tokens, self.by_model
        return [(DraftedCosts(latency, *batch), rows) for latency, rows in drafts]

    @cached_property
    def row_tokens(self) -> Floats:
        """The expected tokens of each row by length `[n, V + 1]`. Beyond a row's limit, those of the limit."""
        tokens = numpy.ones((len(self.limits), self.survival.shape[1] + 1))
        tokens[:, 1:] += self.survival.cumsum(1)
        return tokens

    @property
    def alike(self) -> Ints:
        """Each single length for all rows, from 0 on, cut to their limits `[m, n]`."""
        longest = min(self.survival.shape[1], int(self.limits.max(initial=0)))
        return numpy.minimum(self.limits, numpy.arange(longest + 1)[:, None])

    def expected(self, lengths: Ints) -> list[Expected]:
        """Return what is expected of lengths `[m, n]` within the limits."""
        tokens = self.row_tokens[numpy.arange(lengths.shape[1]), lengths].sum(1)
        drafting_s = numpy.zeros(len(lengths))
        for costs, rows in self._costs:
            its_lengths = lengths * rows
            drafting_s += costs.of(its_lengths) - costs.target_s[its_lengths.sum(1)]
        seconds = self.plain.seconds + self._costs[0][0].target_s[lengths.sum(1)] + drafting_s
        return list(map(Expected, tokens.tolist(), seconds.tolist()))
