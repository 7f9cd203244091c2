"""Rows as controllers see them, with and without sources with likely nodes."""

from __future__ import annotations

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import Option, RowView, without_likely
from distillspec.serving.base.tree import DRAFT, NGRAM


def test_a_row_without_its_naming_sources_has_the_others() -> None:
    nodes = LikelyNodes(NGRAM, (0.5,), (-1,), (1,))
    row = RowView("a", 100, 4, False, source=NGRAM, likely=nodes, others=(Option(4),))
    alone = without_likely(row)
    assert (alone.source, alone.limit, alone.others, alone.likely) == (DRAFT, 4, (), None)
    assert without_likely(alone) is alone
    assert without_likely(row._replace(others=())).limit == 0, "nothing is left to draft for it"
