"""An n-gram model in bounded memory: what followed the last 1 … n tokens, and how often."""

from __future__ import annotations

from array import array
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
        # Plain arrays: single numbers are read from them in half the time that numpy takes.
        self._keys = array("q", bytes(8 * contexts))
        self._tokens = array("i", bytes(4 * FOLLOWING * contexts))
        self._seen = array("H", bytes(2 * FOLLOWING * contexts))

    def learn(self, before: Sequence[int], token: int) -> None:
        """Count a token behind the last 1 … `longest` tokens of `before`."""
        for size in range(1, min(self.longest, len(before)) + 1):
            key = _key(before[-size:])
            row = key % self.contexts
            holder = self._keys[row]
            if holder != key:
                if holder != FREE and self._outlasts(row):
                    continue
                self._keys[row] = key
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
            if self._keys[row] != key:
                continue
            first, last = row * FOLLOWING, (row + 1) * FOLLOWING
            counts = [(t, n) for t, n in zip(self._tokens[first:last], self._seen[first:last], strict=True) if n]
            if not counts:  # rivals have taken them all
                continue
            kinds = len(counts)
            whole = sum([n for _, n in counts]) + kinds
            rest = kinds / whole
            found = {token: share * rest for token, share in found.items()}
            for token, count in counts:
                found[token] = found.get(token, 0.0) + count / whole
        return found

    def packed(self) -> bytes:
        """Return the whole table: keys, tokens and their numbers, in this machine's byte order."""
        return b"".join([part.tobytes() for part in (self._keys, self._tokens, self._seen)])

    def unpack(self, table: bytes, vocabulary: int) -> None:
        """Take over a table that `packed` returned for the same number of contexts.

        Raises:
            ValueError: it is none. Nothing is taken over.
        """
        parts = [array(part.typecode) for part in (self._keys, self._tokens, self._seen)]
        for part in parts:
            size = part.itemsize * self.contexts * (1 if part is parts[0] else FOLLOWING)
            part.frombytes(table[:size])
            table = table[size:]
        keys, tokens = (numpy.frombuffer(part, dtype=part.typecode) for part in parts[:2])
        whole = not table and len(keys) == self.contexts and len(parts[-1]) == FOLLOWING * self.contexts
        if not whole or keys.min() < FREE or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError("it holds no counts of this vocabulary")
        self._keys, self._tokens, self._seen = parts

    def _outlasts(self, row: int) -> bool:
        """Take a count off each token of a row. Return True if any is left."""
        first, last = row * FOLLOWING, (row + 1) * FOLLOWING
        left = [max(0, count - 1) for count in self._seen[first:last]]
        self._seen[first:last] = array("H", left)
        return any(left)

    def _count(self, row: int, token: int) -> None:
        """Count a token in a row, in its own place, or a free one. Without either, every other token loses a count."""
        tokens, seen, free = self._tokens, self._seen, -1
        for place in range(row * FOLLOWING, (row + 1) * FOLLOWING):
            if not seen[place]:
                free = place
            elif tokens[place] == token:
                if seen[place] >= MOST_SEEN:
                    self._halve(row)
                seen[place] += 1
                return
        if free < 0:
            self._outlasts(row)
            return
        tokens[free], seen[free] = token, 1

    def _halve(self, row: int) -> None:
        for place in range(row * FOLLOWING, (row + 1) * FOLLOWING):
            self._seen[place] //= 2


def _key(tokens: Sequence[int]) -> int:
    """Return a hash of some tokens, above 0."""
    return (hash(tuple(tokens)) & 0x7FFF_FFFF_FFFF_FFFF) or 1
