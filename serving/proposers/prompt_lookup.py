"""Prompt lookup (Saxena 2023): propose the tokens that followed the last words at their latest occurrence."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.base.tree import LOOKUP, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer


class PromptLookup(Proposer):
    """Matches the last n tokens, longest n first, against prompt and output. The latest match wins.

    Deterministic: proposals are one-hot. An index of n-grams per sequence grows with it, so that a step costs the new
    tokens alone.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"shortest={shortest} must be between 1 and longest={longest}, tokens of an n-gram")
        self.sizes = range(longest, shortest - 1, -1)
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [
            TokenTree.chain(self._continuation(r.sequence)[: r.speculation_length], source=LOOKUP) for r in requests
        ]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return the lengths of the continuation and of the match before it."""
        found = self._index(sequence).last_match(sequence.tokens)
        if found is None:
            return (Option(0, drafted_by_model=False, source=LOOKUP),)
        start, match = found
        return (Option(len(sequence.tokens) - start, False, match, source=LOOKUP),)

    def leave_slot(self, sequence: SequenceState) -> None:
        self._indices.pop(sequence.id, None)

    def _continuation(self, sequence: SequenceState) -> list[int]:
        found = self._index(sequence).last_match(sequence.tokens)
        return [] if found is None else sequence.tokens[found[0] :]

    def _index(self, sequence: SequenceState) -> _NgramIndex:
        """Return the sequence's index after reading its new text."""
        index = self._indices.setdefault(sequence.id, _NgramIndex(self.sizes))
        index.read(sequence.tokens)
        return index


class _NgramIndex:
    """n-gram → the place after its latest occurrence that something follows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.places: dict[tuple[int, ...], int] = {}
        self.read_tokens = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Index n-grams that end before the newest token, so that a continuation exists."""
        for end in range(self.read_tokens, len(tokens) - 1):
            for size in self.sizes:
                if end + 1 >= size:
                    self.places[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self.read_tokens = max(self.read_tokens, len(tokens) - 1)

    def last_match(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the place after the latest occurrence of the text's longest last n-gram, and n."""
        for size in self.sizes:
            if len(tokens) >= size:
                place = self.places.get(tuple(tokens[-size:]))
                if place is not None:
                    return place, size
        return None
