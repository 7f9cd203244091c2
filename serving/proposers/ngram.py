"""An n-gram language model as proposer: it learns from the texts it serves, and needs no model and no training."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path as Folder
from typing import NamedTuple

from distillspec.serving.base.likely import FEW_ROWS, LikelyNodes
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, Option
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import NGRAM, ROOT, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.calibration import Calibration
from distillspec.serving.proposers.ngram_tables import NgramTables
from distillspec.serving.proposers.tree_of_shape import tree_of_shape

OF_PROMPT = 2048  # tokens of a prompt's end that are learnt from
LEARN_BATCH = 256  # tokens of a text that are learnt at a time: all of a long prompt would hold a step up
CONFIDENCE_STEPS = 10  # whose acceptance is told apart, where nodes are not planned one by one
MOST_NODES = 12  # of a row's tree
ALL_NODES = 128  # of all rows together: growing a node takes microseconds
LEAST_CHANCE = 0.03  # of a node that is named
# Growing nodes that are not drafted takes time. So the least chance that is named follows what is drafted, beside more
# than a few rows: it goes a step towards a share of the first chance that was not drafted, or down where all were.
NAMED_BELOW, NAMED_STEP, NAMED_MORE = 0.7, 0.2, 0.9
# Where nothing was drafted for so many rows in turn, texts are learnt from and nodes are grown for one row of so many.
# Of few rows it is more often, or the end of a rest would pass without one.
IDLE_AFTER, IDLE_EVERY, IDLE_EVERY_OF_FEW = 64, 61, 17

NO_NGRAMS = (Option(0, False, source=NGRAM),)

Path = tuple[int, ...]  # drafted tokens


class Outlook(NamedTuple):
    """Probable next tokens of a sequence, with their shares, by the drafted tokens before them.

    tokens: of the text that they hold for.
    """

    tokens: int
    behind: dict[Path, dict[int, float]]


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
        self.depth, self.wide = depth, wide
        self.nodes = min(nodes, MOST_NODES)
        self.tables = NgramTables(longest, contexts)
        self._read: dict[str, int] = {}  # by sequence, tokens learnt from
        self._outlooks: dict[str, Outlook] = {}  # by sequence
        self._calibration = Calibration()
        self._floor = LEAST_CHANCE  # of chances that are named
        self._idle = 0  # rows that were asked for since tokens were drafted
        self._named: dict[str, tuple[float, ...]] = {}  # by sequence, chances of the nodes that were named last

    def most_nodes(self, depth: int) -> int:
        return max(depth, self.nodes)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        self._idle = 0
        for request in requests:
            self._learn(request.sequence)
            self._follow(request.sequence.id, request.trees[0].shape.nodes)
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return an option of no tokens where none is probable enough."""
        self._idle += 1
        every = IDLE_EVERY_OF_FEW if self._serves_few else IDLE_EVERY
        if self._idle > IDLE_AFTER and self._idle % every:
            return NO_NGRAMS
        self.tables.serve(len(self._outlooks))
        self._learn(sequence)
        self._follow(sequence.id, 0)
        best = max(self._behind(sequence, ()).values(), default=0.0)
        likely = self._likely(sequence)
        most, sure = ANY if best else 0, 1 + int(best * CONFIDENCE_STEPS)
        return (Option(most, False, sure, source=NGRAM, wide=True, likely=likely),)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Compare what was accepted with what was expected. New text is learnt from before the next proposal."""
        outlook, behind, node = self._outlooks.get(sequence.id), Path(), ROOT
        if outlook is None:
            return
        for accepted in (*path, None):
            children = [child for group in tree.groups_at(node) if group.source == NGRAM for child in group.nodes]
            shares = outlook.behind.get(behind)
            if not children or shares is None:
                return
            expected = sum([shares.get(tree.tokens[child], 0.0) for child in children])
            self._calibration.saw(sequence.id, _group(sequence), expected, accepted in children)
            if accepted not in children:
                return
            node, behind = accepted, (*behind, tree.tokens[accepted])

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn from the end of a text, and forget a sequence that does not come back."""
        if sequence.slot is not None or sequence.finish_reason is None:  # else it ends while it waits
            self._read[sequence.id] = max(self._read.get(sequence.id, 1), len(sequence.tokens) - LEARN_BATCH)
            self._learn(sequence)
        self._outlooks.pop(sequence.id, None)
        self._named.pop(sequence.id, None)
        if sequence.finish_reason is not None:
            self._read.pop(sequence.id, None)
            self._calibration.forget(sequence.id)

    def keep_in(self, folder: Folder, vocabulary: int) -> None:
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
        """Return the nodes of the highest chances, best first."""
        kept = self._calibration.share(sequence.id, _group(sequence))
        floor = LEAST_CHANCE if self._serves_few else self._floor
        most = max(2, min(self.nodes, ALL_NODES // max(1, len(self._outlooks))))
        chances, parents, depths = list[float](), list[int](), list[int]()
        waiting, order = list[tuple[float, int, int, Path]](), count()  # −chance, order, parent, drafted tokens

        def put(behind: Path, parent: int, chance: float) -> None:
            best = self._behind(sequence, behind)
            for token, share in list(best.items())[: None if self.wide else 1]:
                if (token_chance := chance * min(1.0, kept * share)) >= floor:
                    heappush(waiting, (-token_chance, next(order), parent, (*behind, token)))

        put((), ROOT, 1.0)
        while waiting and len(chances) < most:
            negative, _, parent, path = heappop(waiting)
            chances.append(-negative)
            parents.append(parent)
            depths.append(len(path))
            goes_on = -negative * min(1.0, kept) >= floor  # else no share is large enough behind it
            if goes_on and len(path) < self.depth and path[-1] not in sequence.stop_ids:
                put(path, len(chances) - 1, -negative)
        self._named[sequence.id] = tuple(chances)
        return LikelyNodes(NGRAM, tuple(chances), tuple(parents), tuple(depths))

    @property
    def _serves_few(self) -> bool:
        """True beside few rows, where a node that is named and not drafted costs little."""
        return len(self._outlooks) <= FEW_ROWS

    def _follow(self, sequence_id: str, drafted: int) -> None:
        """Name fewer nodes where not all were drafted, and more where all were, or none was named."""
        named = self._named.pop(sequence_id, None)
        if named is None:
            return
        if drafted < len(named):
            self._floor += NAMED_STEP * (max(LEAST_CHANCE, NAMED_BELOW * named[drafted]) - self._floor)
        else:
            self._floor = max(LEAST_CHANCE, NAMED_MORE * self._floor)

    def _behind(self, sequence: SequenceState, drafted: Path) -> dict[int, float]:
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


def _group(sequence: SequenceState) -> bool:
    """Return what sequences' shares are alike by: True for greedy ones, whose text repeats itself more."""
    return sequence.request.params.temperature == 0
