"""Prompt lookup where it finds something, the draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from distillspec.serving.kv_cache import Move
from distillspec.serving.proposers.base import (
    Foresees,
    KeepsCache,
    ProposalRequest,
    Proposer,
    Prospect,
    most_nodes,
    release_memory,
)
from distillspec.serving.requests import Sequence
from distillspec.serving.tree import TokenTree


class LookupElseModel:
    """Asks `lookup` first; `model` drafts for the rows it has nothing for, and catches up on the others later."""

    def __init__(self, lookup: Proposer, model: Proposer) -> None:
        self.lookup, self.model = lookup, model

    @property
    def version(self) -> str:
        return self.model.version

    def most_nodes(self, depth: int) -> int:
        return max(most_nodes(self.lookup, depth), most_nodes(self.model, depth))

    def propose(self, requests: Seq[ProposalRequest]) -> list[TokenTree]:
        trees = self.lookup.propose(requests)
        missing = [i for i, tree in enumerate(trees) if not len(tree)]
        if missing:
            for i, tree in zip(missing, self.model.propose([requests[i] for i in missing]), strict=True):
                trees[i] = tree
        return trees

    def prospect(self, sequence: Sequence) -> Prospect:
        for proposer in (self.lookup, self.model):
            found = proposer.prospect(sequence) if isinstance(proposer, Foresees) else Prospect()
            if found.most:
                return found
        return found

    def committed(self, sequence: Sequence, tree: TokenTree, path: Seq[int]) -> None:
        self.lookup.committed(sequence, tree, path)
        self.model.committed(sequence, tree, path)

    def move(self, moves: Seq[Move]) -> None:
        self.lookup.move(moves)
        self.model.move(moves)

    def distrust(self, sequence: Sequence) -> None:
        for proposer in (self.lookup, self.model):
            if isinstance(proposer, KeepsCache):
                proposer.distrust(sequence)

    def release(self) -> None:
        release_memory(self.model)

    def forget(self, sequence_id: str) -> None:
        self.lookup.forget(sequence_id)
        self.model.forget(sequence_id)
