"""Prospects of rows: what each draft would bring, by the chances that a token of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.costs.drafted import Ints
from distillspec.serving.costs.table import Floats
from distillspec.serving.selection.base import SelectionParts, drafts_of
from distillspec.serving.selection.batch import TYPICAL, Batch, Prospect
from distillspec.serving.selection.estimate import DraftsAcceptance
from distillspec.serving.selection.tree_gains import TOKENS, TreeGains

LEAST_LEFT = 32  # tokens that an answer is taken to write still. As many as it has written, where those are more


class Prospects:
    """Makes prospects, and batches of them, by the present costs of steps.

    Where the controller grows trees, it is these that drafts are priced by. What a node must bring is taken from the
    last batch that was priced.

    Args:
        acceptance: of the drafts, by positions.
    """

    def __init__(self, parts: SelectionParts, acceptance: DraftsAcceptance) -> None:
        self.parts, self._acceptance = parts, acceptance
        self._blocks = set[str]()  # drafts that draft all tokens in one pass
        self._trees: dict[str, TreeGains | None] = {}  # by draft, None: chains
        self._least: float | None = None  # tokens that a node must bring

    def of(self, row: RowView, names: Sequence[str], chances: Sequence[float], free_share: float = 0.0) -> Prospect:
        """Return what drafts would bring a row.

        Args:
            names: the members to choose from, drafts and at most one source without a model.
            chances: P(a token is accepted) of each, in the mean.
            free_share: of its steps, in which sources without a model draft.
        """
        latency, most = self.parts.latency(), self.parts.most
        found, reading_s = numpy.zeros((3, len(names), most)), numpy.zeros(len(names))
        found[1:], able = numpy.arange(1, most + 1), numpy.array([name in self.parts.free for name in names])
        for option in drafts_of(row):
            place = names.index(option.source)
            if option.at_once:
                self._blocks.add(option.source)
            self._fill(found[:, place], option, chances[place])
            able[place], reading_s[place] = True, latency.reading_s(option.unread_tokens, option.source)
        left = max(LEAST_LEFT, row.context_tokens - len(row.prompt))
        tokens, shapes = found[TOKENS], found[1:] if any(self._trees.values()) else None
        return Prospect(tokens, able, reading_s, left, row.context_tokens, 1.0 - free_share, shapes)

    def batch(self, rows: Sequence[Prospect], names: Sequence[str]) -> Batch:
        """Return the batch of some rows' prospects of these members."""
        latency = self.parts.latency()
        costs = [latency.of_draft(name in self._blocks, name) for name in names]
        free = next((place for place, name in enumerate(names) if name in self.parts.free), None)
        return Batch(rows, costs, latency, self.parts.fixed_length, free)

    def priced(self, batch: Batch, own: Ints) -> None:
        """Take what a node must bring from a batch whose rows have the drafts `own [n]`. Trees are grown anew."""
        if any(self._trees.values()):
            self._least = batch.rate(own) * batch.node_s
        self._trees.clear()

    def changed(self, change: DraftChange) -> None:
        """Learn that a draft is another."""
        self._blocks.discard(change.source)
        self._trees.pop(change.source, None)

    def _fill(self, found: Floats, option: Option, chance: float) -> None:
        """Write tokens, nodes and reads `[3, levels]` of a draft's trees or chains into `found`."""
        trees = self._trees_of(option.source) if option.wide else None
        if trees is None:
            survival = self._acceptance.survival(option.source, chance)
            survival[option.limit :] = 0.0
            found[TOKENS] = survival.cumsum()
            return
        own = trees.at(chance)
        found[:, : own.shape[1]] = own
        last = min(option.limit, own.shape[1])
        found[:, last:] = found[:, last - 1 : last]

    def _trees_of(self, source: str) -> TreeGains | None:
        if source not in self._trees:
            known = self.parts.trees()
            relative = self._acceptance.relative(source)
            self._trees[source] = None if known is None else TreeGains(known, relative, self._least_now())
        return self._trees[source]

    def _least_now(self) -> float:
        """Return what a node must bring: at first at the tokens a second of one row without drafts."""
        if self._least is None:
            table = self.parts.latency().target
            node_s = (table.seconds(0, 1 + TYPICAL) - table.seconds(0, 1)) / TYPICAL
            self._least = node_s / table.seconds(0, 1, 1)
        return self._least
