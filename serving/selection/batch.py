"""Tokens a second of a batch, by the drafts of its rows.

Drafts run one after another. A draft that one row has costs its passes for this row alone, and all rows wait for them.
So what a draft is worth for a row depends on those of the others, and drafts are chosen for all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy

from distillspec.serving.costs.latency import LatencyModel
from distillspec.types import Bools, Floats, Ints

NO_DRAFT = -1  # index of a row without a draft
BETTER = 1.03  # times a row's tokens: what a change must bring for each row that it moves
UNABLE_WORTH = -1e9  # tokens, of a draft that may not draft
TYPICAL_TOKENS = 2  # of a row, over which the cost of verifying a token is averaged


class Prospect(NamedTuple):
    """Tokens that each of m drafts would bring one row, and what they take."""

    tokens: Floats  # `[m, L]`, that trees of 1 … L levels are expected to add
    able: Bools  # `[m]`, drafts that may draft for the row
    reading_s: Floats  # `[m]`, seconds in which a draft reads the part of the row's text that it has not read
    left: float  # tokens that the row is taken to write still
    context: int  # its cached tokens
    used: float = 1.0  # share of its steps in which a draft drafts, rather than a source without a model
    shapes: Floats | None = None  # `[2, m, L]`, nodes of these trees, and what the draft reads for them. None: chains
    blocks: frozenset[str] = frozenset()  # drafts of which one pass gives all tokens


class Batch:
    """Rows of a step, and what each draft would bring each of them.

    Args:
        rows: at least one.
        drafts: costs of each of the m drafts.
        latency: costs of steps.
        fixed: the length of every chain, None where it is chosen.
        free: the index of what rows may have for a draft: sources without a model alone. They stand beside each
            draft too, so that what they bring is the same whatever a row has, and is left out. None: there are none.
    """

    def __init__(
        self,
        rows: Sequence[Prospect],
        drafts: Sequence[LatencyModel],
        latency: LatencyModel,
        fixed: int | None = None,
        free: int | None = None,
    ) -> None:
        self.drafts = drafts
        self.latency = latency
        self.fixed = fixed
        self.free = free
        self.tokens = numpy.stack([row.tokens for row in rows])  # [n, m, L]
        self.able = numpy.stack([row.able for row in rows])
        self.reading_s = numpy.stack([row.reading_s for row in rows])
        self.left = numpy.array([row.left for row in rows])
        self.used = numpy.array([row.used for row in rows])
        self.context = sum([row.context for row in rows])
        self._levels: Floats = numpy.arange(1.0, self.tokens.shape[2] + 1)
        self._trees = any(row.shapes is not None for row in rows)
        self.nodes = self.reads = numpy.broadcast_to(self._levels, self.tokens.shape)  # [n, m, L]
        if self._trees:
            chains = numpy.broadcast_to(self._levels, (2, *self.tokens.shape[1:]))
            self.nodes, self.reads = numpy.stack([chains if row.shapes is None else row.shapes for row in rows], 1)
        self._loops: dict[tuple[int, int], Floats] = {}  # by draft and rows

    @cached_property
    def plain_s(self) -> float:
        """Seconds of a step without drafts."""
        rows = len(self.left)
        return self.latency.target.seconds(self.context, rows, rows)

    @cached_property
    def node_s(self) -> float:
        """Seconds that a drafted token adds to the target's pass."""
        return self._verifying_s(TYPICAL_TOKENS * len(self.left)) / (TYPICAL_TOKENS * len(self.left))

    def rate(self, row_drafts: Ints, price: float | None = None, believed: Batch | None = None) -> float:
        """Return the tokens a second, if each row has the draft of this index `[n]`.

        Args:
            price: tokens a second at which lengths are chosen. None: those that it leads to (Dinkelbach 1967).
            believed: what rows are believed to get, by which lengths are chosen. None: what they are expected to.
        """
        if price is None:
            return self.rate(row_drafts, self.rate(row_drafts, len(self.left) / self.plain_s))
        tokens, seconds, nodes = float(len(row_drafts)), self.plain_s, 0.0
        for draft in numpy.unique(row_drafts[row_drafts != NO_DRAFT]).tolist():
            rows = (row_drafts == draft) & self.able[:, draft]
            if not rows.any() or draft == self.free:
                continue
            drafting_s = self._drafting_s(draft, rows)
            length = (believed or self)._length(draft, rows, price, drafting_s)
            if not length:
                continue
            level, used = length - 1, self.used[rows]
            gains, drafted = self.tokens[rows, draft, level], self.nodes[rows, draft, level]
            tokens, nodes = tokens + float(used @ gains), nodes + float(used @ drafted)
            share = (1 + used * gains) / self.left[rows]  # of what is left, in a step
            seconds += float(drafting_s[level] + (self.reading_s[rows, draft] * share).sum())
        return tokens / (seconds + self._verifying_s(nodes))

    def rates(self, row_drafts: Ints, row: int, price: float) -> list[float]:
        """Return the tokens a second with each of the drafts for one row, and `row_drafts [n]` for the others.

        The row's entry of `row_drafts` is written over.
        """
        rates = []
        for draft in range(len(self.drafts)):
            row_drafts[row] = draft
            rates.append(self.rate(row_drafts, price))
        return rates

    def best(self, row_drafts: Ints, movable: Bools) -> Ints:
        """Return better drafts `[n]` for all rows together, or the same where no others are worth the change.

        Args:
            row_drafts: the present drafts.
            movable: `[n]` bool, rows that may get others.
        """
        price = self.rate(row_drafts)
        worth, used = self._worth(price), frozenset(row_drafts[row_drafts != NO_DRAFT].tolist())
        kept = self._within(used, row_drafts, movable, worth)
        kept_rate = self.rate(kept, price)
        best, best_rate = kept, 0.0
        for drafts in self._sets(used):
            others = self._within(drafts, row_drafts, movable, worth)
            rate, moved = self.rate(others, price), numpy.count_nonzero(others != kept)
            if rate > best_rate and rate > kept_rate * (1 + (BETTER - 1) * moved / len(row_drafts)):
                best, best_rate = others, rate
        return best

    def _sets(self, used: frozenset[int]) -> list[frozenset[int]]:
        """Return sets of drafts near the one in use: one less, one more, all, and each alone."""
        every = range(len(self.drafts))
        near = [used ^ {draft} for draft in every]
        return [*{each for each in (*near, frozenset(every), *(frozenset({draft}) for draft in every)) if each}]

    def _within(self, drafts: frozenset[int], row_drafts: Ints, movable: Bools, worth: Floats) -> Ints:
        """Return the best one of these drafts for each row, its own where that is hardly worse or none can draft."""
        if not drafts:
            return row_drafts
        indices = numpy.array(sorted(drafts))
        best = indices[worth[:, indices].argmax(1)]
        rows = numpy.arange(len(row_drafts))
        keeps_one = numpy.isin(row_drafts, indices)
        gains = worth[rows, best] - numpy.where(keeps_one, worth[rows, row_drafts], UNABLE_WORTH)
        least = (BETTER - 1) * (1 + numpy.maximum(0.0, worth[rows, best]))
        moves = movable & self.able[rows, best] & (gains > least)
        return numpy.where(moves, best, row_drafts)

    def _length(self, draft: int, rows: Bools, price: float, drafting_s: Floats) -> int:
        """Return the levels that a draft drafts for its rows, 0 where that is not worth its seconds."""
        if self.fixed is not None:
            return min(self.fixed, len(self._levels))
        used = self.used[rows]
        gains, nodes = used @ self.tokens[rows, draft], used @ self.nodes[rows, draft]
        worth = gains - price * (drafting_s + self.node_s * nodes)
        best = int(worth.argmax())
        return best + 1 if worth[best] > 0 else 0

    def _worth(self, price: float) -> Floats:
        """Return what each draft is worth for each row `[n, m]`, in tokens a step, as if its passes were free."""
        lengths = slice(None) if self.fixed is None else slice(min(self.fixed, len(self._levels)) - 1, self.fixed)
        tokens, used = self.tokens[..., lengths], self.used[:, None]
        gains = used[..., None] * (tokens - price * self.node_s * self.nodes[..., lengths])
        written = 1 + used * numpy.take_along_axis(tokens, gains.argmax(2)[..., None], 2)[..., 0]
        reading_s = self.reading_s * written / self.left[:, None]  # a step's share
        worth = gains.max(2) - price * reading_s
        if self.free is not None:
            worth[:, self.free] = 0.0
        return numpy.where(self.able, worth, UNABLE_WORTH)

    def _verifying_s(self, nodes: float) -> float:
        """Return the seconds that drafted tokens add to the target's pass."""
        table, rows = self.latency.target, len(self.left)
        return table.seconds(0, rows + nodes) - table.seconds(0, rows)

    def _drafting_s(self, draft: int, rows: Bools) -> Floats:
        """Return the seconds `[L]` in which a draft is expected to draft trees of 1 … L levels for its rows."""
        used, count = self.used[rows], int(rows.sum())
        seconds: Floats = self._loop_s(draft, count) * (1 - (1 - used).prod())
        table = self.drafts[draft].draft
        if not self._trees or table is None or self.drafts[draft].drafts_block:
            return seconds
        read_s = (table.seconds(0, 2 * count) - table.seconds(0, count)) / count
        return seconds + read_s * (used @ (self.reads[rows, draft] - self._levels))

    def _loop_s(self, draft: int, count: int) -> Floats:
        """Return the seconds `[L]` in which a draft drafts chains of 1 … L tokens for so many rows."""
        if (draft, count) not in self._loops:
            costs, context = self.drafts[draft], self.context * count / len(self.left)
            lengths = range(1, self.tokens.shape[2] + 1)
            self._loops[draft, count] = numpy.array([costs.loop_s(count, context, length) for length in lengths])
        return self._loops[draft, count]
