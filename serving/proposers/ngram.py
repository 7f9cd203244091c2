"""An n-gram language model as proposer: it learns from the texts it serves, and needs no model and no training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distillspec.serving.base.likely import FEW_ROWS, LikelyNodes
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, Option
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import NGRAM, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.calibration import Calibration, repeats_itself, tried
from distillspec.serving.proposers.likely_growth import MOST_NODES, Drafted, LikelyGrowth
from distillspec.serving.proposers.ngram_tables import NgramTables
from distillspec.serving.proposers.tree_of_shape import tree_of_shape

OF_PROMPT = 2048  # tokens of a prompt's end that are learnt from
LEARN_BATCH = 256  # tokens of a text that are learnt at a time: all of a long prompt would hold a step up
CONFIDENCE_STEPS = 10  # whose acceptance is told apart, where nodes are not planned one by one
# Where nothing was drafted for so many rows in turn, texts are learnt from and nodes are grown for one row of so many.
# Of few rows it is more often, or the end of a rest would pass without one.
IDLE_AFTER, IDLE_EVERY, IDLE_EVERY_OF_FEW = 64, 61, 17

NO_NGRAMS = (Option(0, False, source=NGRAM),)


class Outlook(NamedTuple):
    """Probable next tokens of a sequence, with their shares, by the drafted tokens before them.

    tokens: of the text that they hold for.
    """

    tokens: int
    behind: dict[Drafted, dict[int, float]]


class Ngram(Proposer):
    """Proposes the most probable tokens behind the last ones, in trees, by the texts of the tenant so far.

    Deterministic: proposals are one-hot. Nodes are named the likeliest first, with chances that follow what was
    accepted. Requests with `log=False` are not learnt from.

    Args:
        longest: tokens of the longest contexts.
        contexts: rows of a tenant's table, see `NgramCounts`.
        least: probability that a token must have to be proposed.
        depth: the most levels that nodes are named of.
        nodes: the most nodes that are named.
        wide: False: chains alone.

    Attributes:
        tables: the counts by tenant.

    Raises:
        ConfigError: `longest` or `contexts` is below 1.
    """

    keeps_answers = True

    def __init__(
        self,
        longest: int = 3,
        contexts: int = 100_000,
        least: float = 0.05,
        *,
        depth: int = 4,
        nodes: int = MOST_NODES,
        wide: bool = True,
    ) -> None:
        self.longest, self.least = longest, least
        self.growth = LikelyGrowth(NGRAM, depth, min(nodes, MOST_NODES), wide=wide)
        self.tables = NgramTables(longest, contexts)
        self._read: dict[str, int] = {}  # by sequence, tokens learnt from
        self._outlooks: dict[str, Outlook] = {}  # by sequence
        self._calibration = Calibration()
        self._idle = 0  # rows that were asked for since tokens were drafted

    def most_nodes(self, depth: int) -> int:
        return max(depth, self.growth.nodes)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        self._idle = 0
        for request in requests:
            self._learn(request.sequence)
            self.growth.follow(request.sequence.id, request.trees[0].shape.nodes)
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return an option of no tokens where none is probable enough."""
        self._idle += 1
        every = IDLE_EVERY_OF_FEW if self._serves_few else IDLE_EVERY
        if self._idle > IDLE_AFTER and self._idle % every:
            return NO_NGRAMS
        self.tables.serve(len(self._outlooks))
        self._learn(sequence)
        self.growth.follow(sequence.id, 0)
        best = max(self._behind(sequence, ()).values(), default=0.0)
        likely = self._likely(sequence)
        most, sure = ANY if best else 0, 1 + int(best * CONFIDENCE_STEPS)
        return (Option(most, False, sure, source=NGRAM, wide=True, likely=likely),)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Compare what was accepted with what was expected. New text is learnt from before the next proposal."""
        outlook = self._outlooks.get(sequence.id)
        if outlook is not None:
            for expected, is_accepted in tried(tree, path, NGRAM, outlook.behind.get):
                self._calibration.saw(sequence.id, repeats_itself(sequence), expected, is_accepted)

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn from the end of a text, and forget a sequence that does not come back."""
        if sequence.slot is not None or sequence.finish_reason is None:  # else it ends while it waits
            self._read[sequence.id] = max(self._read.get(sequence.id, 1), len(sequence.tokens) - LEARN_BATCH)
            self._learn(sequence)
        self._outlooks.pop(sequence.id, None)
        self.growth.forget(sequence.id)
        if sequence.finish_reason is not None:
            self._read.pop(sequence.id, None)
            self._calibration.forget(sequence.id)

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep counts in a folder too from now on, if there is none yet. Raises RunError if it cannot be made."""
        self.tables.keep_in(folder, vocabulary)

    def flush(self) -> None:
        """Write what has changed since it was written."""
        self.tables.flush()

    def forget_tenant(self, tenant: str) -> None:
        """Delete a tenant's counts, in memory and on disk. Running answers are learnt from again from here on.

        Raises OSError where a file stays.
        """
        self.tables.forget(tenant)
        self._outlooks.clear()

    def _learn(self, sequence: SequenceState) -> None:
        """Learn from at most `LEARN_BATCH` tokens that are new of a text."""
        tokens = sequence.tokens
        start = self._read.get(sequence.id, max(1, sequence.prompt_length - OF_PROMPT))
        if start >= len(tokens) or not sequence.request.log:
            return
        end = self._read[sequence.id] = min(len(tokens), start + LEARN_BATCH)
        self.tables.learn(sequence.request.cache_key, tokens, start, end)

    def _likely(self, sequence: SequenceState) -> LikelyNodes:
        kept = self._calibration.share(sequence.id, repeats_itself(sequence))
        return self.growth.grow(sequence, lambda path: self._behind(sequence, path), kept, len(self._outlooks))

    @property
    def _serves_few(self) -> bool:
        """True beside few rows, where a node that is named and not drafted costs little."""
        return len(self._outlooks) <= FEW_ROWS

    def _behind(self, sequence: SequenceState, drafted: Drafted) -> dict[int, float]:
        """Return the tokens that are probable enough behind drafted ones, the best first, with their shares."""
        outlook = self._outlooks.get(sequence.id)
        if outlook is None or outlook.tokens != len(sequence.tokens):
            outlook = self._outlooks[sequence.id] = Outlook(len(sequence.tokens), {})
        if drafted not in outlook.behind:
            end = [*sequence.tokens[-self.longest :], *drafted][-self.longest :]
            shares = [
                (-share, token) for token, share in self.tables.of(sequence.request.cache_key).shares(end).items()
            ]
            outlook.behind[drafted] = {token: -share for share, token in sorted(shares) if -share >= self.least}
        return outlook.behind[drafted]

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> TokenTree:
        return tree_of_shape(shape, lambda path: list(self._behind(sequence, tuple(path))), sequence.stop_ids, NGRAM)
