"""Prospects of rows: what each draft would bring, by the chances that a token of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.selection.accepting import sigmoid
from distillspec.serving.selection.answer import Answer
from distillspec.serving.selection.base import SelectionParts, drafts_of
from distillspec.serving.selection.batch import TYPICAL_TOKENS, Batch, Prospect
from distillspec.serving.selection.estimate import DraftsAcceptance
from distillspec.serving.selection.free_share import FreeShare
from distillspec.serving.selection.optimism import Optimism
from distillspec.serving.selection.tree_gains import TOKENS, TreeGains
from distillspec.types import Floats, Ints

LEAST_LEFT = 32  # tokens that an answer is expected to write still, or as many as it has written if that is more
OPTIMISM_SD = 1.5  # standard deviations that an optimistic estimate of a draft's log-odds adds to their mean


class Prospects:
    """Makes prospects, and batches of them, by the present costs of steps.

    Where the controller grows trees, a row that is alone is priced by trees. What a node must bring is taken from the
    last batch that was priced. Rows that share passes are priced by chains. Siblings make drafts similar: by trees no
    single row would be worth the passes of another draft, and the best draft of a kind would be learnt late.

    Args:
        acceptance: of the drafts.
        share: of steps in which sources without a model draft.
        optimism: about drafts that are to be tried.

    Attributes:
        alone: the step has one row.
    """

    def __init__(
        self, parts: SelectionParts, acceptance: DraftsAcceptance, share: FreeShare, optimism: Optimism
    ) -> None:
        self.parts = parts
        self._acceptance = acceptance
        self._share = share
        self._optimism = optimism
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
        figures, reading_s = numpy.zeros((3, len(names), most)), numpy.zeros(len(names))
        figures[1:], able = numpy.arange(1, most + 1), numpy.array([name in self.parts.free for name in names])
        for option in drafts_of(row):
            index = names.index(option.source)
            self._fill(figures[:, index], option, chances[index])
            able[index], reading_s[index] = True, latency.reading_s(option.unread_tokens, option.source)
        left = max(LEAST_LEFT, row.context_tokens - len(row.prompt))
        share = self._share.of(row, *((0, 0) if answer is None else (answer.steps, answer.free_steps)))
        shapes = figures[1:] if self.alone and any(self._trees.values()) else None
        blocks = frozenset([option.source for option in drafts_of(row) if option.drafts_block])
        return Prospect(figures[TOKENS], able, reading_s, left, row.context_tokens, 1.0 - share, shapes, blocks)

    def expected(self, row: RowView, names: Sequence[str], answer: Answer) -> Prospect:
        """Return what drafts are expected to bring an answer, by its own trials too."""
        return self.of(row, names, self._acceptance.chances(answer.features, answer.learnt, names), answer)

    def optimistic(self, row: RowView, names: Sequence[str], answer: Answer) -> Prospect:
        """Return the same by optimistic estimates, made at the answer's last review."""
        if answer.prospect is None or answer.prospect[0] != (names, self.alone):
            chances = self._acceptance.chances(answer.features, answer.learnt, names)
            optimistic = [
                self.optimistic_chance(name, answer, chance) for name, chance in zip(names, chances, strict=True)
            ]
            answer.prospect = (names, self.alone), self.of(row, names, optimistic, answer)
        return answer.prospect[1]

    def may_try(self, source: str, answer: Answer) -> bool:
        """Return True for a draft that is estimated optimistically, and was not tried for the answer."""
        return (
            source not in answer.learnt and source not in self.parts.free and self._optimism.tries(source, answer.kind)
        )

    def optimistic_chance(self, source: str, answer: Answer, chance: float) -> float:
        """Return the optimistic estimate of P(a token of a draft is accepted), where `chance` is expected."""
        if not self.may_try(source, answer):
            return chance
        log_odds, deviation = self._acceptance.log_odds(source, answer.features)
        return max(chance, self._optimism.chance, sigmoid(log_odds + OPTIMISM_SD * deviation))

    def batch(self, rows: Sequence[Prospect], names: Sequence[str]) -> Batch:
        """Return the batch of some rows' prospects of these members."""
        latency = self.parts.latency()
        blocks = frozenset[str]().union(*[row.blocks for row in rows])
        costs = [latency.of_draft(name, drafts_block=name in blocks) for name in names]
        free = next((index for index, name in enumerate(names) if name in self.parts.free), None)
        return Batch(rows, costs, latency, self.parts.fixed_length, free)

    def priced(self, batch: Batch, row_drafts: Ints) -> None:
        """Note what a node must bring, by a batch whose rows have `row_drafts [n]`. Trees are grown anew."""
        if any(self._trees.values()):
            self._least = batch.rate(row_drafts) * batch.node_s
        self._trees.clear()

    def changed(self, change: DraftChange) -> None:
        """Learn that a draft was replaced."""
        self._trees.pop(change.source, None)

    def _fill(self, figures: Floats, option: Option, chance: float) -> None:
        """Write tokens, nodes and reads `[3, levels]` of a draft's trees or chains into `figures`."""
        trees = self._trees_of(option.source) if self.alone and option.wide else None
        if trees is None:
            survival = self._acceptance.survival(option.source, chance)
            survival[option.limit :] = 0.0
            figures[TOKENS] = survival.cumsum()
            return
        gains = trees.at(chance)
        levels = gains.shape[1]
        figures[:, :levels] = gains
        last = min(option.limit, levels)
        figures[:, last:] = figures[:, last - 1 : last]

    def _trees_of(self, source: str) -> TreeGains | None:
        if source not in self._trees:
            known = self.parts.trees()
            relative = self._acceptance.relative(source)
            self._trees[source] = None if known is None else TreeGains(known, relative, self._least_now())
        return self._trees[source]

    def _least_now(self) -> float:
        """Return what a node must bring. At first that is by the tokens a second of one row without drafts."""
        if self._least is None:
            table = self.parts.latency().target
            node_s = (table.seconds(0, 1 + TYPICAL_TOKENS) - table.seconds(0, 1)) / TYPICAL_TOKENS
            self._least = node_s / table.seconds(0, 1, 1)
        return self._least
