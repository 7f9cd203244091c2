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


Followed = tuple[int, ...]  # tokens that followed a match


class Continuation(NamedTuple):
    """Tokens that followed the longest match."""

    tokens: Followed = ()
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


Place = tuple[_Half, int]  # the place of the token that follows


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


class Matches:
    """Where the longest end of a text occurred, and what followed there.

    Attributes:
        match: tokens of that end, 0 for none.
    """

    def __init__(self, places: Sequence[Place] = (), match: int = 0) -> None:
        self.match = match
        self._places: dict[Followed, Sequence[Place]] = {(): places}  # behind these tokens, by path
        self._shares: dict[Followed, dict[int, float]] = {}

    def behind(self, path: Followed) -> dict[int, float]:
        """Return what followed the match and these tokens, the most frequent first, as shares of all its places."""
        if path not in self._shares:
            following: dict[int, list[Place]] = {}
            for half, end in self._places.get(path, ()):
                if end < len(half.tokens) and half.tokens[end] != END:
                    following.setdefault(half.tokens[end], []).append((half, end + 1))
            best = sorted(following.items(), key=lambda item: -len(item[1]))
            self._places |= {(*path, token): places for token, places in best}
            self._shares[path] = {token: len(places) / len(self._places[()]) for token, places in best}
        return self._shares[path]

    def continuation(self, most: int, least: float) -> Continuation:
        """Return what followed: at each place the most frequent token.

        Args:
            most: tokens, if the match is as long.
            least: share of the occurrences that the tokens must have followed.
        """
        tokens, expected = Followed(), 0.0
        while len(tokens) < min(most, self.match):
            token, share = next(iter(self.behind(tokens).items()), (END, 0.0))
            if token == END or share < least:
                break
            tokens, expected = (*tokens, token), expected + share
        return Continuation(tokens, expected)


def find_matches(indices: Sequence[SuffixIndex], text: Sequence[int]) -> Matches:
    """Return the longest matches of a text's end in any of the indices."""
    found = [each for index in indices for each in index.continuations(text)]
    match = max([length for _, _, length in found], default=0)
    return Matches([(half, end) for half, end, length in found if length == match], match)


def _key(run: Sequence[int]) -> int:
    key = 0
    for token in run:
        key = key << 21 | token
    return key
