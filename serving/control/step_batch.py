"""Rows of a step with what their lengths are chosen by, a part for the rows of each draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import Allocation, Batch, Besides, best_by_row, best_for_all, expected
from distillspec.serving.control.bounded import best_within
from distillspec.serving.control.candidates import Candidates
from distillspec.serving.costs.drafted import Ints
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import Floats

ROUNDS = 2  # in which each part's lengths are chosen again, given the other parts'


@dataclass(frozen=True)
class Part:
    """Rows that one draft drafts for: their places in the step, and the batch of them."""

    rows: Ints
    batch: Batch


class StepBatch:
    """Rows of a step, and the best lengths for them.

    Rows of different drafts share the target's pass, and each draft has passes of its own. With several drafts the
    lengths of each one's rows are the best ones given the others', found by turns.

    Args:
        parts: each with rows of its own. Never empty.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.limits = numpy.zeros(sum([len(part.rows) for part in parts]), dtype=numpy.int64)
        for part in parts:
            self.limits[part.rows] = part.batch.limits
        self.plain = parts[0].batch.plain if len(parts) == 1 else self._together([part.batch.plain for part in parts])

    @classmethod
    def of(
        cls,
        view: BatchView,
        most: int,
        acceptance: AcceptanceEstimate,
        latency: LatencyModel,
        *,
        trees: Candidates | None = None,
        price: float = 0.0,
        hope: float = 0.0,
    ) -> StepBatch:
        """Return the batch of a view, in which each row has its source.

        Args:
            most: the most levels that a row may draft.
            hope: see `AcceptanceEstimate.chances`.
        """
        rows = view.rows
        columns: Sequence[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [()] * len(RowView._fields)
        _, written, levels, by_model, *_ = columns
        chances, gains = acceptance.of_rows(rows, hope=hope), None
        if trees is not None:
            wide = numpy.array([row.wide for row in rows], dtype=bool)
            gains = trees.survival(chances) * (trees.spine | wide[:, None])
        survival: Floats = chances[..., 0].cumprod(1)
        limits = numpy.minimum(numpy.array(levels, dtype=numpy.int64), most)
        contexts = numpy.array(written, dtype=numpy.int64)
        model = None if all(by_model) else numpy.array(by_model)
        groups = _by_draft(rows)

        def part(source: str, own: Ints) -> Part:
            alone = len(groups) == 1
            batch = Batch(
                survival if alone else survival[own],
                limits if alone else limits[own],
                contexts if alone else contexts[own],
                latency.of_draft(any(rows[place].at_once for place in own), source),
                view.prefill_tokens,
                model if alone or model is None else model[own],
                price,
                trees,
                gains if alone or gains is None else gains[own],
            )
            return Part(own, batch)

        return cls([part(source, own) for source, own in groups.items()])

    def best(self, *, alike: bool) -> Allocation:
        """Return the lengths of highest goodput. `alike`: one length for all rows of a draft."""
        return self._by_turns(best_for_all if alike else best_by_row)

    def expected(self, lengths: Ints) -> Allocation:
        """Return the allocation of chains of given `lengths [n]` within the limits."""
        if len(self.parts) == 1:
            return expected(self.parts[0].batch, lengths[None])[0]
        return self._together([expected(part.batch, lengths[None, part.rows])[0] for part in self.parts])

    def within(
        self, bounds: Floats, planned: Allocation, price: float, further_s: float, *, alike: bool
    ) -> tuple[Allocation, float]:
        """Return the best lengths within bounds on the rows' times. See `best_within`.

        Of several drafts the dearest is taken for all: bounds hold then whatever each row has.
        """
        batch = self.parts[0].batch if len(self.parts) == 1 else self._dearest()
        return best_within(batch, bounds, planned, price, further_s, alike=alike)

    def _by_turns(self, best: Callable[[Batch], Allocation]) -> Allocation:
        if len(self.parts) == 1:
            return best(self.parts[0].batch)
        found = [part.batch.plain for part in self.parts]
        for _ in range(ROUNDS):
            for place, part in enumerate(self.parts):
                besides = self._besides(found, place)
                chosen = best(replace(part.batch, besides=besides))
                found[place] = chosen._replace(tokens=chosen.tokens - besides.tokens)
        return self._together(found)

    def _besides(self, found: Sequence[Allocation], place: int) -> Besides:
        """Return the work of all parts but one. Tokens of `found` are each part's own."""
        pairs = enumerate(zip(self.parts, found, strict=True))
        others = [(part.batch, own) for other, (part, own) in pairs if other != place]
        return Besides(
            sum([len(batch.limits) for batch, _ in others]),
            sum([int(batch.contexts.sum()) for batch, _ in others]),
            sum([own.nodes for _, own in others]),
            sum([own.tokens for _, own in others]),
            sum([own.drafting_s for _, own in others]),
        )

    def _together(self, found: Sequence[Allocation]) -> Allocation:
        """Return the allocation of all rows: one pass of the target, and the drafting of every part."""
        besides, first = self._besides(found, 0), found[0]
        batch = replace(self.parts[0].batch, besides=besides)
        added_s = float(batch.costs.target_s[first.nodes])
        lengths = numpy.zeros(len(self.limits), dtype=numpy.int64)
        trees = [own.taken for own in found if own.taken is not None]
        taken = numpy.zeros((len(lengths), trees[0].shape[1]), dtype=bool) if trees else None
        for part, own in zip(self.parts, found, strict=True):
            lengths[part.rows] = own.lengths
            if taken is not None:
                taken[part.rows] = _nodes_of(own, part.batch)
        tokens, seconds = first.tokens + besides.tokens, batch.plain.seconds + added_s + first.drafting_s
        return Allocation(lengths, tokens, seconds, taken, first.drafting_s + besides.seconds)

    def _dearest(self) -> Batch:
        order = numpy.concatenate([part.rows for part in self.parts]).argsort()
        whole = [part.batch for part in self.parts]
        dearest = max(whole, key=lambda batch: batch.latency.loop_s(1, 0, 1))
        return Batch(
            numpy.concatenate([batch.survival for batch in whole])[order],
            self.limits,
            numpy.concatenate([batch.contexts for batch in whole])[order],
            dearest.latency,
            dearest.prefill_tokens,
        )


def _by_draft(rows: Sequence[RowView]) -> dict[str, Ints]:
    """Return the rows of each draft. Rows of other sources are with the first."""
    sources = list(dict.fromkeys([row.source for row in rows if row.drafted_by_model and row.limit]))
    if len(sources) < 2:
        return {next(iter(sources), ""): numpy.arange(len(rows))}
    place = {source: number for number, source in enumerate(sources)}
    own = numpy.array([place.get(row.source, 0) for row in rows])
    return {source: numpy.flatnonzero(own == number) for source, number in place.items()}


def _nodes_of(found: Allocation, batch: Batch) -> Any:
    """Return the nodes of an allocation's trees. Chains are their first children."""
    if found.taken is not None:
        return found.taken
    assert batch.nodes is not None
    return batch.nodes.spine & (batch.nodes.depths <= found.lengths[:, None])
