"""Which kinds of text are followed on their own: clients name them, so there must be an end to it."""

from __future__ import annotations

DEFAULT, OTHER = "default", "other"


class Domains:
    """The first `most` names that come are told apart; all further ones are "other" together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known = {DEFAULT, OTHER}
        self._own = 0

    def told_apart(self, name: str) -> str:
        """The name under which such a request is counted and logged."""
        if name in self._known:
            return name
        if self._own >= self._most:
            return OTHER
        self._own += 1
        self._known.add(name)
        return name
