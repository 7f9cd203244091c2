"""Prospects of rows: what each draft would bring, by the chances that a token of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.costs.drafted import Ints
from distillspec.serving.costs.table import Floats
from distillspec.serving.selection.accepting import sigmoid
from distillspec.serving.selection.answer import Answer
from distillspec.serving.selection.base import SelectionParts, drafts_of
from distillspec.serving.selection.batch import TYPICAL_TOKENS, Batch, Prospect
from distillspec.serving.selection.estimate import DraftsAcceptance
from distillspec.serving.selection.free_share import FreeShare
from distillspec.serving.selection.hope import Hope
from distillspec.serving.selection.tree_gains import TOKENS, TreeGains

LEAST_LEFT = 32  # tokens that an answer is taken to write still. As many as it has written, where those are more
HOPED_DEVIATIONS = 1.5  # standard deviations by which a draft that is hoped for may be better than it is expected to be


class Prospects:
    """Makes prospects, and batches of them, by the present costs of steps.

    Where the controller grows trees, a row that is alone is priced by these. What a node must bring is taken from the
    last batch that was priced. Rows that share passes are priced by chains: siblings make drafts alike, so by trees no
    row alone would be worth the passes of another draft, and which draft is the best of a kind would be learnt late.

    Args:
        acceptance: of the drafts.
        share: of steps in which sources without a model draft.
        hope: for drafts that are to be tried.

    Attributes:
        alone: the step has one row.
    """

    def __init__(self, parts: SelectionParts, acceptance: DraftsAcceptance, share: FreeShare, hope: Hope) -> None:
        self.parts, self._acceptance, self._share, self._hope = parts, acceptance, share, hope
        self._blocks = set[str]()  # drafts that draft all tokens in one pass
        self.alone = False
        self._trees: dict[str, TreeGains | None] = {}  # by draft, None: chains
        self._least: float | None = None  # tokens that a node must bring

    def of(
        self, row: RowView, names: Sequence[str], chances: Sequence[float], answer: Answer | None = None
    ) -> Prospect:
        """Return what drafts would bring a row.

        Args:
            names: the members to choose from, drafts and at most one source without a model.
            chances: P(a token is accepted) of each, in the mean.
            answer: of the row so far.
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
        share = self._share.of(row, *((0, 0) if answer is None else (answer.steps, answer.free_steps)))
        shapes = found[1:] if self.alone and any(self._trees.values()) else None
        return Prospect(found[TOKENS], able, reading_s, left, row.context_tokens, 1.0 - share, shapes)

    def expected(self, row: RowView, names: Sequence[str], answer: Answer) -> Prospect:
        """Return what drafts are expected to bring an answer, by its own trials too."""
        return self.of(row, names, self._acceptance.chances(answer.features, answer.learnt, names), answer)

    def hoped(self, row: RowView, names: Sequence[str], answer: Answer) -> Prospect:
        """Return the same with what is hoped for, as it was known at the answer's last review."""
        if answer.prospect is None or answer.prospect[0] != (names, self.alone):
            chances = self._acceptance.chances(answer.features, answer.learnt, names)
            hoped = [self.hope_of(name, answer, chance) for name, chance in zip(names, chances, strict=True)]
            answer.prospect = (names, self.alone), self.of(row, names, hoped, answer)
        return answer.prospect[1]

    def is_hoped(self, source: str, answer: Answer) -> bool:
        """Return True for a draft that is hoped for, and was not tried for the answer."""
        return source not in answer.learnt and source not in self.parts.free and self._hope.tries(source, answer.kind)

    def hope_of(self, source: str, answer: Answer, chance: float) -> float:
        """Return P(a token of a draft is accepted) that is hoped for, where it is expected to be `chance`."""
        if not self.is_hoped(source, answer):
            return chance
        log_odds, deviation = self._acceptance.log_odds(source, answer.features)
        return max(chance, self._hope.chance, sigmoid(log_odds + HOPED_DEVIATIONS * deviation))

    def batch(self, rows: Sequence[Prospect], names: Sequence[str]) -> Batch:
        """Return the batch of some rows' prospects of these members."""
        latency = self.parts.latency()
        costs = [latency.of_draft(name in self._blocks, name) for name in names]
        free = next((place for place, name in enumerate(names) if name in self.parts.free), None)
        return Batch(rows, costs, latency, self.parts.fixed_length, free)

    def priced(self, batch: Batch, row_drafts: Ints) -> None:
        """Take what a node must bring from a batch whose rows have `row_drafts [n]`. Trees are grown anew."""
        if any(self._trees.values()):
            self._least = batch.rate(row_drafts) * batch.node_s
        self._trees.clear()

    def changed(self, change: DraftChange) -> None:
        """Learn that a draft is another."""
        self._blocks.discard(change.source)
        self._trees.pop(change.source, None)

    def _fill(self, found: Floats, option: Option, chance: float) -> None:
        """Write tokens, nodes and reads `[3, levels]` of a draft's trees or chains into `found`."""
        trees = self._trees_of(option.source) if self.alone and option.wide else None
        if trees is None:
            survival = self._acceptance.survival(option.source, chance)
            survival[option.limit :] = 0.0
            found[TOKENS] = survival.cumsum()
            return
        gains = trees.at(chance)
        levels = gains.shape[1]
        found[:, :levels] = gains
        last = min(option.limit, levels)
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
            node_s = (table.seconds(0, 1 + TYPICAL_TOKENS) - table.seconds(0, 1)) / TYPICAL_TOKENS
            self._least = node_s / table.seconds(0, 1, 1)
        return self._least
