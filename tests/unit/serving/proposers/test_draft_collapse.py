"""A draft whose acceptance collapses is told from one that was never good."""

from __future__ import annotations

import pytest

from distillspec.serving.base.tree import NGRAM, TokenTree, merged
from distillspec.serving.proposers.draft_collapse import BLOCK, DraftCollapse

TREE = TokenTree.chain((5, 6), source="a")
BEHIND = merged([TokenTree.chain((9,), source=NGRAM), TREE])


def block(collapse: DraftCollapse, accepted: int) -> bool:
    for number in range(BLOCK):
        collapse.saw("a", TREE, (0,) if number < accepted else ())
    assert collapse.is_judged
    return collapse.has_collapsed


@pytest.mark.parametrize(("usual", "collapsed"), [(0.5, True), (0.2, True), (0.1, False), (None, False)])
def test_it_is_a_collapse_only_where_an_evaluation_says_that_it_was_good(usual: float | None, collapsed: bool) -> None:
    assert block(DraftCollapse(usual), 3) == collapsed


def test_without_an_evaluation_the_best_block_says_it() -> None:
    collapse = DraftCollapse(None)
    assert [block(collapse, accepted) for accepted in (3, 60, 30, 3, 4)] == [False, False, False, True, False]


def test_only_first_tokens_that_were_tried_count() -> None:
    collapse, (ngrams, own) = DraftCollapse(0.5), (BEHIND.groups_at(-1)[0].nodes[0], BEHIND.groups_at(-1)[1].nodes[0])
    collapse.saw("a", BEHIND, (ngrams,))
    collapse.saw("b", TREE, (0,))
    assert collapse.tried == 0
    collapse.saw("a", BEHIND, (own,))
    collapse.saw("a", BEHIND, ())
    assert (collapse.tried, collapse.accepted) == (2, 1)
