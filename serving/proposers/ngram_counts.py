"""An n-gram model in bounded memory: what followed the last 1 … n tokens, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.errors import ConfigError

FOLLOWING = 4  # tokens that are counted behind a context
FREE = 0  # key of an empty row
MOST_SEEN = 60_000  # a row's counts are halved before they overflow


class NgramCounts:
    """Counts by context, in a table of `contexts` rows.

    A context has one place in the table, by a hash of its tokens. Another one that claims it takes a count off the
    holder, and the place when none is left, so contexts that come again stay. The same holds for the tokens behind a
    context (Misra and Gries 1982).

    Args:
        longest: tokens of the longest contexts.
        contexts: rows, of 32 bytes each.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, longest: int, contexts: int) -> None:
        for name, value in (("longest", longest), ("contexts", contexts)):
            if value < 1:
                raise ConfigError(f"proposer_options.{name}={value} must be at least 1")
        self.longest, self.contexts = longest, contexts
        self._keys = numpy.full(contexts, FREE, dtype=numpy.int64)
        self._tokens = numpy.full((contexts, FOLLOWING), -1, dtype=numpy.int32)
        self._seen = numpy.zeros((contexts, FOLLOWING), dtype=numpy.uint16)

    def learn(self, before: Sequence[int], token: int) -> None:
        """Count a token behind the last 1 … `longest` tokens of `before`."""
        for size in range(1, min(self.longest, len(before)) + 1):
            key = _key(before[-size:])
            row = key % self.contexts
            holder = int(self._keys[row])
            if holder != key:
                if holder != FREE and self._outlasts(row):
                    continue
                self._keys[row], self._tokens[row], self._seen[row] = key, -1, 0
            self._count(row, token)

    def shares(self, before: Sequence[int]) -> dict[int, float]:
        """Return P(token | the last tokens of `before`) of the tokens that were counted.

        Longer contexts are interpolated with shorter ones by their numbers of different tokens (Witten and Bell 1991).
        The shares of all tokens together are below 1: the rest is for those that nothing was seen of.
        """
        found: dict[int, float] = {}
        for size in range(1, min(self.longest, len(before)) + 1):
            key = _key(before[-size:])
            row = key % self.contexts
            if int(self._keys[row]) != key:
                continue
            counts = [(t, n) for t, n in zip(self._tokens[row].tolist(), self._seen[row].tolist(), strict=True) if n]
            if not counts:  # rivals have taken them all
                continue
            kinds = len(counts)
            whole = sum(n for _, n in counts) + kinds
            found = {token: share * kinds / whole for token, share in found.items()}
            for token, count in counts:
                found[token] = found.get(token, 0.0) + count / whole
        return found

    def _outlasts(self, row: int) -> bool:
        """Take a count off each token of a row. Return True if any is left."""
        seen = self._seen[row]
        seen[seen > 0] -= 1
        return bool(seen.any())

    def _count(self, row: int, token: int) -> None:
        tokens, seen = self._tokens[row], self._seen[row]
        same = numpy.flatnonzero((tokens == token) & (seen > 0))
        if not len(same):
            same = numpy.flatnonzero(seen == 0)
            if not len(same):
                seen -= 1
                return
            tokens[same[0]] = token
        if seen[same[0]] >= MOST_SEEN:
            seen //= 2
        seen[same[0]] += 1


def _key(tokens: Sequence[int]) -> int:
    """Return a hash of some tokens, above 0."""
    return (hash(tuple(tokens)) & 0x7FFF_FFFF_FFFF_FFFF) or 1
