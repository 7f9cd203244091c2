"""Staged speculation (Spector and Re 2023): a cheap source guesses what the draft will propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.base.shape import chain_of
from distillspec.serving.base.tree import DRAFT, TokenTree
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide


class Staged(SideBySide):
    """A draft that reads guessed tokens in one pass, and saves the passes behind those that it chooses itself.

    It chooses every token from its own distribution, whatever was guessed. So proposals, and the probabilities that
    they are judged by, are those of the draft alone, and verification is exact.

    Args:
        draft: reads tokens alone.
        helper: guesses, without a model.
        source: the helper's name in trees.
    """

    def __init__(self, draft: DraftModel, helper: Proposer, source: str) -> None:
        super().__init__({source: helper, DRAFT: draft})
        self.draft, self.helper, self.source = draft, helper, source

    def most_nodes(self, depth: int) -> int:
        return self.draft.most_nodes(depth)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        asked = [ProposalRequest(r.sequence, chain_of(max(1, r.speculation_length - 1), self.source)) for r in requests]
        guarded = self._guarded[self.source]
        guessed = [EMPTY] * len(asked) if guarded.paused else guarded.propose(asked)
        guesses = map(self._tokens, guessed)
        return self.draft.propose([replace(r, guess=guess) for r, guess in zip(requests, guesses, strict=True)])

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        return self.draft.foreseen(sequence)

    @staticmethod
    def _tokens(tree: TokenTree) -> tuple[int, ...]:
        return tuple(tree.tokens[node] for node in tree.first_path)
