"""Index of texts by their last tokens: what followed the longest match of a text's end, and how often.

After suffix decoding (Oliaro et al. 2024). Texts are kept in two halves: when the younger one is full the older one is
dropped, so that memory is bounded and no step pays for a rebuild.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SHORTEST, LONGEST = 3, 64  # tokens of a match
LATEST = 24  # occurrences that are compared
END = -1  # between texts


class Continuation(NamedTuple):
    """Tokens that followed the longest match."""

    tokens: tuple[int, ...] = ()
    match: int = 0  # tokens of the match
    expected: float = 0.0  # of the tokens, how many are right if the text goes on as the occurrences did


class _Half:
    """Texts one after another, and where each run of `SHORTEST` tokens occurred last."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")  # by place, the end of the earlier occurrence of the run that ends there, 0 for none
        self._last: dict[int, int] = {}  # run → the place after its last occurrence

    def append(self, token: int) -> None:
        self.tokens.append(token)
        end = len(self.tokens)
        earlier = 0
        if end >= SHORTEST and END not in (run := self.tokens[end - SHORTEST : end]):
            key = _key(run)
            earlier, self._last[key] = self._last.get(key, 0), end
        self._before.append(earlier)

    def ends(self, run: Sequence[int]) -> Iterator[int]:
        """Yield the places after occurrences of a run, the latest first, where something follows."""
        end, count = self._last.get(_key(run), 0), 0
        while end and count < LATEST:
            if end < len(self.tokens) and self.tokens[end] != END:
                yield end
                count += 1
            end = self._before[end - 1]

    def match(self, end: int, tail: array[int]) -> int:
        """Return how many tokens before `end` are those of `tail`, at most `LONGEST`."""
        same, most = SHORTEST, min(len(tail), end)
        while same < most and self.tokens[end - same - 1] == tail[-same - 1]:
            same += 1
        return same


class SuffixIndex:
    """Texts of at most `limit` tokens in all, the newest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._halves = [_Half(), _Half()]  # older, younger

    def __len__(self) -> int:
        """Tokens held, ends of texts among them."""
        return sum(len(half.tokens) for half in self._halves)

    def add(self, text: Sequence[int]) -> None:
        """Add a whole text."""
        if len(self._halves[1].tokens) + len(text) > self.limit // 2:
            self._halves = [self._halves[1], _Half()]
        self.extend([*text[-(self.limit // 2) :], END])

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with the newest text."""
        for token in tokens:
            self._halves[1].append(token)

    def continuations(self, text: Sequence[int]) -> list[tuple[_Half, int, int]]:
        """Return where the end of `text` occurred, as half, place and length of the match."""
        if len(text) < SHORTEST:
            return []
        tail = array("i", text[-LONGEST:])
        run = tail[-SHORTEST:]
        return [(half, end, half.match(end, tail)) for half in self._halves for end in half.ends(run)]


def continuation(indices: Sequence[SuffixIndex], text: Sequence[int], most: int, least: float) -> Continuation:
    """Return what followed the longest match in any of the indices: at each place the most frequent token.

    Args:
        most: tokens, if the match is as long.
        least: share of the occurrences that the tokens must have followed.
    """
    found = [each for index in indices for each in index.continuations(text)]
    if not found:
        return Continuation()
    match = max(length for _, _, length in found)
    alive = [(half, end) for half, end, length in found if length == match]
    all_of_them, tokens, expected = len(alive), list[int](), 0.0
    while len(tokens) < min(most, match):
        following: dict[int, list[tuple[_Half, int]]] = {}
        for half, end in alive:
            if end < len(half.tokens) and half.tokens[end] != END:
                following.setdefault(half.tokens[end], []).append((half, end + 1))
        if not following:
            break
        token, alive = max(following.items(), key=lambda item: len(item[1]))
        share = len(alive) / all_of_them
        if share < least:
            break
        tokens.append(token)
        expected += share
    return Continuation(tuple(tokens), match, expected)


def _key(run: Sequence[int]) -> int:
    key = 0
    for token in run:
        key = key << 21 | token
    return key
