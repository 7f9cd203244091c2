"""Optimism about drafts of which little is known: all at first, a new one, and the others when one has collapsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

ENOUGH_TOKENS = 64  # of a draft that are tried out of optimism, for each kind of request
OPTIMISTIC_ANSWERS = 64  # of a kind of request, for which there is optimism


class Optimism:
    """Says which drafts are taken to be as good as they may be, until enough of each was tried for a kind of request.

    A draft that is not chosen is not judged, and where many rows share passes, a trial of one row alone never pays. So
    rows are moved together by an optimistic estimate of a draft. After a collapse the others are taken to be as good as
    that draft was, for what was known of them may be old.

    Attributes:
        lasting: answers of a kind in which there is optimism, 0: there is none.
        chance: the least P(a token is accepted) that an optimistic estimate may have.
    """

    def __init__(self, lasting: int = OPTIMISTIC_ANSWERS) -> None:
        self.chance = 0.0
        self.lasting = lasting
        self._since = 0  # answers begun since a draft collapsed
        self._collapsed = set[str]()
        self._begun = Counter[Hashable]()
        self._tried = Counter[tuple[str, Hashable]]()  # tokens

    @property
    def is_on(self) -> bool:
        """True if drafts are tried that are not expected to be the best."""
        return self.lasting > 0

    def tries(self, source: str, kind: Hashable) -> bool:
        """Return True for a draft that is estimated optimistically where requests are of this kind."""
        optimistic = self._begun[kind] < self.lasting and source not in self._collapsed
        return optimistic and self._tried[source, kind] < ENOUGH_TOKENS

    def collapsed(self, source: str, chance: float) -> None:
        """Be optimistic about all drafts but this collapsed one, and those tried since another one collapsed.

        Args:
            chance: P(a token of it was accepted).
        """
        if not self.chance:
            self._collapsed.clear()
            self._tried.clear()
        self._begun.clear()
        self._collapsed.add(source)
        self.chance, self._since = chance if self.is_on else 0.0, 0

    def changed(self, source: str) -> None:
        """Be optimistic about a draft that was replaced."""
        self._begun.clear()
        self._collapsed.discard(source)
        self._tried = Counter({key: tried for key, tried in self._tried.items() if key[0] != source})

    def begun(self, kind: Hashable) -> None:
        """Count a new answer."""
        self._begun[kind] += 1
        self._since += 1
        if self._since >= self.lasting:
            self.chance = 0.0

    def saw(self, source: str, kind: Hashable, tried: int) -> None:
        """Count tokens of a draft that were tried."""
        self._tried[source, kind] += tried
