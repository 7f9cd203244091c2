"""Rows of the next step as length controllers see them, with the sources that could draft for each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.tree import DRAFT

ANY = 1 << 30  # levels or tokens, where nothing limits them
BEHIND = "behind others"  # evidence of drafts whose tokens are tried after those of another source


class Option(NamedTuple):
    """One source that could draft for a row, or a draft model behind the likely nodes of another source."""

    limit: int  # the most levels: the source's, in a row's view by parameters, room and cache too. 0: none
    drafted_by_model: bool = True  # a draft model would run
    match: int = 0  # how sure a source without a model is, such as tokens of text that a lookup found again
    unread_tokens: int = 0  # tokens of its text that the draft model has not read
    source: str = DRAFT
    drafts_block: bool = False  # one pass of the draft model gives all its tokens
    wide: bool = False  # its levels may have siblings
    likely: LikelyNodes | None = None  # its nodes with their chances, where the source knows them

    def within(self, levels: int) -> Option:
        """Return the same with at most so many levels."""
        return self._replace(**_within(self, levels))


NOTHING: tuple[Option, ...] = (Option(0),)  # foreseen of a draft
ANYTHING: tuple[Option, ...] = (Option(ANY),)


class RowView(NamedTuple):
    """One decoding row as a controller sees it. The fields from `limit` to `likely` are an `Option`'s."""

    sequence_id: str
    context_tokens: int
    limit: int
    drafted_by_model: bool = True
    match: int = 0
    unread_tokens: int = 0
    source: str = DRAFT
    drafts_block: bool = False
    wide: bool = False
    likely: LikelyNodes | None = None
    max_time_per_token_s: float | None = None  # this request's own bound, None for the engine's
    others: tuple[Option, ...] = ()  # other sources
    domain: str = "default"  # kind of text, in the caller's words
    prompt: tuple[int, ...] = ()
    belief: float | None = None  # P(a drafted token is accepted) by what is known of the request, None: not known
    room: int = ANY  # the most tokens that it may still write

    @property
    def own(self) -> Option:
        """Its own source."""
        return Option._make(list(self)[OPTION_FIELDS])

    @property
    def options(self) -> tuple[Option, ...]:
        """All sources, its own first."""
        return (self.own, *self.others)

    def with_option(self, option: Option) -> RowView:
        """Return the row with this source alone."""
        return self.with_options(option, (), self.belief if option.drafted_by_model else None)

    def with_options(self, own: Option, others: tuple[Option, ...], belief: float | None) -> RowView:
        """Return the row with these sources. It is made field by field: every step does so for many rows."""
        bound, rest = self.max_time_per_token_s, (self.domain, self.prompt, belief, self.room)
        return RowView._make((*self[: OPTION_FIELDS.start], *own, bound, others, *rest))

    def within(self, levels: int) -> RowView:
        """Return the row for which no source drafts more than so many levels."""
        return self._replace(**_within(self, levels), others=tuple([other.within(levels) for other in self.others]))


OPTION_FIELDS = slice(RowView._fields.index("limit"), RowView._fields.index("likely") + 1)  # of a row's own source


def _within(option: Option | RowView, levels: int) -> dict[str, Any]:
    """Return the fields that a bound on levels changes."""
    likely = None if option.likely is None else option.likely.within(levels)
    return {"limit": min(option.limit, levels), "likely": likely}


def evidence(row: RowView | Option) -> Hashable:
    """Return what acceptance is told apart by: source and match, or one of several drafts. 0 for an only draft.

    A draft whose tokens are tried behind a row's likely nodes has evidence of its own: of harder text.
    """
    if row.match:
        return row.source, row.match
    kind = row.source if row.drafted_by_model and row.source != DRAFT else 0
    return (kind, BEHIND) if is_joined(row) else kind


def is_joined(row: RowView | Option) -> bool:
    """Return True for a row that a draft model drafts for, behind the likely nodes of another source."""
    return row.drafted_by_model and row.likely is not None


def has_likely_nodes(row: RowView) -> bool:
    """Return True if any of the row's sources has likely nodes."""
    return row.likely is not None or any(option.likely is not None for option in row.others)


def for_chains(row: RowView) -> RowView:
    """Return the row as chains of one length for all, or within bounds, are planned for it.

    Sources with likely nodes are left out. Where there is no other one, the first drafts a chain, by its match.
    """
    if row.likely is not None and all(option.likely is not None for option in row.others):
        return row.with_option(row.own._replace(likely=None))
    return without_likely(row)


def without_likely(row: RowView) -> RowView:
    """Return the row without the sources with likely nodes."""
    if not has_likely_nodes(row):
        return row
    remaining = [option for option in row.options if option.likely is None]
    if not remaining:
        return row._replace(limit=0, match=0, likely=None)
    return row.with_option(remaining[0])._replace(others=tuple(remaining[1:]))


@dataclass(frozen=True)
class BatchView:
    """Batch of the next step: decoding rows, prompt tokens read beside them, waiting requests."""

    rows: tuple[RowView, ...]
    prefill_tokens: int = 0
    waiting: int = 0

    @property
    def drafts_block(self) -> bool:
        """True if one pass of the draft model gives all its tokens."""
        return any(row.drafts_block for row in self.rows)
