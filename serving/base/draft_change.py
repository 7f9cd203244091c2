"""News that one of several drafts is another."""

from __future__ import annotations

from typing import NamedTuple


class DraftChange(NamedTuple):
    """One of several drafts is another from now on, new, or gone.

    acceptance: of the new draft over that of the old one, None: not known.
    like: the draft whose passes cost `1 / times` as much as the new one's, None: not known.
    """

    source: str
    acceptance: float | None = None
    like: str | None = None
    times: float = 1.0
