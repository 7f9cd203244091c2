"""Token recycling (Luo et al. 2024): propose what the target found most probable behind the same token before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import RECYCLED, ROOT, TokenTree
from distillspec.serving.decoding.sampling import VerificationWindow
from distillspec.serving.proposers.base import ANY, ProposalRequest, Prospect

Table = NDArray[numpy.int32]  # [V, best] most probable tokens in order, −1 where nothing is known
OWNERS = 64  # tenants whose tables are kept
ONE_TOKEN = 1  # of text, which a proposal follows from: `Prospect.match`


class TokenRecycling:
    """Keeps the target's `best` most probable tokens behind every token, from all rows that it verifies.

    The children of a node are the entries of its token. Deterministic: proposals are one-hot. No training and no model:
    a step costs the search for the best entries of its logits. Each tenant has a table of its own, of 4 · `best` bytes
    a token of the vocabulary. The tenants that were served last keep theirs.

    Raises:
        ConfigError: `best` is below 1.
    """

    version = ""
    keeps_answers = True  # what was probable in a tenant's texts

    def __init__(self, vocabulary: int, best: int = 8) -> None:
        if best < 1:
            raise ConfigError(f"proposer_options.best={best} must be at least 1")
        self.vocabulary, self.best = vocabulary, min(best, vocabulary)
        self._tables: OrderedDict[str, Table] = OrderedDict()  # by tenant, the one served last at the end

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def prospect(self, sequence: SequenceState) -> Prospect:
        """Return a prospect of no tokens where nothing is known behind the newest one."""
        known = self._table(sequence)[sequence.tokens[-1], 0] >= 0
        return Prospect(ANY if known else 0, False, ONE_TOKEN, source=RECYCLED, wide=True)

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Learn from a step's raw logits `[Σ (1 + nodes), V]`, window by window. Rows with NaN are left out."""
        best = logits.topk(self.best).indices.int().cpu().numpy()
        sound = logits.amax(-1).isfinite().cpu().numpy()
        first = 0
        for window in windows:
            tokens = numpy.array([window.sequence.tokens[-1], *window.tree.tokens])
            rows = numpy.arange(first, first + len(tokens))
            rows = rows[sound[rows]]
            self._table(window.sequence)[tokens[rows - first]] = best[rows]
            first += len(tokens)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Do nothing: `see` has learnt from the step."""

    def leave_slot(self, sequence: SequenceState) -> None:
        """Do nothing: tables are the tenants'."""

    def forget_tenant(self, tenant: str) -> None:
        """Delete a tenant's table."""
        self._tables.pop(tenant, None)

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> TokenTree:
        """Return the tree of a shape without what is not known. Tokens that end the answer have no children."""
        table, tokens, parents = self._table(sequence), list[int](), list[int]()
        above: list[int | None] = [ROOT]
        for level in shape.levels:
            below: list[int | None] = []
            for node, count in zip(above, level, strict=True):
                found = () if node is None else self._behind(table, sequence, node, tokens)[:count]
                below += [*range(len(tokens), len(tokens) + len(found)), *[None] * (count - len(found))]
                tokens += found
                parents += [ROOT if node is None else node] * len(found)
            above = below
        return TokenTree.of_parents(tokens, parents, RECYCLED).first_path_first()

    @staticmethod
    def _behind(table: Table, sequence: SequenceState, node: int, tokens: Sequence[int]) -> Sequence[int]:
        token = sequence.tokens[-1] if node == ROOT else tokens[node]
        if node != ROOT and token in sequence.stop_ids:
            return ()
        return [entry for entry in table[token].tolist() if entry >= 0]

    def _table(self, sequence: SequenceState) -> Table:
        """Return the table of a sequence's tenant, a new one for a new tenant."""
        tenant = sequence.request.tenant
        if tenant not in self._tables:
            self._tables[tenant] = numpy.full((self.vocabulary, self.best), -1, dtype=numpy.int32)
            if len(self._tables) > OWNERS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(tenant)
        return self._tables[tenant]
