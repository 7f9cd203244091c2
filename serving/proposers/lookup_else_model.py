"""Prompt lookup where it finds something, the draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.kv_cache import Prefix
from distillspec.serving.proposers.base import (
    Foresees,
    ProposalRequest,
    Proposer,
    Prospect,
    caches_of,
    most_nodes,
    readers,
    release_memory,
)


class LookupElseModel:
    """Proposes what `lookup` finds. `model` drafts for the other rows, and does catch-up prefill of the rest later."""

    def __init__(self, lookup: Proposer, model: Proposer) -> None:
        self.lookup, self.model = lookup, model

    @property
    def version(self) -> str:
        return self.model.version

    def most_nodes(self, depth: int) -> int:
        return max(most_nodes(self.lookup, depth), most_nodes(self.model, depth))

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        trees = self.lookup.propose(requests)
        missing = [i for i, tree in enumerate(trees) if not len(tree)]
        if missing:
            for i, tree in zip(missing, self.model.propose([requests[i] for i in missing]), strict=True):
                trees[i] = tree
        return trees

    def prospect(self, sequence: SequenceState) -> Prospect:
        for proposer in (self.lookup, self.model):
            found = proposer.prospect(sequence) if isinstance(proposer, Foresees) else Prospect()
            if found.most:
                return found
        return found

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        self.lookup.committed(sequence, tree, path)
        self.model.committed(sequence, tree, path)

    @property
    def caches(self) -> Sequence[SlotCache]:
        return caches_of(self.model)

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        for reader in readers(self.model):
            reader.enter_slot(sequence, prefix)

    def distrust(self, sequence: SequenceState) -> None:
        for reader in readers(self.model):
            reader.distrust(sequence)

    def skip(self, sequence: SequenceState) -> None:
        for reader in readers(self.model):
            reader.skip(sequence)

    def assume_read(self, sequence: SequenceState, tokens: int) -> None:
        for reader in readers(self.model):
            reader.assume_read(sequence, tokens)

    def release(self) -> None:
        release_memory(self.model)

    def leave_slot(self, sequence: SequenceState) -> None:
        self.lookup.leave_slot(sequence)
        self.model.leave_slot(sequence)
