"""Suffix decoding (Oliaro et al. 2024): propose what followed the same words in this text and in earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.base.tree import SUFFIX, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.suffix_index import LONGEST, Continuation, SuffixIndex, continuation
from distillspec.serving.proposers.suffix_store import SuffixStore

MOST_TOKENS = 32  # of a proposal
MATCH_STEPS = (3, 4, 6, 8, 12, 16, 24, 32, 48, LONGEST)  # lengths of matches whose acceptance is told apart


class SuffixLookup(Proposer):
    """Proposes without a model. Deterministic: proposals are one-hot.

    Args:
        store: answers of earlier requests. Requests with `log=False` are not taken in.
        least: share of the occurrences that the proposed tokens must have followed.
        expected: the fewest tokens that must be expected to be right. Below, other sources may propose.
    """

    keeps_answers = True

    def __init__(self, store: SuffixStore, *, least: float = 0.1, expected: float = 0.0) -> None:
        self.store, self.least, self.expected = store, least, expected
        self._texts: dict[str, tuple[SuffixIndex, int]] = {}  # by sequence: its own text, and the tokens of it read
        self._found: dict[str, tuple[int, Continuation]] = {}  # by sequence: for a text of so many tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        tokens = [self._continuation(request.sequence).tokens[: request.speculation_length] for request in requests]
        return [TokenTree.chain(chain, source=SUFFIX) for chain in tokens]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return the length of the continuation, and of the match before it."""
        found = self._continuation(sequence)
        if found.expected <= self.expected:
            return (Option(0, drafted_by_model=False, source=SUFFIX),)
        match = max(step for step in MATCH_STEPS if step <= found.match)
        return (Option(len(found.tokens), False, match, source=SUFFIX),)

    def leave_slot(self, sequence: SequenceState) -> None:
        """Forget the sequence. A whole answer goes to the store, which writes it at once."""
        self._texts.pop(sequence.id, None)
        self._found.pop(sequence.id, None)
        if sequence.finish_reason in ("stop", "length") and sequence.request.log:
            prompt, answer = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
            self.store.add(sequence.request.cache_key, prompt, answer)

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep answers in a folder too from now on, if there is none yet. Raises RunError if it cannot be made."""
        self.store.keep_in(folder, vocabulary)

    def forget_tenant(self, tenant: str) -> None:
        """Delete what is kept of a tenant's answers. Those that run are taken in when they end."""
        self.store.forget(tenant)
        self._found.clear()

    def _continuation(self, sequence: SequenceState) -> Continuation:
        """Return what may follow, from the store and the sequence's own text. Searched once a step."""
        length, found = self._found.get(sequence.id, (-1, Continuation()))
        if length != len(sequence.tokens):
            index, read = self._texts.get(sequence.id, (None, 0))
            own_text = index or SuffixIndex(2 * (sequence.prompt_length + sequence.max_output + 1))
            own_text.extend(sequence.tokens[read:])
            self._texts[sequence.id] = own_text, len(sequence.tokens)
            self.store.serve(len(self._texts))
            indices = (own_text, self.store.index(sequence.request.cache_key))
            found = continuation(indices, sequence.tokens, MOST_TOKENS, self.least)
            self._found[sequence.id] = len(sequence.tokens), found
        return found
