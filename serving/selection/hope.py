"""Hope for the other drafts, where one has collapsed: they are tried anew, whatever was known of them."""

from __future__ import annotations

from collections import Counter

ENOUGH = 64  # tokens of a draft that are tried in hope
LASTING = 64  # answers begun after a collapse, in which there is hope


class Hope:
    """Expects of each other draft that it is as good as the one that has collapsed was, until enough of it was tried.

    A draft that is not chosen is not judged, and what was known of it may be old. Where many rows share passes, a trial
    of one row never pays, so all rows that hope are moved together.

    Attributes:
        chance: P(a token is accepted) that is hoped for.
    """

    def __init__(self) -> None:
        self.chance = 0.0
        self._left = 0  # answers
        self._tried = Counter[str]()

    @property
    def holds(self) -> bool:
        """True while some drafts may be hoped for."""
        return self._left > 0

    def begin(self, source: str, chance: float) -> None:
        """Hope for all drafts but this one, which has collapsed, and but those that were tried since another had.

        Args:
            chance: P(a token of it was accepted).
        """
        if not self.holds:
            self._tried.clear()
        self.chance, self._left = chance, LASTING
        self._tried[source] = ENOUGH

    def of(self, source: str, chance: float) -> float:
        """Return P(a token of a draft is accepted) that is hoped for, where it is expected to be `chance`."""
        return max(chance, self.chance) if self.holds and self._tried[source] < ENOUGH else chance

    def begun(self) -> None:
        """Count a new answer."""
        self._left -= self.holds

    def saw(self, source: str, tried: int) -> None:
        """Count tokens of a draft that were tried."""
        self._tried[source] += tried

    def forget(self, source: str) -> None:
        """Forget the trials of a draft that is another now."""
        del self._tried[source]
