"""Bounded set of the domains (kinds of text) that clients name, for figures by domain."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

DEFAULT, OTHER = "default", "other"
IDLE_S = 3600.0  # a name that no request had for so long may be replaced by a new one


class Domains:
    """Up to `most` domain names of accepted requests. All other names share the label "other".

    A name keeps its place while it is used: new names never displace one in use. Refused requests take no place.

    Args:
        most: how many names have a label of their own, beside "default" and "other".
        fixed: an operator's list. If not empty, these names alone have labels.
        idle_s: a name unused for so long may be replaced. Must be longer than any request runs.
        on_dropped: called with the name that was replaced.
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
        self._most = most
        self._fixed = frozenset(fixed)
        self.idle_s = idle_s
        self._clock = clock
        self._on_dropped = on_dropped
        self._used: OrderedDict[str, float] = OrderedDict()  # by name: last acceptance in seconds, oldest first

    def label_of(self, name: str) -> str:
        """Return the label to count a request under. This takes no place: `accept` does."""
        if name in (DEFAULT, OTHER) or name in self._fixed or name in self._used:
            return name
        return name if not self._fixed and (len(self._used) < self._most or self._oldest_is_idle()) else OTHER

    def accept(self, name: str) -> None:
        """Note that a request of this domain was accepted. The name takes a place if one is free."""
        if self.label_of(name) != name or name in (DEFAULT, OTHER) or name in self._fixed:
            return
        if name not in self._used and len(self._used) >= self._most:
            dropped, _ = self._used.popitem(last=False)
            if self._on_dropped is not None:
                self._on_dropped(dropped)
        self._used[name] = self._clock()
        self._used.move_to_end(name)

    def _oldest_is_idle(self) -> bool:
        return self._clock() - next(iter(self._used.values())) >= self.idle_s
