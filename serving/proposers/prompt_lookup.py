"""Prompt lookup (Saxena 2023): what followed the last words the last time they occurred may follow them again."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from distillspec.serving.kv_cache import Move
from distillspec.serving.proposers.base import ProposalRequest, Prospect
from distillspec.serving.requests import Sequence
from distillspec.serving.tree import TokenTree


class PromptLookup:
    """Matches the last n tokens, longest n first, against prompt and output; the latest match wins.

    Deterministic: proposals are one-hot. An index of n-grams per sequence grows with it, so that a step costs the new
    tokens alone.
    """

    version = ""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: shortest must be between 1 and longest")
        self.sizes = range(longest, shortest - 1, -1)
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, requests: Seq[ProposalRequest]) -> list[TokenTree]:
        return [TokenTree.chain(self._continuation(r.sequence)[: r.length], source="lookup") for r in requests]

    def prospect(self, sequence: Sequence) -> Prospect:
        """The length of the continuation and of the match it follows."""
        found = self._index(sequence).last_match(sequence.tokens)
        if found is None:
            return Prospect(0, by_model=False)
        start, match = found
        return Prospect(len(sequence.tokens) - start, False, match)

    def committed(self, sequence: Sequence, tree: TokenTree, path: Seq[int]) -> None:
        """The index reads new text when it is next asked."""

    def move(self, moves: Seq[Move]) -> None:
        """Nothing is kept by slot."""

    def forget(self, sequence_id: str) -> None:
        self._indices.pop(sequence_id, None)

    def _continuation(self, sequence: Sequence) -> list[int]:
        found = self._index(sequence).last_match(sequence.tokens)
        return [] if found is None else sequence.tokens[found[0] :]

    def _index(self, sequence: Sequence) -> _NgramIndex:
        """The sequence's index, up to date."""
        index = self._indices.setdefault(sequence.id, _NgramIndex(self.sizes))
        index.read(sequence.tokens)
        return index


class _NgramIndex:
    """n-gram → the place after its latest occurrence that something follows."""

    def __init__(self, sizes: Seq[int]) -> None:
        self.sizes = sizes
        self.places: dict[tuple[int, ...], int] = {}
        self.read_tokens = 0

    def read(self, tokens: Seq[int]) -> None:
        """Index n-grams that end before the newest token, so that a continuation exists."""
        for end in range(self.read_tokens, len(tokens) - 1):
            for size in self.sizes:
                if end + 1 >= size:
                    self.places[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self.read_tokens = max(self.read_tokens, len(tokens) - 1)

    def last_match(self, tokens: Seq[int]) -> tuple[int, int] | None:
        """The place after the latest occurrence of the longest n-gram at the end, and its n."""
        for size in self.sizes:
            if len(tokens) >= size:
                place = self.places.get(tuple(tokens[-size:]))
                if place is not None:
                    return place, size
        return None
