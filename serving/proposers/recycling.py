"""Token recycling (Luo et al. 2024): propose what the target found most probable behind the same token before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, Option
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import RECYCLED, TokenTree
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.tenant_tables import TenantTables
from distillspec.serving.proposers.tree_of_shape import tree_of_shape

Table = NDArray[numpy.int32]  # [V, best] most probable tokens in order, −1 where nothing is known
ONE_TOKEN = 1  # of text, which a proposal follows from: `Option.match`


class TokenRecycling(Proposer):
    """Keeps the target's `best` most probable tokens behind every token, from all rows that it verifies.

    The children of a node are the entries of its token. Deterministic: proposals are one-hot. No training and no model:
    a step costs the search for the best entries of its logits. Each tenant has a table of its own, of 4 · `best` bytes
    a token of the vocabulary. Requests with `log=False` are not learnt from.

    Raises:
        ConfigError: `best` is below 1.
    """

    keeps_answers = True  # what was probable in a tenant's texts

    def __init__(self, vocabulary: int, best: int = 8) -> None:
        if best < 1:
            raise ConfigError(f"proposer_options.best={best} must be at least 1")
        self.best = min(best, vocabulary)
        self._tables = TenantTables[Table](lambda _: numpy.full((vocabulary, self.best), -1, dtype=numpy.int32))

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return an option of no tokens where nothing is known behind the newest one."""
        known = self._tables.of(sequence.request.cache_key)[sequence.tokens[-1], 0] >= 0
        return (Option(ANY if known else 0, False, ONE_TOKEN, source=RECYCLED, wide=True),)

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Learn from a step's raw logits `[Σ (1 + nodes), V]`, window by window. Rows with NaN are left out."""
        self._tables.serve(len(windows))
        best = logits.topk(self.best).indices.int().cpu().numpy()
        sound = logits.amax(-1).isfinite().cpu().numpy()
        first = 0
        for window in windows:
            tokens = numpy.array([window.sequence.tokens[-1], *window.tree.tokens])
            rows = slice(first, first := first + len(tokens))
            if window.sequence.request.log:
                table = self._tables.of(window.sequence.request.cache_key)
                table[tokens[sound[rows]]] = best[rows][sound[rows]]

    def forget_tenant(self, tenant: str) -> None:
        """Delete a tenant's table."""
        self._tables.forget(tenant)

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> TokenTree:
        table = self._tables.of(sequence.request.cache_key)

        def behind(path: Sequence[int]) -> list[int]:
            entries: list[int] = table[path[-1] if path else sequence.tokens[-1]].tolist()
            return [entry for entry in entries if entry >= 0]

        return tree_of_shape(shape, behind, sequence.stop_ids, RECYCLED)
