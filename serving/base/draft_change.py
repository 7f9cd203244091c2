"""News that a draft is another."""

from __future__ import annotations

from typing import NamedTuple

from distillspec.serving.base.tree import DRAFT


class DraftChange(NamedTuple):
    """An only draft, or one of several, is another from now on, new, or gone.

    source: its name where there are several, else `DRAFT`.
    acceptance: of the new draft over that of the old one, None: not known.
    like: the draft whose passes cost `1 / times` as much as the new one's, None: not known.
    """

    source: str = DRAFT
    acceptance: float | None = None
    like: str | None = None
    times: float = 1.0
