"""An n-gram language model as proposer: it learns from the texts it serves, and needs no model and no training."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import NGRAM, TokenTree
from distillspec.serving.proposers.base import ANY, ProposalRequest, Prospect
from distillspec.serving.proposers.grown import grown_tree
from distillspec.serving.proposers.ngram_counts import NgramCounts
from distillspec.serving.proposers.tenant_tables import TenantTables

OF_PROMPT = 256  # tokens of a prompt's end that are learnt from: all of a long one would hold a step up
SURE = 10  # steps of confidence whose acceptance is told apart


class Ngram:
    """Proposes the most probable tokens behind the last ones, in trees, by the texts of the tenant so far.

    Deterministic: proposals are one-hot. Requests with `log=False` are not learnt from.

    Args:
        longest: tokens of the longest contexts.
        contexts: rows of a tenant's table, see `NgramCounts`.
        least: probability that a token must have to be proposed.

    Raises:
        ConfigError: `longest` or `contexts` is below 1.
    """

    version = ""
    keeps_answers = True

    def __init__(self, longest: int = 3, contexts: int = 100_000, least: float = 0.1) -> None:
        self.longest, self.least = longest, least
        self._tables = TenantTables[NgramCounts](lambda: NgramCounts(longest, contexts))
        self._tables.make()  # refuses impossible options now, not with the first request
        self._read: dict[str, int] = {}  # by sequence, tokens learnt from

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        for request in requests:
            self._learn(request.sequence)
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def prospect(self, sequence: SequenceState) -> Prospect:
        """Return a prospect of no tokens where none is probable enough. Told apart by the best one's probability."""
        self._learn(sequence)
        best = max(self._tables.of(sequence).shares(sequence.tokens).values(), default=0.0)
        sure = 1 + int(best * SURE)
        return Prospect(ANY if best > 0 and best >= self.least else 0, False, sure, source=NGRAM, wide=True)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Do nothing: new text is learnt from before the next proposal."""

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn from the end of a text, and forget a sequence that does not come back."""
        self._learn(sequence)
        if sequence.finish_reason is not None:
            self._read.pop(sequence.id, None)

    def forget_tenant(self, tenant: str) -> None:
        """Delete a tenant's counts. Running answers are learnt from again from here on."""
        self._tables.forget(tenant)

    def _learn(self, sequence: SequenceState) -> None:
        """Learn from what is new of a text."""
        if not sequence.request.log:
            return
        tokens = sequence.tokens
        start = self._read.get(sequence.id, max(1, sequence.prompt_length - OF_PROMPT))
        self._read[sequence.id] = len(tokens)
        table = self._tables.of(sequence)
        for place in range(start, len(tokens)):
            table.learn(tokens[max(0, place - self.longest) : place], tokens[place])

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> TokenTree:
        table, end = self._tables.of(sequence), sequence.tokens[-self.longest :]

        def behind(path: Sequence[int]) -> list[int]:
            shares = table.shares([*end, *path])
            probable = [token for token, share in shares.items() if share >= self.least]
            return sorted(probable, key=lambda token: (-shares[token], token))

        return grown_tree(shape, behind, sequence.stop_ids, NGRAM)
