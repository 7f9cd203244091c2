"""Which kinds of text are followed on their own: clients name them, so there must be an end to it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

DEFAULT, OTHER = "default", "other"
IDLE_S = 3600.0  # a name that no request had for so long makes room for a new one


class Domains:
    """Up to `most` names of accepted requests are told apart; all others are "other" together.

    A name keeps its place while it is used: a flood of new names displaces none. Refused requests do not count.

    Args:
        most: how many names, beside "default" and "other".
        fixed: an operator's list; then these names alone, for good.
        idle_s: a name unused for so long may be replaced; longer than any request lives.
        on_dropped: told the name that was replaced, so that nothing goes on counting it.
    """

    def __init__(
        self,
        most: int,
        *,
        fixed: Sequence[str] = (),
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        on_dropped: Callable[[str], None] | None = None,
    ) -> None:
        self._most, self._fixed, self._idle_s, self._clock = most, frozenset(fixed), idle_s, clock
        self._on_dropped = on_dropped
        self._used: OrderedDict[str, float] = OrderedDict()  # name → when it was last accepted, oldest first

    def told_apart(self, name: str) -> str:
        """The name to count this request under. Reserves nothing; call `accepted` for that."""
        if name in (DEFAULT, OTHER) or name in self._fixed or name in self._used:
            return name
        return name if not self._fixed and (len(self._used) < self._most or self._oldest_is_idle()) else OTHER

    def accepted(self, name: str) -> None:
        """A request of this domain was accepted."""
        if self.told_apart(name) != name or name in (DEFAULT, OTHER) or name in self._fixed:
            return
        if name not in self._used and len(self._used) >= self._most:
            dropped, _ = self._used.popitem(last=False)
            if self._on_dropped is not None:
                self._on_dropped(dropped)
        self._used[name] = self._clock()
        self._used.move_to_end(name)

    def _oldest_is_idle(self) -> bool:
        return self._clock() - next(iter(self._used.values())) >= self._idle_s
